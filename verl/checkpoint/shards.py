"""Shards of a tensor in the files of ranks, and the whole tensor from all of them.

For each tensor a rank's file holds one of

    a plain tensor                              the whole of it; equal on all ranks
    a DTensor                                   the rank's slice; placements and mesh say which (FSDP, HSDP)
    {"flat": (n,), "start": i, "shape": (...)}  numbers i .. i + n - 1 of the whole, laid out in a row (ZeRO)
    nothing                                     the rank has no part of it

A model is ``name -> piece``; an optimizer ``{"state": name -> {key -> piece}, "param_groups": [...]}``. Where
files are mapped into memory, joining a tensor reads that tensor only. Knows no engine; joining needs no process group.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from verl.utils.distributed import get_rank, get_world_size

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Piece = Tensor | dict[str, Any]
"""A plain tensor, a DTensor, or a flat piece."""


def flat_piece(flat: Tensor, start: int, shape: Sequence[int]) -> dict[str, Any]:
    """Return a flat piece: ``flat`` (n,) are the numbers from ``start`` on of a flattened tensor of ``shape``."""
    return {"flat": flat, "start": int(start), "shape": tuple(shape)}


def is_flat(piece: Any) -> bool:
    """Whether ``piece`` is a flat piece."""
    return isinstance(piece, dict) and piece.keys() == {"flat", "start", "shape"}


def is_sharded(piece: Any) -> TypeGuard["DTensor"]:
    """Whether ``piece`` is a DTensor; there is none before something else has imported their module."""
    # imported here it would cost every driver 0.7 CPU seconds: it brings sympy and torch's compiler with it
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(piece, getattr(module, "DTensor", ()))


# -- whole from pieces --------------------------------------------------------------------------------------------
def join(pieces: Sequence[Piece | None], name: str = "tensor") -> Any:
    """The whole tensor on the host, from what each rank holds of it.

    Args:
        pieces: in rank order, of *all* ranks that saved; None where a rank has no part of it.
        name: what errors call it.

    Returns:
        A tensor of its own memory, even where a file shares one among several names (the step of an optimizer over
        a flat buffer); what is no tensor, rank 0's as it is.

    Raises:
        ValueError: if the pieces overlap, leave a gap, or are of different tensors.
    """
    held: list[tuple[int, Any]] = [(rank, piece) for rank, piece in enumerate(pieces) if piece is not None]
    # there is one: `Joined` asks for names that some rank has
    first = held[0][1]
    if is_flat(first):
        return _join_flat(held, name)
    if is_sharded(first):
        return _join_slices(held, name)
    if isinstance(first, Tensor):
        _check_same(name, "shape", {rank: tuple(piece.shape) for rank, piece in held})
        return first.clone()
    return first  # a number or text: the same on all ranks


def _join_flat(held: list[tuple[int, Any]], name: str) -> Tensor:
    _check_same(name, "shape", {rank: tuple(piece["shape"]) for rank, piece in held})
    shape = torch.Size(held[0][1]["shape"])
    whole = torch.empty(shape.numel(), dtype=held[0][1]["flat"].dtype)
    written: dict[int, int] = {}
    for _, piece in held:
        start, count = piece["start"], piece["flat"].numel()
        if count and written.get(start, 0) < count:  # a replica brings the same numbers again
            whole[start : start + count] = piece["flat"]
            written[start] = count
    _check_covered(name, sum(written.values()), whole.numel())
    return whole.view(shape)


def _join_slices(held: list[tuple[int, Any]], name: str) -> Tensor:
    _check_same(name, "shape", {rank: tuple(piece.shape) for rank, piece in held})
    whole = torch.empty(held[0][1].shape, dtype=held[0][1].dtype)
    written: dict[tuple, int] = {}
    for rank, piece in held:
        region = slice_of_rank(piece, rank)
        place = tuple((part.start, part.stop) for part in region)
        if place in written:  # a replica
            continue
        local = piece._local_tensor
        _check_same(name, f"size of rank {rank}'s slice", {0: tuple(whole[region].shape), 1: tuple(local.shape)})
        whole[region] = local
        written[place] = local.numel()
    _check_covered(name, sum(written.values()), whole.numel())
    return whole


def slice_of_rank(tensor: "DTensor", rank: int) -> tuple[slice, ...]:
    """Return the slices of the whole tensor, one a dimension, that ``rank`` holds in the layout of ``tensor``.

    Raises:
        ValueError: ``rank`` is not in its mesh, or a placement is neither Shard nor Replicate.
    """
    from torch.distributed.tensor import Replicate, Shard

    mesh = tensor.device_mesh.mesh
    found = (mesh == rank).nonzero()
    if len(found) != 1:
        raise ValueError(f"rank {rank} is not in the mesh {mesh.tolist()} its tensor was saved with")
    # axes of the mesh from left to right: where two cut one dimension, the second cuts the part of the first
    starts, sizes = [0] * tensor.dim(), list(tensor.shape)
    for axis, (placement, where) in enumerate(zip(tensor.placements, found[0].tolist(), strict=True)):
        if isinstance(placement, Replicate):
            continue
        # exactly Shard: _StridedShard, a subclass of it in some releases of torch, interleaves its parts
        if type(placement) is not Shard:
            raise ValueError(
                f"a tensor is laid out as {placement} on its mesh, and only Shard and Replicate can be joined: "
                f"resume with as many ranks as saved it"
            )
        # as torch.chunk cuts: equal parts, rounded up; the last ones may be short or empty
        part = math.ceil(sizes[placement.dim] / mesh.shape[axis])
        begin = min(where * part, sizes[placement.dim])
        starts[placement.dim] += begin
        sizes[placement.dim] = min(part, sizes[placement.dim] - begin)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _check_same(name: str, what: str, by_rank: Mapping[int, Any]) -> None:
    if len(set(by_rank.values())) > 1:
        raise ValueError(
            f"the {what} of {name} differs between the ranks' files: {dict(by_rank)}. They are not of one save: give "
            f"a folder that one save has written"
        )


def _check_covered(name: str, found: int, total: int) -> None:
    if found != total:
        raise ValueError(
            f"the ranks' files hold {found} of the {total} numbers of {name}: files of all ranks of one save are "
            f"needed. Give a complete folder"
        )


class Joined(Mapping[str, Any]):
    """Name -> whole tensor, each joined on first use and then dropped.

    Args:
        ranks: what each rank's file holds by name, in rank order.
        of: picks the piece out of a rank's entry; the entry itself by default.
    """

    def __init__(self, ranks: Sequence[Mapping[str, Any]], of: Callable[[Sequence[Any], str], Any] = join) -> None:
        self._ranks = ranks
        self._names = list(dict.fromkeys(name for rank in ranks for name in rank))
        self._of = of

    def __getitem__(self, name: str) -> Any:
        entries = [rank.get(name) for rank in self._ranks]
        if all(entry is None for entry in entries):
            raise KeyError(name)
        return self._of(entries, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def join_optimizer(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The optimizer's state with whole tensors, from all ranks' files; one parameter's are joined at a time."""

    def entry(entries: Sequence[Mapping[str, Piece] | None], name: str) -> dict[str, Any]:
        keys = dict.fromkeys(key for one in entries if one for key in one)
        return {key: join([one.get(key) if one else None for one in entries], f"{name}.{key}") for key in keys}

    return {"state": Joined([rank["state"] for rank in ranks], entry), "param_groups": ranks[0]["param_groups"]}


