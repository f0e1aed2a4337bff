"""Buckets of weights from the worker to SGLang's scheduler processes by shared memory, without a copy through a socket.

On CPU the bucket lies in anonymous shared memory, which has no name that a killed process could leave behind; on CUDA
in one device buffer whose IPC handle is sent.
"""

from __future__ import annotations

import base64
import mmap
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from verl.workers.rollout.base import Bucket

_ALIGNMENT = 64


class SharedMemoryBuffer:
    """Shared memory for one bucket after the other; as large as the largest of them."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("verl-weights")
        self._mapped: mmap.mmap | None = None

    def pack(self, bucket: Bucket) -> dict[str, Any]:
        """Copy a bucket in; returns a message for `open_bucket`. The previous bucket must have been loaded."""
        layout, size = _layout_of(bucket)
        if self._mapped is None or len(self._mapped) < size:
            os.ftruncate(self._descriptor, size)
            self._mapped = mmap.mmap(self._descriptor, size)
        buffer = torch.frombuffer(self._mapped, dtype=torch.uint8)
        _fill(buffer, bucket, layout)
        return {"layout": layout, "path": f"/proc/{os.getpid()}/fd/{self._descriptor}"}

    def close(self) -> None:
        self._mapped = None  # unmapped when no tensor looks into it any more
        os.close(self._descriptor)


class CudaIpcBuffer:
    """The same in CUDA memory, which the schedulers open by handle."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def pack(self, bucket: Bucket) -> dict[str, Any]:
        from torch.multiprocessing.reductions import reduce_tensor

        layout, size = _layout_of(bucket)
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = None
            self._buffer = torch.empty(size, dtype=torch.uint8, device=bucket[0][1].device)
        _fill(self._buffer, bucket, layout)
        torch.cuda.synchronize(self._buffer.device)
        handle = pickle.dumps(reduce_tensor(self._buffer))
        uuid = str(torch.cuda.get_device_properties(self._buffer.device).uuid)
        return {"layout": layout, "handle": base64.b64encode(handle).decode(), "uuid": uuid}

    def close(self) -> None:
        self._buffer = None


@contextmanager
def open_bucket(message: dict[str, Any], device: torch.device) -> Iterator[Bucket]:
    """The bucket as tensors that look into the shared memory; they must not outlive the block."""
    buffer = _mapped(message["path"]) if "path" in message else _opened(message["handle"], message["uuid"])
    yield [
        (name, buffer[offset : offset + size].view(getattr(torch, dtype)).view(shape))
        for name, offset, size, dtype, shape in message["layout"]
    ]


def _layout_of(bucket: Bucket) -> tuple[list[tuple[str, int, int, str, list[int]]], int]:
    """(name, offset, bytes, dtype, shape) of every tensor in a buffer, and the buffer's size."""
    layout, end = [], 0
    for name, tensor in bucket:
        layout.append((name, end, tensor.nbytes, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return layout, max(end, _ALIGNMENT)


def _fill(buffer: Tensor, bucket: Bucket, layout: list[tuple[str, int, int, str, list[int]]]) -> None:
    for (_, tensor), (_, offset, size, _, _) in zip(bucket, layout, strict=True):
        buffer[offset : offset + size].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def _mapped(path: str) -> Tensor:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _opened(handle: str, uuid: str) -> Tensor:
    """A CUDA buffer of another process; its device has another number here if other devices are visible."""
    rebuild, arguments = pickle.loads(base64.b64decode(handle))
    devices = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if uuid not in devices:
        raise RuntimeError(f"The weights lie on the device {uuid}, which SGLang does not see: it sees {devices}.")
    arguments = list(arguments)
    arguments[6] = devices.index(uuid)  # storage_device of rebuild_cuda_tensor
    return rebuild(*arguments)
