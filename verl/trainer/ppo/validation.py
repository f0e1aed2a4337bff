"""Scoring the validation set: mean, best and majority of k by data source.

Knows batches and rewards; the responses are the trainer's to sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl.trainer.ppo.run_log import describe, dump_samples, ground_truths

CORE_NAMES = ("mean@", "maj@", "best@")


def validate(
    batches: Iterable[DataProto],
    score: Callable[[DataProto], tuple[Any, dict[str, list]]],
    decode: Callable[[DataProto], tuple[list[str], list[str]]],
    dump_to: Path | None = None,
    step: int = 0,
    source_key: str = "data_source",
) -> tuple[dict[str, float], list[tuple[str, str, float]]]:
    """Score every validation response.

    Args:
        batches: prompts with responses, those to one prompt under one ``uid``.
        score: batch -> (B, R) rewards and extra columns.
        decode: batch -> texts of prompts and responses.
        dump_to: folder of ``{step}.jsonl``, or None.
        source_key: column of the data source, by which metrics are grouped (``data.reward_fn_key``).

    Returns:
        metrics under the names ``val-core/...`` and ``val-aux/...``, and (input, output, score) of every sample.
    """
    inputs, outputs, sources, uids, gold = [], [], [], [], []
    columns: dict[str, list] = {"reward": []}
    described: dict[str, list] = {}
    for batch in batches:
        rewards, extra = score(batch)
        columns["reward"] += rewards.sum(-1).tolist()
        for name, values in extra.items():
            if name != "reward" and len(values) == len(batch):
                columns.setdefault(name, []).extend(values)
        texts = decode(batch)
        inputs += texts[0]
        outputs += texts[1]
        rows = batch.non_tensor_batch
        sources += rows.get(source_key, np.array(["unknown"] * len(batch), dtype=object)).tolist()
        uids += rows["uid"].tolist()
        gold += ground_truths(batch)
        if dump_to is not None:
            for name, values in describe(batch, source_key).items():
                described.setdefault(name, []).extend(values)
    samples = list(zip(inputs, outputs, columns["reward"], strict=True))
    if dump_to is not None:
        dump_samples(dump_to, step, inputs, outputs, columns["reward"], gold, {**described, **columns})
    columns = {name: values for name, values in columns.items() if len(values) == len(samples)}
    return name_metrics(process_validation_metrics(sources, uids, columns)), samples


def name_metrics(by_source: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """Flatten source -> variable -> metric; the few numbers to look at go to ``val-core``, the rest to ``val-aux``.

    Core are mean, maj and best of the largest k, of ``acc`` where the reward function reports it, else of ``reward``.
    """
    metrics: dict[str, float] = {}
    for source, variables in by_source.items():
        core = "acc" if "acc" in variables else "reward"
        for variable, values in variables.items():
            largest = max((int(name.split("@")[1].split("/")[0]) for name in values), default=1)
            for name, value in values.items():
                is_core = variable == core and name.startswith(CORE_NAMES) and f"@{largest}" in name
                is_core = is_core and (name.startswith("mean@") or name.endswith("/mean"))
                metrics[f"{'val-core' if is_core else 'val-aux'}/{source}/{variable}/{name}"] = value
    return metrics
