"""Boundaries of rows packed into one sequence, and the keys each of them attends to.

Knows lengths, not tokens or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """S segments of queries in one sequence of T tokens, and the keys of each.

    Attention is causal and aligned at the end: the last query of a segment attends to all of its keys, the one before
    to all but the last, as in variable-length kernels.
    """

    cu_q: Tensor
    """(S + 1,) int32: start of each segment of queries; the last entry is T."""
    cu_k: Tensor
    """(S + 1,) int32: the same of the keys; ``cu_q`` itself where every segment attends to its own tokens only."""
    q_lengths: tuple[int, ...]
    """Tokens of each segment, in host memory."""
    k_lengths: tuple[int, ...]
    """Keys of each segment, in host memory."""
    kv_index: Tensor | None = None
    """(sum of ``k_lengths``,) int64: tokens of the sequence that the segments attend to, segment after segment;
    None: their own, in order."""

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> Packing:
        """Segments that attend to themselves only."""
        cu = _cumulative(lengths)
        return cls(cu, cu, tuple(lengths), tuple(lengths))

    @classmethod
    def with_shared_keys(cls, q_lengths: Sequence[int], keys: Sequence[Tensor]) -> Packing:
        """Segments that attend to the tokens in ``keys``, of which a segment's own come last."""
        k_lengths = tuple(len(index) for index in keys)
        return cls(_cumulative(q_lengths), _cumulative(k_lengths), tuple(q_lengths), k_lengths, torch.cat(list(keys)))

    @property
    def tokens(self) -> int:
        """T, the tokens of the sequence."""
        return sum(self.q_lengths)

    @property
    def tokens_saved(self) -> int:
        """Tokens that shared prompts save: keys attended to minus tokens run."""
        return sum(self.k_lengths) - sum(self.q_lengths)

    def to(self, device: torch.device | str) -> Packing:
        """Return a copy on another device."""
        cu_q = self.cu_q.to(device)
        cu_k = cu_q if self.cu_k is self.cu_q else self.cu_k.to(device)
        index = None if self.kv_index is None else self.kv_index.to(device)
        return Packing(cu_q, cu_k, self.q_lengths, self.k_lengths, index)

    def padded_to(self, multiple: int) -> Packing:
        """Append a padding segment where T is no multiple of ``multiple``."""
        extra = -self.tokens % multiple
        return self.append_segment(extra) if extra else self

    def append_segment(self, length: int) -> Packing:
        """Append a segment of ``length`` tokens that attend to themselves only."""
        if self.kv_index is None:
            return Packing.of_lengths((*self.q_lengths, length)).to(self.cu_q.device)
        own = torch.arange(self.tokens, self.tokens + length, device=self.kv_index.device)
        keys = [*self.kv_index.split(list(self.k_lengths)), own]
        return Packing.with_shared_keys((*self.q_lengths, length), keys).to(self.cu_q.device)


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)
