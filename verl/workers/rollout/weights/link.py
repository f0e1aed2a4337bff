"""Weight transfer across process groups: one sender broadcasts weights, bucket by bucket, to all ranks of a rollout.

The link is a process group of its own over the sender (rank 0) and the receivers. What travels is announced first, and
the sender's checksums travel behind it, so that every receiver verifies what its engine holds as
`weights.sync.sync_weights` does within a process. Knows neither training nor rollout engines, nor their workers.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from verl.utils.exit_codes import ExitCode
from verl.workers.rollout.base import Bucket, Receipt, RolloutEngine, WeightSyncError
from verl.workers.rollout.weights.sync import Checksum, compare, finish, with_checksums

_START, _BUCKET, _END, _BREAK = range(4)
_LINK = "The link that carries weights from the actor to the rollout"
_ALIGN_BYTES = 64  # tensors of a bucket begin at multiples of it, as fast copies want


class WeightLinkError(WeightSyncError):
    """The other end of the link has ended, stands still or gave up: this end is not the cause."""

    exit_class = ExitCode.WORKER


class TransferStats(NamedTuple):
    """Version, size and duration of one transfer."""

    version: int
    num_bytes: int
    seconds: float


class WeightLink:
    """One end of the way weights take from a training rank to the ranks of a rollout.

    Building it waits for all the others.

    Args:
        store: where the members find one another; the sender's `open_store`, the receivers' `find_store`.
        rank: 0 sends, 1, 2, ... receive.
        size: the sender and all receivers.
        device: where the tensors are that travel, ``cpu`` or a CUDA device of this member alone.
        timeout_s: seconds a member may wait for another before it raises.
    """

    def __init__(self, store: dist.TCPStore, rank: int, size: int, device: torch.device | str, timeout_s: float):
        self.rank, self.device = rank, torch.device(device)
        self.num_bytes = 0
        self._store, self._timeout_s = store, timeout_s  # the store must outlive the groups
        self._broken: str | None = None
        timeout = timedelta(seconds=timeout_s)
        with _peer_errors("could not be built"):
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs leave it out
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(store.host))]
            # Any: torch's stubs leave out the collectives of its C++ backends
            self._control_group: Any = dist.ProcessGroupGloo(dist.PrefixStore("words", store), rank, size, options)
            self._data_group: Any = self._control_group
            if self.device.type != "cpu":
                nccl_options = dist.ProcessGroupNCCL.Options()
                # at its own timeout torch's watchdog ends the whole process; `_wait` is to come first, with an error
                nccl_options._timeout = 2 * timeout + timedelta(seconds=60)
                self._data_group = dist.ProcessGroupNCCL(dist.PrefixStore("tensors", store), rank, size, nccl_options)

    # -- the sender ----------------------------------------------------------------------------------------------------

    def send(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int, dtype: torch.dtype
    ) -> TransferStats:
        """Broadcast a full set of weights; a bucket is gathered and laid out while the one before it travels.

        Extra memory: two buckets, and the tensor that is being put into one.

        Args:
            named_tensors: checkpoint names and full tensors, tied duplicates left out.
            version: the sender's version of these weights.
            bucket_bytes: bytes sent at once; a larger tensor travels alone.
            dtype: floating tensors are cast to it: the type the receivers hold them in.

        Raises:
            WeightLinkError: a receiver has ended or does not take the next bucket within the link's timeout.
        """
        self._check_usable()
        start, self.num_bytes = time.perf_counter(), 0
        sums: dict[str, Checksum] = {}
        self._send_message(_START, version)
        under_way: dist.Work | None = None
        try:
            for layout, values in packed(with_checksums(named_tensors, dtype, sums), bucket_bytes):
                self._arrive(under_way)
                self._send_message(_BUCKET, layout)
                under_way = self._start_values(values)
            self._arrive(under_way)
        except WeightLinkError:
            raise
        except BaseException as error:
            with suppress(WeightLinkError):
                self._arrive(under_way)
                self._send_message(_BREAK, f"{type(error).__name__}: {error}")
            raise
        self._send_message(_END, finish(sums))
        return TransferStats(version, self.num_bytes, time.perf_counter() - start)

    # -- a receiver ----------------------------------------------------------------------------------------------------

    def receive(self, rollout: RolloutEngine) -> Receipt:
        """Take the transfer the sender starts and make sure that ``rollout``, which must be awake, holds it.

        A bucket arrives while the one before it is loaded: extra memory is two. Afterwards ``rollout.version`` is the
        sender's; after any error it is None.

        Raises:
            WeightSyncError: names the tensors that are missing, unknown, misshapen or differ.
            WeightLinkError: the sender has ended, stands still or gave up.
        """
        self._check_usable()
        rollout.invalidate()
        self.num_bytes = 0
        sums: dict[str, int] = {}
        version = self._receive_message(_START)[1]
        buckets = self._incoming(sums)
        try:
            receipt = rollout.update_weights(version, buckets)
            for _ in buckets:  # an engine that stopped early is found by its missing tensors
                pass
            compare(sums, receipt, version)
        except BaseException:
            rollout.invalidate()
            with suppress(WeightLinkError):
                for _ in buckets:  # the others can go on, and this error is the only one
                    pass
            raise
        return receipt

    def _incoming(self, sums: dict[str, int]) -> Iterator[Bucket]:
        """The buckets as they arrive; puts the sender's checksums into ``sums`` at the end."""
        coming = self._announced(sums)
        while coming is not None:
            tensors, values, work = coming
            self._arrive(work)
            coming = self._announced(sums)  # it travels while this one is loaded
            bucket = [
                (name, values[first : first + torch.Size(shape).numel()].view(shape)) for name, shape, first in tensors
            ]
            del values
            yield bucket
            del bucket  # its memory must be free before the one after the next is made

    def _announced(self, sums: dict[str, int]) -> tuple[list, Tensor, dist.Work] | None:
        """The layout of the next bucket, its memory and the broadcast that fills it; None after the last."""
        kind, note = self._receive_message(_BUCKET, _END)
        if kind == _END:
            sums.update(note)
            return None
        values = torch.empty(note["numel"], dtype=getattr(torch, note["dtype"]), device=self.device)
        return note["tensors"], values, self._start_values(values)

    # -- both ----------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise WeightLinkError(f"{_LINK} is closed: {self._broken}")

    def _send_message(self, kind: int, note: Any) -> None:
        text = torch.frombuffer(bytearray(json.dumps(note).encode()), dtype=torch.uint8)
        with _peer_errors("broke"):
            self._control_group.broadcast(torch.tensor([kind, len(text)]), 0).wait()
            self._control_group.broadcast(text, 0).wait()

    def _receive_message(self, *expected: int) -> tuple[int, Any]:
        head = torch.empty(2, dtype=torch.int64)
        with _peer_errors("broke"):
            self._control_group.broadcast(head, 0).wait()
            kind, length = head.tolist()
            text = torch.empty(length, dtype=torch.uint8)
            self._control_group.broadcast(text, 0).wait()
        note = json.loads(bytes(text.numpy()))
        if kind == _BREAK:
            raise WeightLinkError(f"The sender of the weights gave up: {note}")
        assert kind in expected, f"message {kind} where {expected} is due"
        return kind, note

    def _start_values(self, values: Tensor) -> dist.Work:
        """Begin to broadcast a bucket; its memory stays as it is until `_arrive`."""
        with _peer_errors("broke"):
            work = self._data_group.broadcast(values.view(torch.uint8), 0)
        self.num_bytes += values.nbytes
        return work

    def _arrive(self, work: dist.Work | None) -> None:
        """Wait for a bucket that is under way, if one is."""
        if work is not None:
            with _peer_errors("broke"):
                self._wait(work)

    def _wait(self, work: dist.Work) -> None:
        """Wait until a broadcast of tensors is done here, at most the link's timeout.

        ``work.wait()`` of NCCL only orders streams: with a lost peer it returns at once and the next read of a tensor
        never does. So the work is polled, and the group aborted, which frees the device from the kernel that waits.
        """
        if self._data_group is self._control_group:
            work.wait()
            return
        deadline, pause = time.monotonic() + self._timeout_s, 0.0
        while not work.is_completed():
            if time.monotonic() > deadline:
                self._broken = f"a broadcast of weights did not end within {self._timeout_s:g} s"
                self._data_group.abort()
                raise RuntimeError(self._broken)
            time.sleep(pause)
            pause = min(pause + 1e-5, 1e-3)
        work.wait()


