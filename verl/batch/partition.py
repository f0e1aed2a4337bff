"""Partition of a batch: the rows of each data-parallel rank, and of each of its optimizer steps.

The driver makes one `PartitionPlan` a step, which the batch carries (``DataProto.partition_plan``); a call is split by
it when it is sent. Works on lengths and prompt ids; knows no columns, no ranks, no models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from verl.batch.balancing import balanced_parts
from verl.utils.py_functional import derive_seed


class RowCost(NamedTuple):
    """Cost of a row of l tokens, as an integer: ``l * (break_even + l)``.

    The first part is the work of the weight matrices, the second that of attention.
    """

    break_even: int = 32768
    """Tokens at which attention costs as much as everything else: about 20 to 70 thousand for dense models."""

    def of(self, lengths: np.ndarray) -> np.ndarray:
        lengths = np.asarray(lengths, dtype=np.int64)
        return lengths * (self.break_even + lengths)


class MiniBatches(NamedTuple):
    """Division of a batch into optimizer steps, the same rows a step for any number of ranks."""

    rows: int
    """Rows of one step, over all ranks; the last of an epoch has what is left."""
    epochs: int = 1
    shuffle: bool = False
    """Shuffle the rows of the whole batch in each epoch; else the steps take them in their order."""
    seed: int = 0

    @classmethod
    def of(cls, role: Any, n: int, seed: int = 0) -> MiniBatches:
        """Return those of a section ``actor`` or ``critic``, whose ``ppo_mini_batch_size`` counts prompts.

        Args:
            n: responses to a prompt.
        """
        return cls(role.ppo_mini_batch_size * n, role.ppo_epochs, role.shuffle, seed)

    def steps(self, count: int, trajectories: np.ndarray | None = None) -> list[np.ndarray]:
        """Row numbers of each optimizer step on a batch of ``count`` rows, all epochs in a row.

        Args:
            trajectories: (count,) number of each row's trajectory, where some have several rows: they count as one row.
        """
        if trajectories is not None:
            whole = self.steps(int(trajectories.max()) + 1)
            return [np.concatenate([np.flatnonzero(trajectories == number) for number in step]) for step in whole]
        steps = []
        for epoch in range(self.epochs):
            order = np.arange(count)
            if self.shuffle:
                generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
                order = torch.randperm(count, generator=generator).numpy()
            steps += [order[first : first + self.rows] for first in range(0, count, self.rows)]
        return steps


class RowLengths(NamedTuple):
    """Lengths and groups of the rows of a batch: all that its partition depends on."""

    lengths: np.ndarray
    """(B,) valid tokens."""
    prompt_lengths: np.ndarray | None = None
    """(B,), where responses to one prompt stay on one rank."""
    groups: np.ndarray | None = None
    """(B,) int: equal numbers are responses to one prompt."""
    trajectories: np.ndarray | None = None
    """(B,) int from 0: equal numbers are rows of one trajectory; None: each row is one."""


def row_lengths(data: Any, with_groups: bool = False) -> RowLengths:
    """Read the lengths of a DataProto's rows from ``input_ids`` and, ``with_groups``, ``responses`` and ``uid``."""
    lengths = data.ragged("input_ids").layout.lengths.numpy()
    uids = data.non_tensor_batch.get("uid")
    names = data.non_tensor_batch.get("trajectory_id")
    trajectories = None if names is None else _numbers(names)
    if not with_groups or uids is None:
        return RowLengths(lengths, trajectories=trajectories)
    prompt_lengths = lengths - data.ragged("responses").layout.lengths.numpy()
    return RowLengths(lengths, prompt_lengths, _numbers(uids), trajectories)


def _numbers(names: Any) -> np.ndarray:
    """Return (B,) int64: equal names have equal numbers, from 0 in the order they come."""
    numbers: dict[Any, int] = {}
    return np.fromiter((numbers.setdefault(name, len(numbers)) for name in names), np.int64, len(names))


