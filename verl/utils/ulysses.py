"""Exchanges between ranks that share one sequence: every rank has a slice of its tokens, or of its heads.

Own autograd functions on collectives that gloo and NCCL both have. Knows tensors and groups, not models.

Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = Any
"""A ``torch.distributed.ProcessGroup``."""


class _AllToAll(torch.autograd.Function):
    """x (n, ...): part i goes to rank i, and part i of the result is rank i's. Its own inverse, so its own backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous()
        result = torch.empty_like(x)
        dist.all_to_all_single(result, x, group=group)
        return result

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, ctx.group), None


def tokens_to_heads(x: Tensor, group: Group) -> Tensor:
    """Some tokens of all heads (T / n, H, D) become all tokens of some heads (T, H / n, D)."""
    ranks = dist.get_world_size(group)
    parts = x.unflatten(1, (ranks, -1)).transpose(0, 1)
    return _AllToAll.apply(parts, group).flatten(0, 1)


def heads_to_tokens(x: Tensor, group: Group) -> Tensor:
    """All tokens of some heads (T, H / n, D) become some tokens of all heads (T / n, H, D)."""
    ranks = dist.get_world_size(group)
    return _AllToAll.apply(x.unflatten(0, (ranks, -1)), group).transpose(0, 1).flatten(1, 2)


class _GatherUneven(torch.autograd.Function):
    """x (n_r,) of each rank r -> (sum of n_r,) on all. Backward: the own part of the gradient, no sum over ranks."""

    @staticmethod
    def forward(ctx, x, counts, group):
        rank = dist.get_rank(group)
        ctx.first, ctx.count = sum(counts[:rank]), counts[rank]
        wide = x.new_zeros(max(counts))
        wide[: len(x)] = x
        parts = [torch.empty_like(wide) for _ in counts]
        dist.all_gather(parts, wide, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.first : ctx.first + ctx.count], None, None


def gather_uneven(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """The vectors of all ranks, in rank order, on every rank; differentiable.

    Each rank then computes one and the same loss: a parameter's gradient is the *sum* of what the ranks find, since a
    rank's part of it comes through the rank's own tokens alone.

    Args:
        x: (counts[rank],).
        counts: of all ranks.
    """
    return _GatherUneven.apply(x, counts, group)
