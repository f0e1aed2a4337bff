"""Weight sync to a rollout: buckets out, checksums back, a version that both sides agree on.

A training engine yields ``(checkpoint name, full tensor)``; a rollout takes buckets of them. The sender computes
checksums of what it sent, the rollout of what it holds afterwards, and only if all agree does the rollout carry the new
version. Knows neither training nor rollout engines, only `RolloutEngine`'s interface.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_intdigest

from verl.workers.rollout.base import Bucket, Receipt, RolloutEngine, WeightSyncError

LANES = 1 << 10
"""Words of 8 bytes in one line of the checksum."""

_LINES = 1 << 14  # handled at once

_HOST_BUCKET_BYTES = 64 << 20
_BLOCK_BYTES = 2 << 20  # of host memory cast, summed and written at once, in the processor's cache

_MASK = (1 << 64) - 1
_MAX_NAMES = 5


def sync_weights(
    named_tensors: Iterable[tuple[str, Tensor]],
    rollout: RolloutEngine,
    version: int,
    bucket_bytes: int = 512 << 20,
    dtype: torch.dtype | None = None,
    sharded: Collection[str] = (),
) -> Receipt:
    """Hand a full set of weights to a rollout and make sure that it holds them.

    Extra memory is one bucket and the tensor that did not fit into it any more.

    Args:
        named_tensors: checkpoint names and full tensors, tied duplicates left out.
        rollout: must be awake.
        version: the sender's version of these weights.
        bucket_bytes: bytes handed over at once.
        dtype: floating tensors are cast to it on the way; None means what the rollout holds.
        sharded: names in ``rollout.rows_held()`` of which ``named_tensors`` has those rows only.

    Returns:
        The rollout's receipt. Afterwards ``rollout.version == version``.

    Raises:
        WeightSyncError: names the tensors that are missing, unknown, misshapen or differ. The rollout then refuses to
            generate until a sync succeeds.
    """
    update = partial(rollout.update_shards, sharded=sharded) if sharded else rollout.update_weights
    memory = rollout.memory_of_weights()
    return _send_checked(update, named_tensors, rollout, version, bucket_bytes, dtype, memory)


def sync_adapter(
    adapter: Iterable[tuple[str, Tensor]],
    base: Callable[[], Iterable[tuple[str, Tensor]]],
    rollout: RolloutEngine,
    version: int,
    bucket_bytes: int = 512 << 20,
    dtype: torch.dtype | None = None,
) -> tuple[Receipt, int]:
    """Hand over a low-rank adapter, and the weights below it only to a rollout that does not hold them.

    Args:
        adapter: as ``RolloutEngine.update_adapter`` takes it.
        base: gives the weights below it, as for `sync_weights`; not called where they are held.

    Returns:
        The receipt of the adapter, and the bytes handed over in all.
    """
    num_bytes = 0
    if not rollout.holds_base:
        num_bytes = sync_weights(base(), rollout, version, bucket_bytes, dtype).num_bytes
        rollout.holds_base = True
    receipt = _send_checked(rollout.update_adapter, adapter, rollout, version, bucket_bytes, dtype)
    return receipt, num_bytes + receipt.num_bytes


def _send_checked(
    update: Callable[[int, Iterator[Bucket]], Receipt],
    named_tensors: Iterable[tuple[str, Tensor]],
    rollout: RolloutEngine,
    version: int,
    bucket_bytes: int,
    dtype: torch.dtype | None,
    memory: Mapping[str, Tensor] = MappingProxyType({}),
) -> Receipt:
    """Send buckets through ``update`` and compare what was sent with the rollout's receipt.

    Args:
        memory: of the rollout, by the names of the tensors that are to be written there.
    """
    # cast before the checksum: the rollout sums what it holds, in its own type
    dtype = dtype or rollout.weights_dtype
    sent: dict[str, Checksum] = {}
    rollout.invalidate()
    try:
        summed = with_checksums(named_tensors, dtype, sent, memory)
        receipt = update(version, buckets(summed, bucket_bytes))
        compare(finish(sent), receipt, version)
    except BaseException:
        rollout.invalidate()
        raise
    return receipt


def buckets(named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Split a stream of tensors into lists of at most ``bucket_bytes``; a larger tensor travels alone.

    Of tensors in host memory lists are short: what they were cast or gathered into is used again for the next.
    """
    bucket: Bucket = []
    filled = 0
    for name, tensor in named_tensors:
        if tensor.device.type == "cpu":
            bucket_bytes = min(bucket_bytes, _HOST_BUCKET_BYTES)
        if bucket and filled + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += tensor.nbytes
        del tensor  # a bucket that has been taken must not live on in a loop variable
    if bucket:
        yield bucket


Checksum = int | Tensor
"""A checksum, or the scalar on a device that will hold it: `finished` reads many of them at once."""


def checksum(tensor: Tensor) -> int:
    """A 64-bit hash of a tensor's values that changes with their order too; strides do not matter.

    In host memory XXH3, which reads about as fast as a copy does; on a device `mixed_sum`, which can run there. So
    compare sums of tensors that lie on the same kind of device.
    """
    return finished([pending_checksum(tensor)])[0]


