"""Ulysses sequence parallelism: shards of a packed sequence, and the collectives that join them.

Knows tokens, positions and groups of ranks; no kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# -- collectives between ranks that share one sequence: each has some of its tokens, or some of its heads -----------

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
    """x (n_r, ...) of each rank r -> (sum of n_r, ...) on all. Backward: this rank's part of the gradient, unsummed."""

    @staticmethod
    def forward(ctx, x, counts, group):
        rank = dist.get_rank(group)
        # unlike an all-reduce, the gradient is not summed: every rank has the same loss
        ctx.first, ctx.count = sum(counts[:rank]), counts[rank]
        wide = x.new_zeros(max(counts), *x.shape[1:])
        wide[: len(x)] = x
        # gloo and nccl gather equal shapes only
        parts = [torch.empty_like(wide) for _ in counts]
        dist.all_gather(parts, wide, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.first : ctx.first + ctx.count], None, None


def all_gather_uneven(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """The vectors of all ranks, in rank order, on every rank; differentiable.

    Each rank then computes one and the same loss: a parameter's gradient is the *sum* over ranks, since each rank's
    part of it comes from its own tokens only.

    Args:
        x: (counts[rank], ...).
        counts: of all ranks.
    """
    return _GatherUneven.apply(x, counts, group)


# -- public functions for user code: the group is set once, and there may be a leading batch dim ---------------------
_group: Group = None


def set_ulysses_sequence_parallel_group(group: Group) -> None:
    """Set the group of the functions below; None: sequences are not shared."""
    global _group
    _group = group


def get_ulysses_sequence_parallel_group() -> Group:
    """Return the group that was set last, or None."""
    return _group


def get_ulysses_sequence_parallel_world_size(group: Group = None) -> int:
    """Ranks that share a sequence; 1 without a group."""
    group = group or _group
    return dist.get_world_size(group) if group else 1


def get_ulysses_sequence_parallel_rank(group: Group = None) -> int:
    """Number of this rank among them."""
    group = group or _group
    return dist.get_rank(group) if group else 0


class _Gather(torch.autograd.Function):
    """Equal parts of all ranks behind one another; backward gives each rank its part, times ``scale``."""

    @staticmethod
    def forward(ctx, x, dim, scale, group):
        ctx.dim, ctx.scale, ctx.group = dim, scale, group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        part = grad.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)]
        return part * ctx.scale, None, None, None


def ulysses_pad(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1, pad_value: int = 0
) -> tuple[Tensor, Tensor | None, int]:
    """Pad packed (1, T) ids and (..., 1, T) positions on the right to a multiple of ``sp_size``; and by how much.

    The padding counts as a row of its own: its positions begin at 0.
    """
    missing = -input_ids_rmpad.shape[-1] % sp_size
    ids = torch.nn.functional.pad(input_ids_rmpad, (0, missing), value=pad_value)
    if position_ids_rmpad is not None and missing:
        row = torch.arange(missing, device=ids.device).expand(*position_ids_rmpad.shape[:-1], missing)
        position_ids_rmpad = torch.cat([position_ids_rmpad, row.to(position_ids_rmpad.dtype)], -1)
    return ids, position_ids_rmpad, missing


def ulysses_pad_and_slice_inputs(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1
) -> tuple[Tensor, Tensor | None, int]:
    """`ulysses_pad`, and of the ids this rank's slice; positions stay whole, as attention sees all tokens."""
    ids, positions, missing = ulysses_pad(input_ids_rmpad, position_ids_rmpad, sp_size)
    return slice_input_tensor(ids, dim=1, padding=False), positions, missing


def slice_input_tensor(x: Tensor, dim: int, padding: bool = True, group: Group = None) -> Tensor:
    """This rank's equal part of ``x`` along ``dim``, which is padded with zeros first if need be."""
    ranks = get_ulysses_sequence_parallel_world_size(group)
    if missing := -x.shape[dim] % ranks if padding else 0:
        x = torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim:][1:])], dim)
    return x.chunk(ranks, dim)[get_ulysses_sequence_parallel_rank(group)].contiguous()


