"""A scored batch as one record a sample, for the trace (`verl.utils.rollout_trace`) and whoever reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verl.protocol import DataProto
from verl.utils.rollout_trace import Trace, open_trace

_FACTS = {"finish_reason": "finish_reason", "version": "rollout_version", "seconds": "rollout_seconds"}
"""Names in a record -> columns that samplers add."""


def open_rollout_trace(config: Any) -> Trace | None:
    """The trace that ``rollout.trace`` asks for, or None.

    Raises:
        ImportError: its package is missing.
    """
    section, trainer = config.actor_rollout_ref.rollout.trace, config.trainer
    if section.backend is None:
        return None
    folder = section.dir or Path(trainer.default_local_dir) / "rollout_trace"
    return open_trace(section.backend, trainer.project_name, trainer.experiment_name, folder)


def sample_records(
    batch: DataProto,
    step: int,
    seconds: float,
    extra: Sequence[str] = (),
    decode: Callable[[list[list[int]]], list[str]] | None = None,
) -> list[dict[str, Any]]:
    """One record a row: step, uid, prompt_ids, response_ids, score, finish_reason, version, seconds.

    ``version`` is that of the weights that drew the row, ``seconds`` what its sampling took; where one call draws the
    whole batch, what that took. The rows of one uid follow one another.

    Args:
        seconds: of the batch.
        extra: further columns to take along, those of the reward function.
        decode: also give ``prompt`` and ``response`` as text, special tokens included.
    """
    columns: dict[str, list[Any]] = {
        "uid": [str(uid) for uid in batch.non_tensor_batch["uid"]],
        "prompt_ids": [row.tolist() for row in batch.ragged("prompts").rows()],
        "response_ids": [row.tolist() for row in batch.ragged("responses").rows()],
        "score": batch.column("token_level_scores").sum(-1).tolist(),
    }
    if decode is not None:
        columns |= {"prompt": decode(columns["prompt_ids"]), "response": decode(columns["response_ids"])}
    columns["seconds"] = [seconds] * len(batch)
    for name, column in _FACTS.items():
        if column in batch.non_tensor_batch:
            columns[name] = batch.non_tensor_batch[column].tolist()
    if "rollout_versions" in batch:  # of each token, where weights changed under a response
        columns["versions"] = [row.tolist() for row in batch.ragged("rollout_versions").rows()]
    columns |= {name: [_plain(value) for value in batch.non_tensor_batch[name]] for name in extra}
    rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    number = {uid: i for i, uid in enumerate(dict.fromkeys(columns["uid"]))}
    return [{"step": step, **row} for row in sorted(rows, key=lambda row: number[row["uid"]])]


def _plain(value: Any) -> Any:
    """JSON form of what numpy and torch hand out."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)