def pending_checksum(tensor: Tensor) -> Checksum:
    """As `checksum`, without waiting for a device."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.device.type != "cpu":
        return _mixed_sum(data)
    return xxh3_64_intdigest(_bytes(data)) if data.numel() else 0


def _bytes(data: Tensor) -> ctypes.Array[ctypes.c_char]:
    """The memory of a contiguous tensor on the host."""
    # by address: memory shown through numpy could never be given back by a sleeping rollout
    return (ctypes.c_char * data.nbytes).from_address(data.data_ptr())


def finished(sums: Sequence[Checksum]) -> list[int]:
    """The checksums, after one wait for the device."""
    pending = [one for one in sums if isinstance(one, Tensor)]
    read = iter(torch.stack(pending).tolist() if pending else ())
    return [next(read) & _MASK if isinstance(one, Tensor) else one for one in sums]


def finish(sums: Mapping[str, Checksum]) -> dict[str, int]:
    """The same by name."""
    return dict(zip(sums, finished(list(sums.values())), strict=True))


def mixed_sum(data: Tensor) -> int:
    """The hash of uint8 ``data`` (n,) by integer tensor operations alone; any changed byte changes it.

    With x_i the i-th word of 8 bytes, mixed as x ^ (x >> 31), line l = i // LANES and j = i % LANES:

        sum_l (2l + 1) * (1 + sum_j (2j + 1) * x_i)   mod 2^64

    Odd factors are invertible, so one changed word always shows. The mixing carries high bits down: without it two
    words that differ in their sign only could change places unseen.
    """
    return finished([_mixed_sum(data)])[0]


def _mixed_sum(data: Tensor) -> Tensor:
    """`mixed_sum` as an int64 scalar on the device of ``data``; its products and sums wrap around, as mod 2^64 does."""
    num_words = data.numel() // 8
    if data.data_ptr() % 8:
        data = data.clone()  # a view as int64 must begin at a multiple of 8
    words, tail = data[: num_words * 8].view(torch.int64), data[num_words * 8 :].to(torch.int64)
    whole = num_words // LANES
    parts = [*words[: whole * LANES].view(whole, LANES).split(_LINES)]
    parts += [part.view(1, -1) for part in (words[whole * LANES :], tail) if part.numel()]
    total, first = torch.zeros((), dtype=torch.int64, device=data.device), 0
    for lines in parts:
        odd = torch.arange(1, 2 * lines.shape[1] + 1, 2, device=data.device)
        sums = (((lines >> 31) ^ lines) * odd).sum(1) + 1
        last = first + len(sums)
        total += (torch.arange(2 * first + 1, 2 * last + 1, 2, device=data.device) * sums).sum()
        first = last
    return total


def with_checksums(
    named_tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    sent: dict[str, Checksum],
    memory: Mapping[str, Tensor] = MappingProxyType({}),
) -> Iterator[tuple[str, Tensor]]:
    """Cast floating tensors and store in ``sent`` the checksum of each, which a device may not have finished yet.

    Those that ``memory`` has a place for are written there, and that is what is yielded.
    """
    for name, tensor in named_tensors:
        target = dtype if tensor.is_floating_point() else tensor.dtype
        held = memory.get(name)
        if held is not None and (held.shape, held.dtype, held.device) == (tensor.shape, target, tensor.device):
            sent[name] = write_summed(tensor, held)
            tensor = held
        else:
            tensor = tensor.to(target)
            sent[name] = pending_checksum(tensor)
        yield name, tensor
        del tensor


def write_summed(tensor: Tensor, held: Tensor) -> Checksum:
    """Write a tensor to memory of the same shape, in its type; returns the checksum of what was to be written."""
    tensor, held = tensor.detach(), held.detach()
    if held.device.type != "cpu" or not held.numel() or not held.is_contiguous():
        values = tensor.to(held.dtype)
        held.copy_(values)
        return pending_checksum(values)
    total, block = xxh3_64(), _BLOCK_BYTES // held.itemsize
    for source, place in zip(tensor.reshape(-1).split(block), held.view(-1).split(block), strict=True):
        values = source.to(held.dtype)
        total.update(_bytes(values))
        place.copy_(values)
    return total.intdigest()


def compare(sent: dict[str, int], receipt: Receipt, version: int) -> None:
    """Raise WeightSyncError, with the names, unless the receipt says exactly what was sent."""
    if receipt.version != version:
        raise WeightSyncError(
            f"Weights of version {version} were sent, but the rollout acknowledged version {receipt.version}."
        )
    held = receipt.checksums
    groups = {
        "lost on the way": sent.keys() - held.keys(),
        "not what was sent": {name for name in sent.keys() & held.keys() if sent[name] != held[name]},
        "never sent": held.keys() - sent.keys(),
    }
    problems = [f"{problem}: {listed(names)}" for problem, names in groups.items() if names]
    if problems:
        raise WeightSyncError(
            f"The rollout does not hold the weights of version {version}: {'; '.join(problems)}. "
            "It will not generate until a sync succeeds."
        )


def compare_memory(
    named_tensors: Iterable[tuple[str, Tensor]],
    held: Sequence[dict[str, int]],
    dtype: torch.dtype,
    gather: Callable[[dict[str, int]], Sequence[dict[str, int]]] | None = None,
) -> str:
    """Say which tensors rollouts hold otherwise than the trainer; empty where all are equal.

    Args:
        named_tensors: the trainer's, as they are sent.
        held: ``RolloutEngine.read_back`` of every rank; an empty one is not compared.
        dtype: of the rollouts' weights.
        gather: all ranks' checksums of what they sent, where that was not the same on all of them.
    """
    pending: dict[str, Checksum] = {}
    for _ in with_checksums(named_tensors, dtype, pending):
        pass
    sent = finish(pending)
    found = []
    for rank, (own, sums) in enumerate(zip(gather(sent) if gather else [sent] * len(held), held, strict=True)):
        names = [name for name in own.keys() | sums.keys() if own.get(name) != sums.get(name)] if sums else []
        if names:
            found.append(f"{listed(names)} in the memory of rank {rank} ({len(names)} of {len(own)} tensors)")
    return "; ".join(found)


def listed(names: Iterable[str]) -> str:
    """Up to five names in order, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
