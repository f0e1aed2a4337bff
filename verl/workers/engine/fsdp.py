"""Engine on torch's fully_shard (FSDP2): weights, gradients and optimizer state sharded over processes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl.checkpoint.shards import check_names, fill
from verl.config.engine import FSDPConfig, MixedPrecisionConfig, ModelSizes
from verl.models.loader import cast_parameters, check_finite, empty_model, load_model
from verl.models.token_outputs import attach_token_outputs
from verl.models.weight_files import WeightFiles
from verl.models.weight_names import conversions, plain_name
from verl.telemetry.memory import host_memory
from verl.utils.device import current_device, device_memory, empty_cache, has_own_memory, move_optimizer_state
from verl.utils.distributed import (
    Topology,
    all_reduce_numbers,
    ensure_process_group,
    raised_together,
    ranks_per_node,
)
from verl.utils.fsdp_utils import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    apply_fsdp2,
    create_device_mesh,
    fsdp2_load_full_state_dict,
    fsdp_modules,
    full_model_state,
)
from verl.utils.torch_functional import PrecisionType
from verl.workers.engine.engine import Engine
from verl.workers.engine.gather import Wait, one_ahead, start_gathering
from verl.workers.engine.registry import register_engine
from verl.workers.engine.train_step import add_l2_gradient, clip_gradients

logger = logging.getLogger(__name__)


@register_engine("fsdp", "fsdp2")
class FSDPEngine(Engine):
    """Each rank holds a slice of every weight and trains on its part of the rows.

    Layers are gathered for their forward and backward pass in the compute precision; slices, gradients and optimizer
    state are kept in ``param_dtype``. With ``fsdp_size`` less than the number of ranks, groups of ranks
    hold replicas. With ``offload_policy`` slices, gradients and optimizer state always stay in host memory.
    """

    supports_l2_coef = True

    def _load_and_place(self, config: FSDPConfig, backend_config: Any, device: str, seed: int, sp_size: int) -> None:
        ensure_process_group(device)
        self.device = current_device(device)
        self.topology = Topology.of_ranks(sp_size, device)
        self._on_host = config.offload_policy
        # where slices are during training
        self._home = torch.device("cpu") if self._on_host else self.device
        moves = not self._on_host and has_own_memory(self.device)
        self._offload_params = moves and config.param_offload
        self._offload_optimizer = moves and config.optimizer_offload
        self.module = self._sharded_model(config, seed)
        self._prepare()
        self._after_infer()
        self._build_optimizer(list(self.module.parameters()))

    def _sharded_model(self, config: FSDPConfig, seed: int) -> Any:
        spec, is_alone = self.spec, self.topology.world_size == 1
        dtype = spec.param_torch_dtype if self.is_trained else spec.compute_torch_dtype
        stored = None if is_alone else self._stored_model(seed, dtype)
        if stored is not None:
            module = self._cast_frozen(stored[0])
            attach_token_outputs(module)
            module = self._shard(module, config, dtype)
            self._fill_from_files(module, stored[1])
        else:
            # the other ranks never hold more of the model than their slices
            full = self._cast_frozen(load_model(spec, seed, dtype)) if self.topology.rank == 0 else None
            module = full.to(self._home) if is_alone else self._cast_frozen(empty_model(spec, dtype))
            attach_token_outputs(module)
            module = self._shard(module, config, dtype)
            if not is_alone:
                self._fill(module, full)
        for buffer in module.buffers():
            buffer.data = buffer.data.to(self.device)
        return module

    def _shard(self, module: Any, config: FSDPConfig, dtype: torch.dtype) -> nn.Module:
        """Shard ``module``, whose weights are of ``dtype`` and perhaps on the meta device."""
        mesh = self._mesh(module, config)
        self._gather_once, self._reduce_once = self._once_a_mini_batch(module, config, mesh.shape[-1])
        options = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(**self._precision(config, dtype)),
            "reshard_after_forward": config.reshard_after_forward and not self._gather_once,
        }
        if self._on_host:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        units: list[Any] = apply_fsdp2(module, options, config)
        if config.forward_prefetch:
            for unit, following in pairwise(units):  # in the order in which they run
                unit.set_modules_to_forward_prefetch([following])
        if self._gather_once:
            module.set_reshard_after_backward(False)
        register_fsdp_forward_method(module, "token_outputs")
        return module

    def _mesh(self, module: nn.Module, config: FSDPConfig) -> DeviceMesh:
        """The mesh to shard ``module`` over; where nodes could hold replicas, the log says why they do or do not."""
        world, per_node, state = self.topology.world_size, ranks_per_node(), self._sizes(module, config).state
        if (text := config.sharding(world, per_node, state, self._memory)) and self.topology.rank == 0:
            logger.warning(text)
        size = config.group_size(world, per_node, state, self._memory)
        return create_device_mesh(world, size, self.device.type)

    def _once_a_mini_batch(self, module: nn.Module, config: FSDPConfig, ranks: int) -> tuple[bool, bool]:
        """Whether weights are gathered and gradients reduced once a mini-batch; where the memory decides, the log says
        by which numbers.

        Args:
            ranks: of a sharding group.
        """
        given = self.device.type, ranks, self._sizes(module, config), self._memory
        if (text := config.copies(*given)) and self.topology.rank == 0:
            logger.warning(text)
        return config.once_a_mini_batch(*given)

    @cached_property
    def _memory(self) -> int:
        """Memory of the smallest device of all ranks, or of a rank's part of its host; collective at first."""
        own = device_memory(self.device) or host_memory() // max(1, ranks_per_node())
        [least] = all_reduce_numbers([-own], "max", None, self.device)
        return int(-least)

    def _sizes(self, module: nn.Module, config: FSDPConfig) -> ModelSizes:
        """Bytes of the whole ``module``."""
        small = self._optim_config is not None and self._optim_config.optimizer == "AdamW8bit"
        reduced, state, numbers, trained = self._precision(config, torch.float32)["reduce_dtype"], 0, 0, 0
        for parameter in module.parameters():
            count, size = parameter.numel(), parameter.numel() * parameter.itemsize
            is_trained = self.is_trained and parameter.requires_grad
            state += size + is_trained * (size + (2 * count if small else 2 * size))
            numbers, trained = numbers + count, trained + is_trained * count
        return ModelSizes(state, numbers * self.spec.compute_torch_dtype.itemsize, trained * reduced.itemsize)

    def _precision(self, config: FSDPConfig, dtype: torch.dtype) -> dict[str, Any]:
        """Return the precision of layers, if not the ``dtype`` of their weights, and of gradient reduction."""
        computed, reduced = self.spec.compute_torch_dtype, config.mixed_precision or MixedPrecisionConfig()
        return {
            "param_dtype": computed if computed != dtype else None,
            "reduce_dtype": PrecisionType.to_dtype(reduced.reduce_dtype),
        }

    def _fill(self, module: Any, full: nn.Module | None) -> None:
        """Load every rank's slices of ``full``, which only rank 0 has."""
        module.to_empty(device=self._home)
        module.tie_weights()
        fsdp2_load_full_state_dict(module, full_model_state(full) if full is not None else {})

    @torch.no_grad()
    def _fill_from_files(self, module: Any, files: WeightFiles) -> None:
        """Read this rank's slices of the weights that are in ``files``; the others have their values."""
        module._apply(lambda tensor: torch.empty_like(tensor, device=self._home) if tensor.is_meta else tensor)
        module.tie_weights()
        with raised_together():
            for name, parameter in module.named_parameters():
                if name in files:
                    local, shape = parameter.to_local(), parameter.shape
                    size, offset = compute_local_shape_and_global_offset(
                        shape, parameter.device_mesh, parameter.placements
                    )
                    rows = files.rows(name, offset[0], offset[0] + size[0], parameter.dtype)
                    check_finite(self.spec, name, rows)
                    local.copy_(rows)

    def _cast_frozen(self, module: nn.Module) -> nn.Module:
        """Cast frozen weights, which never change, to the precision they are used in."""
        if self.has_adapter:
            cast_parameters(module, self.spec.compute_torch_dtype, frozen_only=True)
        return module

    # -- the engine contract --------------------------------------------------------------------------------------

    def _run_backward(self, loss: Tensor, is_last: bool) -> None:
        if self._reduce_once:
            self.module.set_requires_gradient_sync(is_last)
        else:  # replicas, if there are any, are summed once: until then a rank holds the sum of its group
            self.module.set_requires_all_reduce(is_last)
        loss.backward()

    def _after_infer(self) -> None:
        # without a backward pass the outermost unit stays gathered, and its parameters are not the sharded ones; with
        # gather_once all units do, after a step too
        for unit in fsdp_modules(self.module):
            unit.reshard()

    def optimizer_step(self) -> float:
        if self._gather_once:
            self._after_infer()
        trained: list[Tensor] = list(self.module.parameters())
        if self.l2_coef:
            add_l2_gradient(trained, self.l2_coef)
        norm = clip_gradients(trained, self.grad_clip)
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def full_tensors(
        self, dtype: torch.dtype | None, leave_out: Collection[str], sharded: Collection[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        yield from one_ahead(self._slices(dtype, leave_out, sharded))

    def _slices(
        self, dtype: torch.dtype | None, leave_out: Collection[str], sharded: Collection[str]
    ) -> Iterator[tuple[str, Callable[[], Wait]]]:
        for name, tensor in self.module.state_dict().items():
            if name in leave_out:
                continue
            if dtype is not None and tensor.dtype != dtype and tensor.is_floating_point():
                # cast before gathering: half the bytes travel
                tensor = tensor.to(dtype)
            tensor = tensor.to(self.device)
            if name in sharded and isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            yield name, partial(_start_gathering, tensor)

    @cached_property
    def own_rows(self) -> dict[str, tuple[int, int]]:
        if self.has_adapter or self.topology.world_size == 1 or conversions(self.module):
            return {}
        rows = {}
        for name, tensor in self.module.state_dict().items():
            if isinstance(tensor, DTensor) and plain_name(name) == name:
                size, offset = compute_local_shape_and_global_offset(
                    tensor.shape, tensor.device_mesh, tensor.placements
                )
                if size[1:] == tensor.shape[1:]:
                    rows[name] = (offset[0], size[0])
        return rows

    def model_state(self) -> dict[str, Tensor]:
        return self._saved(self.module.state_dict())

    @property
    def layout(self) -> str:
        mesh = next(p.device_mesh for p in self.module.parameters() if isinstance(p, DTensor))
        return f"fsdp2 {'x'.join(map(str, mesh.shape))}"

    def load_model_state(self, state: Mapping[str, Tensor]) -> None:
        own = self.model_state()
        check_names(own, state)
        for name, tensor in own.items():
            fill(tensor, state[name], name)

    def move(self, to_host: bool, *, model: bool, optimizer: bool) -> None:
        device = torch.device("cpu") if to_host else self.device
        if model and self._offload_params:
            self._move(device)
        if optimizer and self._offload_optimizer and self.optimizer is not None:
            move_optimizer_state(self.optimizer, device)
        if to_host and (self._offload_params or self._offload_optimizer):
            empty_cache(self.device)

    def _move(self, device: torch.device) -> None:
        """Move slices and buffers."""
        self._after_infer()
        self.module.to(device)


def _start_gathering(tensor: Tensor) -> Wait:
    """Begin to join the slices of a weight; all ranks call it in the same order."""
    if not isinstance(tensor, DTensor):
        return lambda: tensor
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if [type(tensor.placements[axis]) for axis in axes] != [Shard] or not tensor.placements[axes[0]].is_shard(0):
        return tensor.full_tensor
    mesh, [axis], local = tensor.device_mesh, axes, tensor.to_local()
    rows = -(-len(tensor) // mesh.size(axis))
    part = local.contiguous() if len(local) == rows else local.new_zeros(rows, *local.shape[1:])
    if len(local) < rows:
        part[: len(local)] = local
    wait, length = start_gathering(part, mesh.get_group(axis)), len(tensor)
    return lambda: wait()[:length]
