"""Really giving back CPU memory, for engines whose sleep mode exists on GPUs only.

Storages are resized in place, so that every view an engine made of them lives on and finds its memory again.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from verl.utils.process_memory import host_memory

_NAN_BYTE = 0xFF
"""Repeated, it reads as NaN in every floating type: weights that were forgotten and not synced cannot pass for real."""


class HostMemory:
    """The storages behind some tensors, given back and taken again together.

    Args:
        tensors: may share storages.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors if tensor.numel()}
        self._storages = [(storage, storage.nbytes()) for storage in found.values()]

    def release(self) -> None:
        """Free the memory and forget what stood in it."""
        for storage, _ in self._storages:
            storage.resize_(0)
        return_free_memory()

    @property
    def held(self) -> int:
        """Bytes taken now."""
        return sum(storage.nbytes() for storage, _ in self._storages)

    def take(self, byte: int) -> None:
        """Take the memory again, each byte of it set to ``byte``."""
        for storage, size in self._storages:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(byte)

    def take_as_nan(self) -> None:
        """Take the memory again, full of NaN."""
        self.take(_NAN_BYTE)


def return_free_memory() -> None:
    """Hand what this process freed back to the system: the C library keeps blocks below 32 MiB for itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def own_storages(model: nn.Module) -> None:
    """Copy weights that live in mapped files into memory that can be freed and taken again; ties are kept."""
    copies: dict[int, Tensor] = {}
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        if not storage.resizable():
            if parameter.data_ptr() not in copies:
                copies[parameter.data_ptr()] = parameter.detach().clone()
            parameter.data = copies[parameter.data_ptr()]


def cache_share(share: float) -> int:
    """Bytes a KV cache in host memory may take: ``share`` of this worker's part, half of which is the trainer's."""
    return int(host_memory() * share / 2 / int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
