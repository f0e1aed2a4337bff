"""Weight transfer across process groups: one sender broadcasts a set of weights, bucket by bucket, to all ranks of a
rollout.

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

from verl.workers.rollout.base import Bucket, Receipt, RolloutEngine, WeightSyncError
from verl.workers.rollout.weights.sync import compare, with_checksums

_START, _BUCKET, _END, _BREAK = range(4)
_ALIGN_BYTES = 64  # tensors of a bucket begin at multiples of it, as fast copies want


class WeightLinkError(WeightSyncError):
    """The other end of the link is gone, stands still or gave up: this end is not the cause."""


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
        self._store, self._timeout_s, self._broken = store, timeout_s, None
        timeout = timedelta(seconds=timeout_s)
        with _peer_errors("could not be built"):
            self._control_group = _gloo(dist.PrefixStore("words", store), rank, size, own_address(store.host), timeout)
            if self.device.type == "cpu":
                self._data_group = self._control_group
            else:
                options = dist.ProcessGroupNCCL.Options()
                # at its own timeout torch's watchdog ends the whole process; `_wait` is to come first, with an error
                options._timeout = 2 * timeout + timedelta(seconds=60)
                self._data_group = dist.ProcessGroupNCCL(dist.PrefixStore("tensors", store), rank, size, options)

    # -- the sender ----------------------------------------------------------------------------------------------------

    def send(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int, bucket_bytes: int, dtype: torch.dtype
    ) -> TransferStats:
        """Broadcast a full set of weights. Extra memory: one bucket, and the tensor that is being put into it.

        Args:
            named_tensors: checkpoint names and full tensors, tied duplicates left out.
            version: the sender's version of these weights.
            bucket_bytes: bytes sent at once; a larger tensor travels alone.
            dtype: floating tensors are cast to it: the type the receivers hold them in.

        Raises:
            WeightLinkError: a receiver is gone or does not take the next bucket within the link's timeout.
        """
        self._check_usable()
        start, self.num_bytes, sums = time.perf_counter(), 0, {}
        self._send_message(_START, version)
        try:
            for layout, values in packed(with_checksums(named_tensors, dtype, sums), bucket_bytes):
                self._send_message(_BUCKET, layout)
                self._broadcast_values(values)
        except WeightLinkError:
            raise
        except BaseException as error:
            with suppress(WeightLinkError):
                self._send_message(_BREAK, f"{type(error).__name__}: {error}")
            raise
        self._send_message(_END, sums)
        return TransferStats(version, self.num_bytes, time.perf_counter() - start)

    # -- a receiver ----------------------------------------------------------------------------------------------------

    def receive(self, rollout: RolloutEngine) -> Receipt:
        """Take the transfer the sender starts and make sure that ``rollout``, which must be awake, holds it.

        Extra memory is one bucket. Afterwards ``rollout.version`` is the sender's; after any error it is None.

        Raises:
            WeightSyncError: names the tensors that are missing, unknown, misshapen or differ.
            WeightLinkError: the sender is gone, stands still or gave up.
        """
        self._check_usable()
        rollout.invalidate()
        self.num_bytes, sums = 0, {}
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
        while True:
            kind, note = self._receive_message(_BUCKET, _END)
            if kind == _END:
                sums.update(note)
                return
            yield self._receive_bucket(note)

    def _receive_bucket(self, layout: dict[str, Any]) -> Bucket:
        values = torch.empty(layout["numel"], dtype=getattr(torch, layout["dtype"]), device=self.device)
        self._broadcast_values(values)
        return [
            (name, values[first : first + torch.Size(shape).numel()].view(shape))
            for name, shape, first in layout["tensors"]
        ]

    # -- both ----------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._broken is not None:
            what = "The link that carries weights from the actor to the rollout"
            raise WeightLinkError(f"{what} is closed: {self._broken}")

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

    def _broadcast_values(self, values: Tensor) -> None:
        with _peer_errors("broke"):
            self._wait(self._data_group.broadcast(values.view(torch.uint8), 0))
        self.num_bytes += values.nbytes

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

    The values are good until the next bucket is requested: there is one buffer for all of them.
    """
    room, names, filled = torch.empty(0), [], 0

    def bucket() -> tuple[dict[str, Any], Tensor]:
        dtype = str(room.dtype).removeprefix("torch.")
        return {"dtype": dtype, "numel": filled, "tensors": names}, room[:filled]

    for name, tensor in named_tensors:
        values = tensor.detach().contiguous().view(-1)
        step = max(1, _ALIGN_BYTES // values.itemsize)
        first = -(-filled // step) * step
        if names and (values.dtype != room.dtype or (first + values.numel()) * values.itemsize > bucket_bytes):
            yield bucket()
            names, filled, first = [], 0, 0
        if not names and values.nbytes > bucket_bytes:
            dtype = str(values.dtype).removeprefix("torch.")
            yield {"dtype": dtype, "numel": values.numel(), "tensors": [(name, list(tensor.shape), 0)]}, values
        else:
            if room.dtype != values.dtype or room.device != values.device or not room.numel():
                del room
                room = torch.empty(bucket_bytes // values.itemsize, dtype=values.dtype, device=values.device)
            room[first : first + values.numel()] = values
            names.append((name, list(tensor.shape), first))
            filled = first + values.numel()
        del tensor, values  # freed before the next one is gathered
    if names:
        yield bucket()


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
        probe.connect((peer, 9))  # sends nothing: it asks for the way only
        return probe.getsockname()[0]


def node_id() -> str:
    """Equal for processes that reach one another over loopback."""
    namespace = "/proc/self/ns/net"
    return f"{platform.node()} {os.readlink(namespace) if os.path.exists(namespace) else ''}"


def _gloo(store: dist.Store, rank: int, size: int, address: str, timeout: timedelta) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, size, options)


@contextmanager
def _peer_errors(what: str) -> Iterator[None]:
    """Turn torch's error, the loss or silence of another member, into a `WeightLinkError`."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise WeightLinkError(
            f"The link that carries weights from the actor to the rollout {what}: {reason} If no process died, raise "
            "actor_rollout_ref.nccl_timeout."
        ) from error
