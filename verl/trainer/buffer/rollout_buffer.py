"""What a rollout is asked, what comes back of it, and what its engines counted.

Knows columns and worker groups; not which prompts a step takes, nor what responses are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.config.rollout import needs_agent_loops
from verl.data.table import distinct_values
from verl.protocol import DataProto
from verl.telemetry.metric import reduce_metrics
from verl.trainer.buffer.group_filter import GroupFilter
from verl.trainer.buffer.over_sampling import GroupSampler
from verl.trainer.buffer.prompt_pool import STATE_FILE, PromptPool, load_pool, save_pool

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


# -- Where the prompts of a step come from: batches of the loader, or a pool that takes prompts back -----------------


class PromptSource:
    """The pool of a run, if it needs one, and who uses it.

    Args:
        config: the whole tree.
        loader: of the training prompts.
        say: tells the user a sentence.

    Attributes:
        group_filter: what chooses the groups of a step; None where all are trained on.
        group_sampler: what draws training batches request by request; None where one call samples a whole batch.
    """

    def __init__(self, config: Any, loader: Any, say: Callable[[str], None]) -> None:
        self.group_filter = _group_filter(config, loader, say)
        pool = self.group_filter and self.group_filter.pool
        self.group_sampler = _group_sampler(config, loader, pool)

    @property
    def has_pool(self) -> bool:
        return self.group_sampler is not None or self.group_filter is not None

    def take(self, step: int) -> DataProto:
        """The next prompts out of the pool; a step may ask several times."""
        if self.group_sampler is None:
            return self.group_filter.take(step)
        prompts = self.group_sampler.take(step)
        return prompts if self.group_filter is None else self.group_filter.note(prompts)

    def batches_read(self, step: int) -> int:
        """Batches of the loader that ``step`` steps took."""
        return step if self.group_filter is None else self.group_filter.pool.batches_read

    def save(self, folder: Path) -> None:
        """Write what the pool holds into a step's folder."""
        if self.group_sampler is not None:
            self.group_sampler.save(folder)
        elif self.group_filter is not None:
            save_pool(folder, self.group_filter.pool)
        else:
            (folder / STATE_FILE).unlink(missing_ok=True)  # of an earlier run through this step

    def load(self, folder: Path, step: int) -> str:
        """Take over what the run of a checkpoint had in its pool; returns a remark for the user, mostly empty."""
        remark = ""
        if self.group_sampler is not None:
            self.group_sampler.load(folder)
        elif self.group_filter is not None:
            load_pool(folder, self.group_filter.pool)
        elif (folder / STATE_FILE).exists():
            remark = "; prompts that rollout.mode=async or filter_groups had put back are left out"
        if self.group_filter is not None and not self.group_filter.pool.batches_read:  # saved by a run without it
            self.group_filter.pool.batches_read = step
        return remark


def _group_filter(config: Any, loader: Any, say: Callable[[str], None]) -> GroupFilter | None:
    filtering, data = config.algorithm.filter_groups, config.data
    if not filtering.enable:
        return None
    return GroupFilter(filtering, PromptPool(loader), data.train_batch_size, data.prompts_per_step, say)


def _group_sampler(config: Any, loader: Any, pool: PromptPool | None) -> GroupSampler | None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.mode != "async" or rollout.async_ratio or rollout.skip_rollout:  # asked for as a whole
        return None
    pool = PromptPool(loader) if pool is None else pool
    return GroupSampler(rollout, pool, config.data.prompts_per_step, config.trainer.seed)


# -- Names of agent loops in the rows --------------------------------------------------------------------------------


AGENT_COLUMN = "agent_name"


def check_agent_names(config: Any, datasets: Iterable[Any]) -> None:
    """Refuse rows whose ``agent_name`` no agent loop of this run has; datasets that are not rows of files are left out.

    Raises:
        ValueError: see `agent_name_problem`.
    """
    if problem := agent_name_problem(config.actor_rollout_ref.rollout, distinct_values(datasets, AGENT_COLUMN)):
        raise ValueError(problem)


def agent_name_problem(rollout: Any, names: Iterable[Any]) -> str | None:
    """Why rows with these values of ``agent_name`` cannot be trained on, in words; None: they can.

    Args:
        rollout: the section ``actor_rollout_ref.rollout``. With ``mode=async`` the user's agent loops are imported.
        names: values of the column; empty ones are of ``rollout.agent.default_agent_loop``.
    """
    names = sorted({str(name) for name in names if name})
    if rollout.mode != "async":
        return needs_agent_loops(rollout.mode, names)
    from verl.agents.base import agent_loop, load_agent_loops

    if path := rollout.agent.agent_loop_config_path:
        load_agent_loops(path)
    for name in [*names, rollout.agent.default_agent_loop]:
        try:
            agent_loop(name)
        except ValueError as error:
            return str(error)
    return None