def packed(named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Lay tensors of one type side by side until the next does not fit; yields what lies where, and the values.

    The values are good until the bucket after the next is requested: two buffers take turns.
    """
    buffer, other, filled = torch.empty(0), torch.empty(0), 0
    tensors: list[tuple[str, list[int], int]] = []

    def layout(dtype: torch.dtype, numel: int) -> dict[str, Any]:
        return {"dtype": str(dtype).removeprefix("torch."), "numel": numel, "tensors": tensors}

    for name, tensor in named_tensors:
        values = tensor.detach().contiguous().view(-1)
        step = max(1, _ALIGN_BYTES // values.itemsize)
        first = -(-filled // step) * step
        if tensors and (values.dtype != buffer.dtype or (first + values.numel()) * values.itemsize > bucket_bytes):
            yield layout(buffer.dtype, filled), buffer[:filled]
            buffer, other = other, buffer
            tensors, filled, first = [], 0, 0
        tensors.append((name, list(tensor.shape), first))
        if values.nbytes > bucket_bytes:  # it travels alone, from its own memory
            yield layout(values.dtype, values.numel()), values
            tensors = []
        else:
            if buffer.dtype != values.dtype or buffer.device != values.device or not buffer.numel():
                del buffer  # before its successor takes memory
                buffer = torch.empty(bucket_bytes // values.itemsize, dtype=values.dtype, device=values.device)
            filled = first + values.numel()
            buffer[first:filled] = values
        del tensor, values  # freed before the next one is gathered
    if tensors:
        yield layout(buffer.dtype, filled), buffer[:filled]


# -- rendezvous of the members -----------------------------------------------------------------------------------------


def open_store(address: str, timeout_s: float) -> dist.TCPStore:
    """Serve the store by which the members of a link find one another, on a free port of ``address`` alone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.bind((address, 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def find_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Join the store that the sender serves."""
    with _peer_errors("was not found"):
        return dist.TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )


def own_address(peer: str) -> str:
    """The address under which ``peer`` reaches this process."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # sends nothing: it looks up the route only
        return probe.getsockname()[0]


def node_id() -> str:
    """Equal for processes that reach one another over loopback."""
    namespace = "/proc/self/ns/net"
    return f"{platform.node()} {os.readlink(namespace) if os.path.exists(namespace) else ''}"


@contextmanager
def _peer_errors(what: str) -> Iterator[None]:
    """Turn torch's error, the loss or silence of another member, into a `WeightLinkError`."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise WeightLinkError(
            f"{_LINK} {what}: {reason} If no process died, raise actor_rollout_ref.nccl_timeout."
        ) from error
