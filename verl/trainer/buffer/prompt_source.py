"""Where the prompts of a step come from: batches of the loader, or a pool that takes prompts back.

A pool is there where a step does not train on all it draws: with ``algorithm.filter_groups``, and with
``rollout.mode=async``, which may put prompts off. What it holds is part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.protocol import DataProto
from verl.trainer.buffer.group_filter import GroupFilter
from verl.trainer.buffer.long_tails import GroupSampler
from verl.trainer.buffer.prompt_pool import STATE_FILE, PromptPool, load_pool, save_pool


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
