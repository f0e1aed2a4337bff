"""Weight map of an engine, found by watching its own loader copy the tensors of a sync into its memory.

An engine fuses (q, k, v into one matrix), shards and pads what it is sent. Watching its copies tells, for any model and
any loader, which elements of which parameter hold which elements of a sent tensor; reading those back is the receipt.
Knows tensors and copies, no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from verl.workers.rollout.base import Bucket
from verl.workers.rollout.weights.sync import checksum

aten = torch.ops.aten


class Region(NamedTuple):
    """A strided set of elements, counted from the first element of what they lie in."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(view: Tensor, first: int = 0) -> Region:
        return Region(view.storage_offset() - first, tuple(view.shape), tuple(view.stride()))

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


class Part(NamedTuple):
    """A region of a sent tensor and the view of the engine's memory that holds them."""

    source: Region
    held: Tensor


class SentTensor(NamedTuple):
    """A tensor of the bucket being loaded."""

    name: str
    tensor: Tensor


class LoadWatcher(TorchDispatchMode):
    """While active, notes every copy from a sent tensor into the engine's memory, and every fill of that memory.

    Args:
        tensors: the engine's parameters and buffers by name; tied ones may appear under several names.
    """

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__()
        self.owner = {tensor.untyped_storage().data_ptr(): name for name, tensor in reversed(tensors.items())}
        self.parts: dict[str, list[Part]] = {}
        self.last: str | None = None
        """The tensor that the loader took last."""
        self._written: dict[str, set[Region]] = {}
        self._sources: dict[int, list[SentTensor]] = {}

    def announce(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """Yield a bucket's pairs, remembering the storage of each."""
        self._sources = {}
        for name, tensor in bucket:
            self._sources.setdefault(tensor.untyped_storage().data_ptr(), []).append(SentTensor(name, tensor))
            self.parts[name] = []
            self.last = name
            yield name, tensor

    def forget_sources(self) -> None:
        """Release the bucket's tensors."""
        self._sources = {}

    def written(self, name: str) -> int:
        """Number of elements of the engine's tensor ``name`` that were written."""
        return sum(region.numel for region in self._written.get(name, ()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is aten.copy_.default:
            self._note(args[0], args[1])
        elif func in (aten.fill_.Scalar, aten.zero_.default):
            self._note(args[0], None)
        return result

    def _note(self, held: Tensor, source: Tensor | None) -> None:
        owner = self.owner.get(held.untyped_storage().data_ptr())
        if owner is None or not held.numel():
            return
        sent = None if source is None else self._sent(source)
        if source is not None and sent is None:
            return  # not ours, or changed on the way: its elements stay unwritten, which fails the sync
        self._written.setdefault(owner, set()).add(Region.of(held))
        if sent is not None and source.shape == held.shape:
            self.parts[sent.name].append(Part(Region.of(source, sent.tensor.storage_offset()), held.detach()))

    def _sent(self, view: Tensor) -> SentTensor | None:
        """The sent tensor that ``view`` looks into."""
        for sent in self._sources.get(view.untyped_storage().data_ptr(), ()):
            first = sent.tensor.storage_offset()
            if first <= view.storage_offset() < first + max(1, sent.tensor.numel()):
                return sent
        return None


def covers(parts: Iterable[Region], numel: int) -> bool:
    """Whether parts that do not overlap, apart from equal ones, make up a tensor of ``numel`` elements."""
    return sum(region.numel for region in set(parts)) == numel


def read_back(parts: list[Part], shape: torch.Size, dtype: torch.dtype) -> int:
    """The checksum of a sent tensor of ``shape`` as memory holds it, from parts that cover it.

    Memory may hold a wider type than was sent: ``dtype``, in which the values are as they were.
    """
    first = parts[0].held
    if len(parts) == 1 and first.shape == shape:
        return checksum(first.to(dtype))
    whole = first.new_empty(shape, dtype=dtype)
    for part in parts:
        whole.as_strided(part.source.shape, part.source.stride, part.source.offset).copy_(part.held)
    return checksum(whole)


def sum_of_parts(parts: list[Part], dtype: torch.dtype) -> list[int]:
    """The checksum of each part as memory holds it, in the type that was sent."""
    return [checksum(part.held.to(dtype)) for part in parts]


def sum_of_sources(parts: list[Part], tensor: Tensor) -> list[int]:
    """The checksum of each part as it stands in ``tensor`` as it was sent."""
    first = tensor.storage_offset()
    return [
        checksum(tensor.as_strided(part.source.shape, part.source.stride, first + part.source.offset)) for part in parts
    ]


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model by name; tied ones once."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}