class Partition(NamedTuple):
    """Rows of a batch by data-parallel rank."""

    num_rows: int
    """Rows of the batch."""
    rows: list[np.ndarray]
    """Of each rank, the numbers of its rows."""
    has_filler: list[bool]
    """True if the last of a rank's rows is a filler: in some step at least the rank has no row of its own."""
    steps: list[list[np.ndarray]] | None
    """Of each rank, for each optimizer step the row numbers within the rank's part; None for calls without steps."""

    def output_positions(self) -> np.ndarray | None:
        """Return for each row of the batch its position among the joined outputs of all ranks.

        None if some row is worked on twice, as in two epochs of different mini-batches.
        """
        positions, first, found = np.empty(self.num_rows, dtype=np.int64), 0, 0
        for rows, has_filler in zip(self.rows, self.has_filler, strict=True):
            own = len(rows) - has_filler
            positions[rows[:own]] = first + np.arange(own)
            first, found = first + len(rows), found + own
        return positions if found == self.num_rows else None


class CallPlan(NamedTuple):
    """Requirements of one worker method on the partition of its batch."""

    by_tokens: bool
    """True if its forward passes are split by a token budget. If they hold a fixed number of rows, ranks get equal
    numbers of rows (but for one): all ranks run as many forward passes as the one that has most."""
    mini_batches: MiniBatches | None = None
    """Optimizer steps of an update; None for other calls."""
    follows: str | None = None
    """An update whose ranks get the same rows, in its first epoch, so that each row stays with one rank; None: the
    rows are divided for this call alone, as they are where only this call needs equal numbers of rows."""


