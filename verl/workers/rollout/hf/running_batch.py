"""Continuous batching: a running batch that shares a key-value cache, to which new requests are added.

Requests that arrive at once form a group of rows with an equal number of tokens. Groups join the running batch: their
caches are laid side by side, right-aligned, so that one forward pass serves all. A token depends on its own row only,
so the tokens do not depend on which requests joined when. Knows transformers' caches and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from verl.workers.rollout.base import Completion
from verl.workers.rollout.hf.decode import DecodeRows
from verl.workers.rollout.hf.kv_cache import can_be_joined, joined

Forward = Callable[[Tensor, Tensor, Tensor, Cache], Tensor]
"""(ids (n, 1), mask (n, columns), positions (n, 1), cache) -> logits after the last column, (n, V)."""


class RowGroup:
    """Rows that have generated ``step`` tokens each."""

    def __init__(self, rows: DecodeRows, request_ids: Sequence[int]):
        self.rows, self.request_ids, self.step = rows, list(request_ids), 0
        self.running = {request_id: index for index, request_id in enumerate(request_ids)}

    @property
    def max_remaining(self) -> int:
        """The most tokens one of its rows may still generate."""
        return int(self.rows.limits.max()) - self.step

    def sample(self, logits: Tensor) -> dict[int, Completion]:
        """Sample a token for every row; returns completions of ended rows, by request id."""
        self.rows.sample(logits, self.step)
        self.step += 1
        if self.rows.num_live == len(self.running):
            return {}
        ended = {self.request_ids[index]: index for index in self.rows.ended()}
        return {
            request_id: self.rows.completion(index)
            for request_id, index in ended.items()
            if self.running.pop(request_id, -1) >= 0
        }


class RunningBatch:
    """Groups in the order of their rows in ``cache``.

    Args:
        rows: the first group, whose prompts are in the cache.
        request_ids: a name for each of its requests.
        logits: (n, V) after the prompts.
        width: columns of the cache that are filled, with the prompts right-aligned.
    """

    def __init__(self, cache: Cache, rows: DecodeRows, request_ids: Sequence[int], logits: Tensor, width: int):
        self.cache, self.logits, self.length = cache, logits, width
        self.groups = [RowGroup(rows, request_ids)]
        self.starts = width - rows.prompt_lengths  # first column of each row

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    @property
    def num_live(self) -> int:
        return sum(group.rows.num_live for group in self.groups)

    @property
    def longest(self) -> int:
        """Columns the cache will have at most."""
        return self.length + max((group.max_remaining for group in self.groups), default=0)

    def advance(self, forward: Forward) -> dict[int, Completion]:
        """Sample one token for every row and run the forward pass on it; returns the ended ones, by request id."""
        ended: dict[int, Completion] = {}
        sizes = [len(group.rows.live) for group in self.groups]
        for group, logits in zip(self.groups, self.logits.split(sizes), strict=True):
            if group.rows.num_live:
                ended |= group.sample(logits)
        if self.num_live:
            self._read(forward)
        return ended

    def _read(self, forward: Forward) -> None:
        ended = self.num_rows - self.num_live
        if ended * 8 >= self.num_rows or any(not group.rows.num_live for group in self.groups):
            self._drop_ended()
        tokens = torch.cat([group.rows.tokens for group in self.groups])
        positions = torch.cat([group.rows.positions for group in self.groups])
        self.length += 1
        mask = torch.arange(self.length, device=tokens.device) >= self.starts[:, None]
        self.logits = forward(tokens[:, None], mask, positions[:, None], self.cache)

    def _drop_ended(self) -> None:
        """Remove the rows that have ended."""
        live = torch.cat([group.rows.live for group in self.groups])
        survivors = live.nonzero()[:, 0]
        if len(survivors) == len(live):
            return
        self.cache.reorder_cache(survivors)
        self.starts = self.starts[survivors]
        self.groups = [group for group in self.groups if group.rows.num_live]
        for group in self.groups:
            group.rows.keep(group.rows.live.nonzero()[:, 0])

    # -- requests that come and go -------------------------------------------------------------------------------------

    def partial(self, request_id: int) -> Completion | None:
        """The tokens so far of a running request."""
        for group in self.groups:
            if request_id in group.running:
                return group.rows.completion(group.running[request_id], group.step)
        return None

    def abort(self, request_id: int) -> Completion | None:
        """End a running request; returns its tokens so far."""
        completion = self.partial(request_id)
        for group in self.groups:
            if request_id in group.running:
                group.rows.end(group.running.pop(request_id))
        return completion

    def join(self, other: RunningBatch) -> bool:
        """Add another batch that has logits for each row; False if the caches cannot be laid side by side.

        Both lose the columns before their first live row.
        """
        if not can_be_joined(self.cache, other.cache):
            return False
        for batch in (self, other):
            live = torch.cat([group.rows.live for group in batch.groups])
            batch.logits = batch.logits[live]
            batch._drop_ended()
        skipped = [int(batch.starts.min()) for batch in (self, other)]
        self.cache = joined((self.cache, other.cache), skipped)
        lengths = [batch.length - first for batch, first in zip((self, other), skipped, strict=True)]
        self.length = max(lengths)
        self.starts = torch.cat(
            [
                batch.starts - first + (self.length - length)
                for batch, first, length in zip((self, other), skipped, lengths, strict=True)
            ]
        )
        self.logits = torch.cat([self.logits, other.logits])
        self.groups += other.groups
        return True
