"""Tensors on the wire: numpy arrays over the same memory.

Pickle protocol 5 sends a contiguous numpy array as one buffer of exactly its own bytes, which Ray and shared memory
carry without a copy. A torch tensor would be copied, and a view of one would send its whole storage.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def tensor_to_numpy(tensor: Tensor) -> tuple[np.ndarray, torch.dtype | None]:
    """A contiguous array on the CPU, and the dtype to view it back to where numpy has none (bf16, fp8)."""
    tensor = tensor.detach().cpu().contiguous()
    try:
        return tensor.numpy(), None
    except TypeError:
        return tensor.view(_CARRIERS[tensor.element_size()]).numpy(), tensor.dtype


def tensor_from_numpy(array: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor over the memory of ``array``. Where that is read-only, nobody may write to the tensor either."""
    if not array.flags.writeable:
        array = np.asarray(_WritableAlias(array)) if array.size else array.copy()
    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(dtype)


class _WritableAlias:
    """Lets torch wrap read-only memory without its warning: torch has no read-only tensors."""

    def __init__(self, array: np.ndarray):
        self.owner = array  # numpy keeps this object, and so the memory, alive
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