class PartitionPlan(NamedTuple):
    """Division of a batch's rows among data-parallel ranks, for each worker method that is called on it."""

    calls: Mapping[str, CallPlan]
    """Method -> its `CallPlan`. Other methods get equal parts of the rows in their order."""
    cost: RowCost | None = None
    """Cost of a row; None: rows are not balanced, each rank gets consecutive ones."""
    groups_together: bool = False
    """Keep responses to one prompt on one rank: their common prompt is then computed once."""
    together: int = 1
    """So many consecutive rows stay on one rank: 2 for pairs. It divides the rows of every call and step."""

    def partition(self, method: str, rows: RowLengths, ranks: int) -> Partition:
        """Divide ``rows`` among ``ranks`` for a call of ``method``."""
        call, count = self.calls[method], len(rows.lengths)
        update = self.calls.get(call.follows or "")
        if update is not None and update.mini_batches is not None and (call.by_tokens or not update.by_tokens):
            once = update.mini_batches._replace(epochs=1)
            steps = self._divided_steps(once, rows, ranks, update.by_tokens)
            divided = [[np.concatenate(of_rank) for of_rank in zip(*steps, strict=True)]]
        elif call.mini_batches is None:
            divided = [self.divide(np.arange(count), rows, ranks, call.by_tokens)]
        else:
            divided = self._divided_steps(call.mini_batches, rows, ranks, call.by_tokens)
        filler = int(np.argmin(rows.lengths))
        partition = Partition(count, [], [], None if call.mini_batches is None else [])
        for steps in zip(*divided, strict=True):  # of one rank
            mine = np.unique(np.concatenate(steps))
            has_filler = any(not len(step) for step in steps)
            partition.rows.append(np.append(mine, filler) if has_filler else mine)
            partition.has_filler.append(has_filler)
            if partition.steps is not None:
                in_part = [np.searchsorted(mine, step) if len(step) else np.array([len(mine)]) for step in steps]
                partition.steps.append(in_part)
        return partition

    def _divided_steps(
        self, mini: MiniBatches, rows: RowLengths, ranks: int, by_tokens: bool
    ) -> list[list[np.ndarray]]:
        repeats = 1 if mini.shuffle else mini.epochs  # every epoch the same
        once = mini if mini.shuffle else mini._replace(epochs=1)
        return [
            self.divide(step, rows, ranks, by_tokens) for step in once.steps(len(rows.lengths), rows.trajectories)
        ] * repeats

    def divide(self, step: np.ndarray, rows: RowLengths, ranks: int, by_tokens: bool) -> list[np.ndarray]:
        """The rows of each rank among the row numbers ``step``; empty where there are fewer rows than ranks."""
        if self.together > 1:
            return self._divide_units(step.reshape(-1, self.together), rows, ranks, by_tokens)
        if self.cost is None or ranks == 1:
            return np.array_split(step, ranks)
        if self.groups_together and rows.groups is not None:
            return self._divide_groups(step, rows, ranks, by_tokens)
        parts = balanced_parts(self.cost.of(rows.lengths[step]), ranks, equal_size=not by_tokens)
        return [step[sorted(part)] for part in parts]

    def _divide_units(self, units: np.ndarray, rows: RowLengths, ranks: int, by_tokens: bool) -> list[np.ndarray]:
        """The same of ``units`` (U, together)."""
        if self.cost is None or ranks == 1:
            return [part.reshape(-1) for part in np.array_split(units, ranks)]
        costs = self.cost.of(rows.lengths[units]).sum(1)
        parts = balanced_parts(costs, ranks, equal_size=not by_tokens)
        return [units[sorted(part)].reshape(-1) for part in parts]

    def _divide_groups(self, step: np.ndarray, rows: RowLengths, ranks: int, by_tokens: bool) -> list[np.ndarray]:
        """Whole groups, or groups in so many pieces as make the rank with most work fastest."""
        ordered = step[np.argsort(rows.groups[step], kind="stable")]
        largest = int(np.bincount(rows.groups[step]).max())
        best, least, pieces = [], None, 1
        while True:
            starts, costs = self._units(ordered, rows, pieces)
            parts = balanced_parts(costs, ranks, equal_size=not by_tokens)
            most = max(int(costs[part].sum()) for part in parts)
            if least is None or most < least:
                unit_rows = np.split(ordered, starts[1:])
                best = [np.sort(np.concatenate([step[:0], *(unit_rows[i] for i in part)])) for part in parts]
                least = most
            if pieces >= largest:
                return best
            pieces *= 2

    def _units(self, ordered: np.ndarray, rows: RowLengths, pieces: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where each unit begins among rows ordered by group, with groups in ``pieces``; and its cost.

        A unit computes its prompt once.
        """
        groups = rows.groups[ordered]
        firsts = np.flatnonzero(np.diff(groups, prepend=-1))
        sizes = np.diff(firsts, append=len(ordered))
        size, place = np.repeat(sizes, sizes), np.arange(len(ordered)) - np.repeat(firsts, sizes)
        piece = place * np.minimum(pieces, size) // size
        starts = np.flatnonzero(np.diff(groups, prepend=-1) | np.diff(piece, prepend=-1))
        shared = (np.diff(starts, append=len(ordered)) - 1) * self.cost.of(rows.prompt_lengths[ordered[starts]])
        return starts, np.add.reduceat(self.cost.of(rows.lengths[ordered]), starts) - shared

    def loads(self, method: str, rows: RowLengths, ranks: int, cost: RowCost) -> tuple[list[list[int]], np.ndarray]:
        """Rows of each rank in one epoch of ``method``, and the ``cost`` of each rank in each step, (steps, ranks)."""
        call, costs = self.calls[method], cost.of(rows.lengths)
        mini = call.mini_batches or MiniBatches(len(rows.lengths))
        divided = self._divided_steps(mini._replace(epochs=1), rows, ranks, call.by_tokens)
        parts = [np.concatenate([step[rank] for step in divided]).tolist() for rank in range(ranks)]
        return parts, np.array([[int(costs[part].sum()) for part in step] for step in divided])