# -- a rank's share of a whole ------------------------------------------------------------------------------------
def check_names(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise unless the checkpoint holds the tensors of this model, by name.

    Raises:
        ValueError: names the first that differs.
    """
    odd = sorted(own.keys() ^ saved.keys())
    if odd:
        where = "model" if odd[0] in own else "checkpoint"
        raise ValueError(
            f"the saved weights differ from this model in {len(odd)} names: {odd[0]!r} is in the {where} only. Resume "
            f"with the model.path, lora_rank and target_modules the run was started with"
        )


@torch.no_grad()
def fill(own: Tensor, saved: Tensor, name: str = "tensor") -> None:
    """Copy into ``own``, a plain tensor or this rank's slice, what was saved: the whole of it, or the same slice.

    Raises:
        ValueError: if the shapes differ.
    """
    if tuple(own.shape) != tuple(saved.shape):
        raise ValueError(
            f"{name} has shape {tuple(saved.shape)} in the checkpoint and {tuple(own.shape)} in this model: they are "
            f"different models. Set model.path to the one the run was started from"
        )
    if is_sharded(own) and not is_sharded(saved):
        saved = saved[slice_of_rank(own, dist.get_rank())]
    local(own).copy_(local(saved))


def share_like(own: Tensor, whole: Any) -> Any:
    """This rank's slice of ``whole``, laid out as ``own`` is; what is not a whole tensor of its shape, as it is."""
    is_whole = isinstance(whole, Tensor) and not is_sharded(whole)
    if not is_sharded(own) or not is_whole or whole.shape != own.shape or whole.dim() == 0:
        return whole
    part = whole[slice_of_rank(own, dist.get_rank())].clone().to(own.device)
    # with shape and stride: from_local takes all slices for equally long, and the last may be shorter
    return type(own).from_local(
        part, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )


def local(tensor: Tensor) -> Tensor:
    """This rank's slice of a sharded tensor; another tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


# -- Tensors that rank 0 has, handed to all ranks one at a time ------------------------------------------------------


class FromRankZero(Mapping[str, Tensor]):
    """Name -> tensor on the host. All ranks must ask for the same names in the same order.

    Args:
        tensors: on rank 0, what there is; ignored elsewhere.
        read: gives the values of one that is on the meta device, by its name and itself.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor] | None, read: Callable[[str, Tensor], Tensor] | None = None
    ) -> None:
        self._read = read
        self._tensors = dict(tensors or {}) if get_rank() == 0 else {}
        # of all names at once, so that every rank knows what there is before it asks
        metadata = [{name: (tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}]
        if get_world_size() > 1:
            dist.broadcast_object_list(metadata, src=0)
        self._metadata = metadata[0]

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._metadata[name]
        mine = self._tensors.get(name)
        if mine is not None and mine.is_meta and self._read is not None:
            mine = self._read(name, mine)
        # broadcast one at a time: a whole model in host memory of every rank would not fit
        tensor = torch.empty(shape, dtype=dtype) if mine is None else mine.detach().cpu().contiguous()
        if get_world_size() > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._metadata)

    def __len__(self) -> int:
        return len(self._metadata)
