"""How rows lie one behind another in one sequence, and which keys each of them sees.

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

    Attention is causal and aligned at the end: the last query of a segment sees all of its keys, the one before all
    but the last, as variable-length kernels have it.
    """

    cu_q: Tensor
    """(S + 1,) int32: where each segment of queries begins; the last entry is T."""
    cu_k: Tensor
    """(S + 1,) int32: the same of the keys; ``cu_q`` itself where every segment sees its own tokens alone."""
    q_lengths: tuple[int, ...]
    """Tokens of each segment, in host memory."""
    k_lengths: tuple[int, ...]
    """Keys of each segment, in host memory."""
    kv_index: Tensor | None = None
    """(sum of ``k_lengths``,) int64: tokens of the sequence whose keys and values the segments see, one segment's after
    another's; None: their own, in order."""

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> Packing:
        """Segments that see themselves alone."""
        cu = _cumulated(lengths)
        return cls(cu, cu, tuple(lengths), tuple(lengths))

    @classmethod
    def sharing(cls, q_lengths: Sequence[int], keys: Sequence[Tensor]) -> Packing:
        """Segments of which each sees the tokens that ``keys`` names; its own tokens come last among them."""
        k_lengths = tuple(len(index) for index in keys)
        return cls(_cumulated(q_lengths), _cumulated(k_lengths), tuple(q_lengths), k_lengths, torch.cat(list(keys)))

    @property
    def tokens(self) -> int:
        """T."""
        return sum(self.q_lengths)

    @property
    def tokens_saved(self) -> int:
        """Tokens more that would run if every segment ran its own copy of what it sees."""
        return sum(self.k_lengths) - sum(self.q_lengths)

    def to(self, device: torch.device | str) -> Packing:
        """The same on another device."""
        cu_q = self.cu_q.to(device)
        cu_k = cu_q if self.cu_k is self.cu_q else self.cu_k.to(device)
        index = None if self.kv_index is None else self.kv_index.to(device)
        return Packing(cu_q, cu_k, self.q_lengths, self.k_lengths, index)

    def padded_to(self, multiple: int) -> Packing:
        """One segment more where T is no multiple of ``multiple``; nobody reads what stands there."""
        extra = -self.tokens % multiple
        return self.followed_by(extra) if extra else self

    def followed_by(self, length: int) -> Packing:
        """One segment more, of ``length`` tokens that see themselves alone."""
        if self.kv_index is None:
            return Packing.of_lengths((*self.q_lengths, length)).to(self.cu_q.device)
        own = torch.arange(self.tokens, self.tokens + length, device=self.kv_index.device)
        keys = [*self.kv_index.split(list(self.k_lengths)), own]
        return Packing.sharing((*self.q_lengths, length), keys).to(self.cu_q.device)


def _cumulated(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)
