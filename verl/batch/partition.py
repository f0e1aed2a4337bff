"""Which rows of a batch each data-parallel rank works on, and which of them make each of its optimizer steps.

The driver says it once, in a `SharePlan` that the batch carries in ``meta_info``; a call is cut by it when it is sent.
Works on lengths and prompt ids; knows no columns, no ranks, no models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from verl.batch.balancing import balanced_parts
from verl.utils.seeding import derive_seed

SHARE_PLAN = "share_plan"
"""Fact of a batch: its `SharePlan`."""

STEP_ROWS = "step_rows"
"""Fact of a rank's share: for each optimizer step its rows in the share."""


class RowCost(NamedTuple):
    """What a row of l tokens costs, as an integer: ``l * (break_even + l)``.

    The first part is the work of the weight matrices, the second that of attention.
    """

    break_even: int = 32768
    """Tokens at which attention costs as much as everything else: about 20 to 70 thousand for dense models."""

    def of(self, lengths: np.ndarray) -> np.ndarray:
        lengths = np.asarray(lengths, dtype=np.int64)
        return lengths * (self.break_even + lengths)


class MiniBatches(NamedTuple):
    """How a batch is cut into optimizer steps. Says nothing of ranks: a step's rows are the same for any number."""

    rows: int
    """Rows of one step, over all ranks; the last of an epoch has what is left."""
    epochs: int = 1
    shuffle: bool = False
    """Draw the rows of the steps from the whole batch at random, anew each epoch; else they follow one another."""
    seed: int = 0

    def epoch_orders(self, count: int) -> Iterator[np.ndarray]:
        for epoch in range(self.epochs):
            if self.shuffle:
                draw = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
                yield torch.randperm(count, generator=draw).numpy()
            else:
                yield np.arange(count)

    def steps(self, count: int) -> list[np.ndarray]:
        """Row numbers of each optimizer step on a batch of ``count`` rows, all epochs in a row."""
        return [
            order[first : first + self.rows]
            for order in self.epoch_orders(count)
            for first in range(0, count, self.rows)
        ]


class Rows(NamedTuple):
    """What of a batch decides who works on which row."""

    lengths: np.ndarray
    """(B,) real tokens."""
    prompt_lengths: np.ndarray | None = None
    """(B,), where siblings stay together."""
    groups: np.ndarray | None = None
    """(B,) int: equal numbers are responses to one prompt."""


def batch_rows(data: Any, with_groups: bool = False) -> Rows:
    """What a DataProto says about its rows: ``input_ids`` and, ``with_groups``, ``responses`` and ``uid``."""
    lengths = data.ragged("input_ids").layout.lengths.numpy()
    uids = data.non_tensor_batch.get("uid")
    if not with_groups or uids is None:
        return Rows(lengths)
    numbers: dict[Any, int] = {}
    groups = np.fromiter((numbers.setdefault(uid, len(numbers)) for uid in uids), np.int64, len(uids))
    return Rows(lengths, lengths - data.ragged("responses").layout.lengths.numpy(), groups)


class Shares(NamedTuple):
    """A batch divided among ranks."""

    count: int
    """Rows of the batch."""
    rows: list[np.ndarray]
    """Of each rank, the numbers of its rows."""
    has_filler: list[bool]
    """Whether the last of a rank's rows is there only because it has none of its own, in some step at least."""
    steps: list[list[np.ndarray]] | None
    """Of each rank, for each optimizer step the places of its rows in its share; None where nothing is stepped."""

    def places(self) -> np.ndarray | None:
        """For each row of the batch its place among the rows of all ranks, one rank after the other.

        None if some row is worked on twice, as in two epochs of different mini-batches.
        """
        places, first, found = np.empty(self.count, dtype=np.int64), 0, 0
        for rows, has_filler in zip(self.rows, self.has_filler, strict=True):
            own = len(rows) - has_filler
            places[rows[:own]] = first + np.arange(own)
            first, found = first + len(rows), found + own
        return places if found == self.count else None


