"""Engines that hold whole weights: of one process, the reference of the others; and replicated over processes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.checkpoint.shards import check_names, fill
from verl.config.engine import DeepSpeedConfig, FSDPConfig
from verl.models.loader import load_model
from verl.models.token_outputs import attach_token_outputs
from verl.utils.config import typed_section
from verl.utils.device import current_device, empty_cache, has_own_memory, move_optimizer_state
from verl.utils.distributed import Topology, ensure_process_group, get_world_size
from verl.utils.torch_functional import add_to_wider
from verl.workers.engine.engine import Engine
from verl.workers.engine.registry import register_engine
from verl.workers.engine.train_step import add_l2_gradient, clip_gradients


@register_engine("local")
class LocalEngine(Engine):
    """All weights in one process.

    Where the compute precision differs from the storage precision, the module holds the compute copy, refreshed after
    each step, and the optimizer the master weights: no cast in any forward pass, and gradients of micro-batches are
    summed in the master's precision.
    """

    supports_l2_coef = True

    def _load_and_place(self, config: FSDPConfig, backend_config: Any, device: str, seed: int, sp_size: int) -> None:
        self.topology = self._topology(sp_size, device)
        self.device = current_device(device)
        self._offload_params = config.param_offload and has_own_memory(self.device)
        self._offload_optimizer = config.optimizer_offload and has_own_memory(self.device)
        spec, train = self.spec, self.is_trained
        self.module = load_model(spec, seed, dtype=None if train else spec.compute_torch_dtype).to(self.device)
        attach_token_outputs(self.module)
        self._masters: dict[torch.nn.Parameter, Tensor] = {}
        self._stale_gradients: set[torch.nn.Parameter] = set()
        if train and spec.compute_torch_dtype != spec.param_torch_dtype:
            self._split_masters(spec.compute_torch_dtype)
        self._prepare()
        self._build_optimizer([self._masters.get(p, p) for p in self.module.parameters()])

    def _topology(self, sp_size: int, device: str) -> Topology:
        if sp_size > 1:
            raise ValueError(
                f"ulysses_sequence_parallel_size={sp_size} with strategy=local: a sequence "
                "cannot be sharded over one process. Use strategy=fsdp2 on several ranks, or size 1."
            )
        if get_world_size() > 1:
            raise ValueError(
                f"strategy=local is for one process, and {get_world_size()} were started: use strategy=fsdp2, or "
                "trainer.n_gpus_per_node=1 and trainer.nnodes=1"
            )
        return Topology()

    # -- precision ------------------------------------------------------------------------------------------------

    def _split_masters(self, dtype: torch.dtype) -> None:
        for parameter in self.module.parameters():
            master = parameter.detach()
            parameter.data = master.to(dtype)
            if parameter.requires_grad:
                self._masters[parameter] = master.requires_grad_()
                master.grad = None
                parameter.register_post_accumulate_grad_hook(self._accumulate)

    def _accumulate(self, parameter: torch.nn.Parameter) -> None:
        """Add a finished gradient to the master's and free it, while it is still in the CPU cache."""
        master = self._masters[parameter]
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        elif parameter in self._stale_gradients:
            master.grad.copy_(parameter.grad)
        else:
            add_to_wider(master.grad, parameter.grad)
        self._stale_gradients.discard(parameter)
        parameter.grad = None

    def _start_gradients(self) -> None:
        # memory of the last step's gradients is overwritten, not allocated again
        self._stale_gradients = {parameter for parameter, master in self._masters.items() if master.grad is not None}

    # -- the engine contract --------------------------------------------------------------------------------------

    def optimizer_step(self) -> float:
        for parameter in self._stale_gradients:  # that no micro-batch of this step has reached
            self._masters[parameter].grad.zero_()
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if self.l2_coef:
            add_l2_gradient(trained, self.l2_coef)
        norm = clip_gradients(trained, self.grad_clip)
        if math.isfinite(norm):
            self.optimizer.step()
            if self._masters:
                self._refresh()
        # host memory is cheap and slow to get: the gradients of masters stay allocated there
        if not self._masters or self.device.type != "cpu":
            self.optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def _refresh(self) -> None:
        """Round the module's copy from the master weights."""
        torch._foreach_copy_(list(self._masters), list(self._masters.values()))

    def full_tensors(self, dtype: torch.dtype | None, leave_out: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for name, tensor in self.module.state_dict().items():
            if name in leave_out:
                continue
            if tensor.is_floating_point() and tensor.dtype != dtype:
                tensor = self._masters.get(parameters.get(name), tensor).detach()
                tensor = tensor if dtype is None else tensor.to(dtype)
            yield name, tensor

    def weights_to_sync(self, dtype: torch.dtype, sharded: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        is_held = any(parameter.dtype == dtype for parameter in self.module.parameters())
        return self.weights(dtype if is_held else None, sharded)

    def model_state(self) -> dict[str, Tensor]:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        return {
            name: self._masters.get(parameters.get(name), tensor).detach()
            for name, tensor in self._saved(self.module.state_dict()).items()
        }

    @property
    def layout(self) -> str:
        return "whole"

    def load_model_state(self, state: Mapping[str, Tensor]) -> None:
        own = self.model_state()
        check_names(own, state)
        for name, tensor in own.items():
            fill(tensor, state[name], name)
        if self._masters:
            self._refresh()

    def move(self, to_host: bool, *, model: bool, optimizer: bool) -> None:
        device = torch.device("cpu") if to_host else self.device
        if model and self._offload_params:
            self.module.to(device)
        # master weights are read by the optimizer only
        for master in self._masters.values() if optimizer and self._offload_params else ():
            master.grad = None
            master.data = master.data.to(device)
        if optimizer and self._offload_optimizer and self.optimizer is not None:
            move_optimizer_state(self.optimizer, device)
        if to_host and (self._offload_params or self._offload_optimizer):
            empty_cache(self.device)


# -- replicated over processes: gradients are averaged, nothing is sharded -------------------------------------------


class ReplicaEngine(LocalEngine):
    """All weights in every process, which trains on its part of the rows."""

    supports_l2_coef = False

    def _load_and_place(self, config: FSDPConfig, backend_config: Any, device: str, seed: int, sp_size: int) -> None:
        ensure_process_group(device)
        section = {} if backend_config is None else backend_config
        self._bucket = typed_section(section, DeepSpeedConfig).reduce_bucket_size
        super()._load_and_place(config, backend_config, device, seed, sp_size)

    def _topology(self, sp_size: int, device: str) -> Topology:
        return Topology.of_ranks(sp_size, device)

    def optimizer_step(self) -> float:
        if self.topology.world_size > 1:
            self._average_gradients()
        return super().optimizer_step()

    @torch.no_grad()
    def _average_gradients(self) -> None:
        for parameter in self._stale_gradients:
            self._masters[parameter].grad.zero_()
        self._stale_gradients = set()  # or the step would take the other ranks' gradients for stale
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
    """Group tensors of one dtype, up to ``numbers`` elements."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.numel() > numbers or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
