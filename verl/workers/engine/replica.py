"""The engine of many processes that hold the whole model each: gradients are averaged, nothing is sharded.

What is left of ZeRO at stage 0, and of its stages 1 and 2 for a model that is not trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.models.loader import ModelSpec
from verl.utils.distributed import ensure_process_group
from verl.utils.offload import read
from verl.workers.engine.local import LocalEngine
from verl.workers.engine.topology import Topology


class ReplicaEngine(LocalEngine):
    """All weights in every process, which trains on its share of the rows."""

    def __init__(
        self,
        spec: ModelSpec,
        engine_config: Any = None,
        optim_config: Any = None,
        *,
        deepspeed_config: Any = None,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        ensure_process_group(device)
        self._bucket = int(read(deepspeed_config, "reduce_bucket_size", 500_000_000))
        super().__init__(spec, engine_config, optim_config, device=device, **options)

    def _place(self, sp_size: int, device: str) -> Topology:
        return Topology.of_ranks(sp_size, device)

    @torch.no_grad()
    def _finish_gradients(self) -> None:
        super()._finish_gradients()
        if self.topology.world_size == 1:
            return
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for parameter in trained:
            if parameter.grad is None:  # not used by this rank's rows, perhaps by another's
                parameter.grad = torch.zeros_like(parameter)
        for gradients in _buckets([parameter.grad for parameter in trained], self._bucket):
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            flat /= self.topology.world_size
            parts = flat.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])


def _buckets(tensors: list[Tensor], numbers: int) -> Iterator[list[Tensor]]:
    """Neighbours of one type together, up to ``numbers`` of their elements."""
    bucket: list[Tensor] = []
    held = 0
    for tensor in tensors:
        if bucket and (held + tensor.numel() > numbers or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.numel()
    if bucket:
        yield bucket