class Pass(NamedTuple):
    """One kind of call on the batch."""

    by_tokens: bool
    """Whether its forwards are cut by a token budget. If they hold a fixed number of rows, ranks get equal numbers of
    rows (but for one): all ranks run as many forwards as the one that has most."""
    mini_batches: MiniBatches | None = None
    """Of an update, its optimizer steps."""


class SharePlan(NamedTuple):
    """How each call on a batch divides its rows among ranks."""

    passes: Mapping[str, Pass]
    """Verb -> what is known of it. Other verbs get equal parts of the rows in their order."""
    cost: RowCost | None = None
    """What a row costs; None: rows are not balanced but dealt in their order."""
    siblings_together: bool = False
    """Keep responses to one prompt on one rank: what they share is then computed once."""

    def shares(self, verb: str, rows: Rows, ranks: int) -> Shares:
        """Divide ``rows`` among ``ranks`` for a call of ``verb``."""
        work, count = self.passes[verb], len(rows.lengths)
        if work.mini_batches is None:
            divided = [self.divide(np.arange(count), rows, ranks, work.by_tokens)]
        else:
            divided = self._divided_steps(work.mini_batches, rows, ranks, work.by_tokens)
        filler = int(np.argmin(rows.lengths))
        mine = [_share_of([step[rank] for step in divided], filler) for rank in range(ranks)]
        steps = None if work.mini_batches is None else [places for _, _, places in mine]
        return Shares(count, [numbers for numbers, _, _ in mine], [lacks for _, lacks, _ in mine], steps)

    def _divided_steps(self, mini: MiniBatches, rows: Rows, ranks: int, by_tokens: bool) -> list[list[np.ndarray]]:
        repeats = 1 if mini.shuffle else mini.epochs  # every epoch the same
        once = mini if mini.shuffle else mini._replace(epochs=1)
        return [self.divide(step, rows, ranks, by_tokens) for step in once.steps(len(rows.lengths))] * repeats

    def divide(self, step: np.ndarray, rows: Rows, ranks: int, by_tokens: bool) -> list[np.ndarray]:
        """The rows of each rank among the row numbers ``step``; empty where there are fewer rows than ranks."""
        if self.cost is None or ranks == 1:
            return np.array_split(step, ranks)
        if self.siblings_together and rows.groups is not None:
            return self._divide_groups(step, rows, ranks, by_tokens)
        parts = balanced_parts(self.cost.of(rows.lengths[step]), ranks, equal_size=not by_tokens)
        return [step[sorted(part)] for part in parts]

    def _divide_groups(self, step: np.ndarray, rows: Rows, ranks: int, by_tokens: bool) -> list[np.ndarray]:
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

    def _units(self, ordered: np.ndarray, rows: Rows, pieces: int) -> tuple[np.ndarray, np.ndarray]:
        """Where each unit begins among rows ordered by group, with groups in ``pieces``; and its cost.

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

    def loads(self, verb: str, rows: Rows, ranks: int, cost: RowCost) -> tuple[list[list[int]], np.ndarray]:
        """Rows of each rank in one epoch of ``verb``, and the ``cost`` of each rank in each step, (steps, ranks)."""
        work, costs = self.passes[verb], cost.of(rows.lengths)
        mini = work.mini_batches or MiniBatches(len(rows.lengths))
        divided = self._divided_steps(mini._replace(epochs=1), rows, ranks, work.by_tokens)
        parts = [np.concatenate([step[rank] for step in divided]).tolist() for rank in range(ranks)]
        return parts, np.array([[int(costs[part].sum()) for part in step] for step in divided])


def _share_of(steps: list[np.ndarray], filler: int) -> tuple[np.ndarray, bool, list[np.ndarray]]:
    """A rank's rows of each step -> all its rows, whether a filler stands behind them, each step's places in them."""
    rows = np.unique(np.concatenate(steps))
    lacks = any(not len(step) for step in steps)
    places = [np.searchsorted(rows, step) if len(step) else np.array([len(rows)]) for step in steps]
    return np.append(rows, filler) if lacks else rows, lacks, places
