"""Where a run tells what it does: the terminal, the loggers, and samples for a person to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.protocol import DataProto
from verl.telemetry.progress import Progress
from verl.telemetry.rollout_trace import Trace, open_trace
from verl.telemetry.tracking import Tracking, ValidationGenerationsLogger, check_backends
from verl.trainer.ppo.samples import dump_batch, reward_columns, shown_samples
from verl.trainer.run_folder import open_run_record
from verl.utils.config import typed_config

# -- One record a sample of a scored batch, for the trace (`verl.telemetry.rollout_trace`) -----------------------------


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
    columns |= {name: [_json_value(value) for value in batch.non_tensor_batch[name]] for name in extra}
    rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    number = {uid: i for i, uid in enumerate(dict.fromkeys(columns["uid"]))}
    return [{"step": step, **row} for row in sorted(rows, key=lambda row: number[row["uid"]])]


def _json_value(value: Any) -> Any:
    """JSON form of what numpy and torch hand out."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)


class RunLog:
    """What ``trainer.logger``, ``rollout.trace`` and the keys of samples ask for.

    Args:
        config: the whole tree.
        tokenizer: of the policy.

    Attributes:
        progress: the terminal.
        places: label -> where the loggers that write files put them.

    Raises:
        ImportError: a package that a logger or the trace needs is missing.
    """

    def __init__(self, config: Any, tokenizer: Any) -> None:
        check_backends(config.trainer.logger)
        self.config, self.tokenizer = config, tokenizer
        self.trace = open_rollout_trace(config)
        self.progress = Progress(0, enabled=False)
        self.places: dict[str, Any] = {}
        self._generations = ValidationGenerationsLogger()

    def open(self, total_steps: int) -> None:
        """Begin the line of progress, and start the loggers."""
        keys = self.config.trainer
        self._record = open_run_record(self.config)  # of a script that drives a trainer of its own
        self.progress = Progress(total_steps, enabled=keys.progress_bar)
        self._tracking = Tracking(
            keys.project_name,
            keys.experiment_name,
            default_backend=keys.logger,
            config=typed_config(self.config).to_dict(),
        )
        self._generations = ValidationGenerationsLogger(tracking=self._tracking)
        self.places = _places(self._tracking)

    def say(self, sentence: str) -> None:
        """Tell the user, above the line of progress."""
        self.progress.say(sentence)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give the numbers of a step to the loggers."""
        self._tracking.log(metrics, step=step)

    def dump(self, step: int, batch: DataProto) -> None:
        """Write the samples of a step to ``trainer.rollout_data_dir``."""
        config = self.config
        dump_batch(config.trainer.rollout_data_dir, step, batch, self.tokenizer, config.data.reward_fn_key)

    def record(self, step: int, batch: DataProto, seconds: float) -> None:
        """Give the samples of a step, which took so long, to ``rollout.trace``."""
        wants_text = self.config.actor_rollout_ref.rollout.trace.token2text
        decode = self.tokenizer.batch_decode if wants_text else None
        self.trace.log(step, sample_records(batch, step, seconds, reward_columns(batch), decode))

    def show(self, step: int, samples: Sequence[tuple[str, str, float]]) -> None:
        """Show ``trainer.log_val_generations`` of the samples in the loggers, the same prompts every time."""
        if count := self.config.trainer.log_val_generations:
            self._generations.log(self.config.trainer.logger, shown_samples(samples, count), step)

    def close(self) -> None:
        """Finish all that is open."""
        if self.trace is not None:
            self.trace.finish()
        self._tracking.finish()
        self.progress.finish()
        if self._record is not None:
            self._record.close()


def _places(tracking: Tracking) -> dict[str, Any]:
    attributes = {"metrics": ("file", "path"), "tensorboard": ("tensorboard", "folder")}
    return {
        label: getattr(tracking.logger[name], attribute)
        for label, (name, attribute) in attributes.items()
        if name in tracking.logger
    }
