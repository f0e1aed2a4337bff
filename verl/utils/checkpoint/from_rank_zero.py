"""Tensors that rank 0 has, handed to all ranks one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from verl.utils.distributed import get_rank, get_world_size


class FromRankZero(Mapping[str, Tensor]):
    """Name -> tensor on the host. All ranks must ask for the same names in the same order.

    Args:
        tensors: on rank 0, what there is; ignored elsewhere.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None) -> None:
        self._tensors = dict(tensors or {}) if get_rank() == 0 else {}
        facts = [{name: (tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}]
        if get_world_size() > 1:
            dist.broadcast_object_list(facts, src=0)
        self._facts = facts[0]

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._facts[name]
        mine = self._tensors.get(name)
        tensor = torch.empty(shape, dtype=dtype) if mine is None else mine.detach().cpu().contiguous()
        if get_world_size() > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)