def gather_outputs_and_unpad(
    x: Tensor,
    gather_dim: int,
    unpad_dim: int | None = None,
    padding_size: int = 0,
    grad_scaler: bool = True,
    group: Group = None,
) -> Tensor:
    """The parts of all ranks along ``gather_dim``, without the last ``padding_size`` along ``unpad_dim``.

    Args:
        grad_scaler: multiply gradients by the number of ranks, for losses that are averaged over them afterwards.
        group: None: the one that was set; without one ``x`` comes back as it is.
    """
    group = group or _group
    if group is None:
        return x
    x = _Gather.apply(x, gather_dim, dist.get_world_size(group) if grad_scaler else 1, group)
    return x if unpad_dim is None else x.narrow(unpad_dim, 0, x.shape[unpad_dim] - padding_size)


@dataclass(frozen=True)
class SequenceShard:
    """Tokens [``start``, ``start + length``) of a sequence of ``size * length``, and the valid positions among them."""

    group: Group
    rank: int
    size: int
    length: int
    """Tokens of each rank."""
    positions: Tensor
    """(n,): positions in this rank's tokens that predict a token."""
    local_index: Tensor
    """(n,): their indices among the micro-batch's t valid positions."""
    counts: tuple[int, ...]
    """n of each rank."""
    gather_index: Tensor
    """(t,): index of each of the t positions in the concatenated results of all ranks."""

    @classmethod
    def of(cls, positions: Tensor, tokens: int, group: Group, rank: int, size: int) -> SequenceShard:
        """Shard a sequence of ``tokens``, a multiple of ``size``, with valid ``positions`` (t,) in host memory."""
        length = tokens // size
        # sorted by rank, since results come back in that order
        owner = positions // length
        order = torch.argsort(owner, stable=True)
        gather_index = torch.empty_like(order)
        gather_index[order] = torch.arange(len(order))
        counts = torch.bincount(owner, minlength=size).tolist()
        local_index = (owner == rank).nonzero().flatten()
        return cls(
            group, rank, size, length, positions[local_index] - rank * length, local_index, tuple(counts), gather_index
        )

    def to(self, device: torch.device | str) -> SequenceShard:
        """Return a copy on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("positions", "local_index", "gather_index")}
        return replace(self, **moved)

    @property
    def start(self) -> int:
        return self.rank * self.length

    def slice_of(self, whole: Tensor, dim: int = -1) -> Tensor:
        """Return this rank's tokens of ``whole`` along ``dim``."""
        return whole.narrow(dim, self.start, self.length)

    def gather(self, results: Tensor) -> Tensor:
        """All-gather results (n, ...) at this rank's positions into those at all t positions; differentiable."""
        return all_gather_uneven(results, self.counts, self.group).index_select(0, self.gather_index)


def slice_language_model(model: Any) -> None:
    """Let the text part of a vision-language model take this rank's tokens of embeddings made from the whole sequence.

    Every rank runs whole images, since their features are scattered into the embeddings by counting placeholders.
    """
    language_model: nn.Module = model.base_model.language_model
    language_model.register_forward_pre_hook(_slice_inputs, with_kwargs=True)


def _slice_inputs(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    shard: SequenceShard | None = kwargs.get("shard")
    if shard is None:
        return None
    sliced = dict(kwargs)
    sliced["inputs_embeds"] = shard.slice_of(kwargs["inputs_embeds"], 1)
    if kwargs.get("position_ids") is not None:
        sliced["position_ids"] = shard.slice_of(kwargs["position_ids"])
    # Qwen3-VL adds features of several depths of the tower to the states at placeholders
    is_visual, features = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
    if is_visual is not None and features is not None:
        sliced["visual_pos_masks"] = shard.slice_of(is_visual, 1)
        # features have one row a placeholder: skip those of the ranks before
        first = int(is_visual[:, : shard.start].sum())
        count = int(sliced["visual_pos_masks"].sum())
        sliced["deepstack_visual_embeds"] = [layer[first : first + count] for layer in features]
    return args, sliced
