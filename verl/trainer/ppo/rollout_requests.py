"""What a rollout is asked, what comes back of it, and what its engines counted.

Knows columns and worker groups; not which prompts a step takes, nor what responses are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto
from verl.telemetry.metric import reduce_metrics

PROMPT_COLUMNS = ("input_ids", "attention_mask", "position_ids")


def uids(prefix: str, count: int, first: int = 0) -> np.ndarray:
    """Names for the prompts of a batch, which count from ``first``."""
    return np.array([f"{prefix}-{first + i}" for i in range(count)], dtype=object)


def make_request(
    prompts: DataProto, seeds: Sequence[int], step: int, validate: bool, weight_sync_freq: int
) -> DataProto:
    """The columns a rollout reads of ``prompts`` (which keep all), with one seed a sample.

    Args:
        step: of training, at which is asked.
        weight_sync_freq: ``trainer.weight_sync_freq``.
    """
    request = prompts.select(batch_keys=list(PROMPT_COLUMNS))
    request.meta_info = {"validate": validate, "global_steps": step}
    prompts.meta_info.update(request.meta_info)
    if weight_sync_freq > 1:
        request.meta_info["weight_sync_freq"] = weight_sync_freq
    request.put("seeds", torch.tensor(seeds))
    return request


def join_generated(prompts: DataProto, generated: DataProto) -> DataProto:
    """What was generated, with the columns of its prompts; where both have one of a name, the prompts' stays."""
    prompts.pop(batch_keys=list(PROMPT_COLUMNS))
    known = prompts.non_tensor_batch
    generated.non_tensor_batch = {k: v for k, v in generated.non_tensor_batch.items() if k not in known}
    return prompts.union(generated)


def engine_metrics(group: Any) -> dict[str, float]:
    """What the rollout engines counted since the last call, as ``rollout/engine/*``: averaged over the ranks."""
    if not hasattr(group, "rollout_metrics"):  # workers of a user's own
        return {}
    by_rank = [numbers for numbers in group.rollout_metrics() if numbers.get("requests")]
    names = dict.fromkeys(name for numbers in by_rank for name in numbers)
    lists = {f"rollout/engine/{name}": [n[name] for n in by_rank if name in n] for name in names}
    return reduce_metrics(lists)
