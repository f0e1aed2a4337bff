"""Engine on torch's FullyShardedDataParallel (FSDP1), with the numbers, names and files of FSDP2.

Weights of a unit are one flat tensor, of which each rank holds a range; a range may begin within a weight.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._runtime_utils import _lazy_init
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from verl.checkpoint.shards import check_names
from verl.config.engine import FSDPConfig
from verl.models.loader import check_finite
from verl.models.weight_files import WeightFiles
from verl.models.weight_names import plain_name
from verl.utils.fsdp_utils import create_device_mesh, full_model_state, tied_parameters, wrapped_units
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.registry import register_engine


@register_engine("fsdp1")
class FSDP1Engine(FSDPEngine):
    """``FSDPEngine`` on FSDP1: weights are gathered, changed and saved unit by unit."""

    supports_l2_coef = False

    def _shard(self, module: nn.Module, config: FSDPConfig, dtype: torch.dtype) -> nn.Module:
        # every micro-batch reduces its gradient into the slices, where a step sums them
        self._reduce_once = self._gather_once = False
        mesh, units = self._mesh(module, config), set(wrapped_units(module, config))
        self._is_whole = mesh.shape[-1] == 1
        replicated, sharded = ShardingStrategy.HYBRID_SHARD, ShardingStrategy.FULL_SHARD
        if not config.reshard_after_forward:
            replicated, sharded = ShardingStrategy._HYBRID_SHARD_ZERO2, ShardingStrategy.SHARD_GRAD_OP
        strategy = replicated if mesh.ndim == 2 else sharded
        if self._is_whole:
            strategy = ShardingStrategy.NO_SHARD
            mesh = create_device_mesh(self.topology.world_size, -1, self.device.type)
        module.forward = partial(_forward_or_token_outputs, module, module.forward)
        with _quiet():
            # under the name fully_shard would give it, which checkpoints record
            wrapper = type(f"FSDP{type(module).__name__}", (FSDP,), {})(
                module,
                device_mesh=mesh,
                sharding_strategy=strategy,
                mixed_precision=MixedPrecision(**self._precision(config, dtype)),
                auto_wrap_policy=CustomPolicy(lambda child: child in units),
                param_init_fn=partial(_materialize, self.device, dict.fromkeys(tied_parameters(module))),
                device_id=self.device,
                use_orig_params=True,
                forward_prefetch=config.forward_prefetch,
            )
        # FSDP gathers the outermost weights around ``forward`` and nothing else
        wrapper.token_outputs = partial(wrapper, as_scores=True)
        _lazy_init(wrapper, wrapper)
        return wrapper

    def _cast_frozen(self, module: nn.Module) -> nn.Module:
        # one flat tensor has one precision
        return module

    @torch.no_grad()
    def _fill(self, module: Any, full: nn.Module | None) -> None:
        known = {} if full is None else full_model_state(full)
        for name, tensor in chain(_whole_parameters(module, writeback=True), _buffers(module)):
            if full is not None:
                tensor.copy_(known[name])
            dist.broadcast(tensor, src=0)

    @torch.no_grad()
    def _fill_from_files(self, module: Any, files: WeightFiles) -> None:
        # a range of a flat tensor may begin within a weight, so rank 0 reads each whole
        for name, tensor in _whole_parameters(module, writeback=True):
            if name in files:
                if self.topology.rank == 0:
                    whole = files.rows(name, 0, len(tensor), tensor.dtype)
                    check_finite(self.spec, name, whole)
                    tensor.copy_(whole)
                dist.broadcast(tensor, src=0)

    # -- the engine contract --------------------------------------------------------------------------------------

    def parameter_names(self) -> list[str]:
        return list(map(plain_name, super().parameter_names()))

    def tensor_names(self) -> list[str]:
        names = [name for name, _ in self.module.named_parameters(remove_duplicate=False)]
        return [*map(plain_name, names), *(name for name, _ in _buffers(self.module, persistent=True))]

    def parameter_counts(self) -> tuple[int, int]:
        flat = [handle.flat_param for handle in self._handles()]
        sizes = [
            (shape.numel(), p.requires_grad) for one in flat for shape, p in zip(one._shapes, one._params, strict=True)
        ]
        return sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)

    def _after_infer(self) -> None:
        # without a backward pass the outermost unit stays gathered
        for handle in self._handles():
            if handle.uses_sharded_strategy:
                handle.reshard(True)
                handle._prefetched = False

    def _run_backward(self, loss: Tensor, is_last: bool) -> None:
        loss.backward()

    def optimizer_step(self) -> float:
        norm = float(self.module.clip_grad_norm_(math.inf if self.grad_clip is None else self.grad_clip))
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        for handle in self._handles():
            handle._reset_flat_param_grad_info_if_needed()  # or the flat gradients stay until the next pass
        return norm

    def full_tensors(
        self, dtype: torch.dtype | None, leave_out: Collection[str], sharded: Collection[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        with self.on_device():
            for name, tensor in chain(_whole_parameters(self.module), _buffers(self.module, persistent=True)):
                if name not in leave_out:
                    # a copy, for the unit's memory is freed when the next one is gathered
                    kept = dtype is None or not tensor.is_floating_point()
                    yield name, tensor.detach().to(tensor.dtype if kept else dtype, copy=True)

    @cached_property
    def own_rows(self) -> dict[str, tuple[int, int]]:
        return {}  # a rank has a run of numbers of a whole unit

    def model_state(self) -> dict[str, Tensor]:
        with self.on_device(), _quiet():
            return self._saved(get_model_state_dict(self.module, options=self._options))

    @torch.no_grad()
    def load_model_state(self, state: Mapping[str, Tensor]) -> None:
        own = self.model_state()
        check_names(own, state)
        for name, tensor in chain(_whole_parameters(self.module, writeback=True), _buffers(self.module)):
            if name in own:
                piece = _as_piece(state[name], own[name])
                tensor.copy_(piece.full_tensor() if isinstance(piece, DTensor) else piece)

    def optimizer_state(self) -> dict[str, Any]:
        # torch would create the first state by a step, which then counts
        [has_state] = self.reduce([len(self.optimizer.state)], "max")
        if not has_state:
            return super().optimizer_state()
        with self.on_device(optimizer=True), _quiet():
            return get_optimizer_state_dict(self.module, self.optimizer, options=self._options)

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        if not state["state"]:
            return super().load_optimizer_state(state)
        own, names = self.model_state(), set(self.parameter_names())
        saved = {name for group in state["param_groups"] for name in group["params"]}
        if saved != names:
            raise ValueError(
                f"the optimizer state is of {len(saved)} parameters, this model has {len(names)}, and "
                f"{sorted(saved ^ names)[0]!r} is not in both: resume with the model it was saved from"
            )
        pieces: dict[str, Any] = {
            name: {key: _as_piece(value, own[name]) for key, value in entry.items()}
            for name, entry in state["state"].items()
        }
        with _quiet():
            set_optimizer_state_dict(self.module, self.optimizer, {**state, "state": pieces}, options=self._options)

    @property
    def layout(self) -> str:
        """As FSDP2 shards weights: along their first axis."""
        return "whole" if self._is_whole else f"fsdp2 {'x'.join(map(str, self.module._device_mesh.shape))}"

    @property
    def _options(self) -> StateDictOptions:
        return StateDictOptions(full_state_dict=self._is_whole)

    def _handles(self) -> list[Any]:
        """torch's handles of the flat tensors."""
        return [unit._handle for unit in FSDP.fsdp_modules(self.module) if unit._handle is not None]

    def _move(self, device: torch.device) -> None:
        """Move slices, between passes, and buffers."""
        self._after_infer()
        for handle in self._handles():
            handle.flat_param_to(device)
            handle.flat_param._local_shard = handle.flat_param.data
        for _, buffer in self.module.named_buffers():
            buffer.data = buffer.data.to(device)


def _forward_or_token_outputs(model: Any, forward: Callable, *args: Any, as_scores: bool = False, **inputs: Any) -> Any:
    """The model's ``forward`` pass, or with ``as_scores`` its ``token_outputs``."""
    return model.token_outputs(*args, **inputs) if as_scores else forward(*args, **inputs)


def _materialize(device: torch.device, tied: dict[nn.Parameter, nn.Parameter | None], module: nn.Module) -> None:
    """Allocate the parts of one module that are on the meta device, and move the others to ``device``.

    Args:
        tied: parameters with several names, each with the one that replaces it, which the calls fill in: ties are kept.
    """
    for name, parameter in module.named_parameters(recurse=False):
        made = tied.get(parameter)
        if made is None and parameter.device != device:
            moved = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.detach().to(device)
            made = nn.Parameter(moved, parameter.requires_grad)
            if parameter in tied:
                tied[parameter] = made
        if made is not None:
            module.register_parameter(name, made)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.device != device:
            setattr(module, name, torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device))


def _whole_parameters(module: FSDP, writeback: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (plain name, whole parameter), gathered unit by unit; with ``writeback`` changes of it are kept."""
    for place, unit in module.named_modules():
        if isinstance(unit, FSDP):
            with FSDP.summon_full_params(unit, recurse=False, writeback=writeback):
                for name, parameter in _own_parameters(unit._fsdp_wrapped_module):
                    yield plain_name(f"{place}.{name}" if place else name), parameter.data


def _own_parameters(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that are in no unit below ``module``."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter
    for name, child in module.named_children():
        if not isinstance(child, FSDP):
            yield from _own_parameters(child, f"{prefix}{name}.")


def _buffers(module: nn.Module, persistent: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (plain name, buffer); with ``persistent`` only those in checkpoints."""
    for place, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if not (persistent and name in part._non_persistent_buffers_set):
                yield plain_name(f"{place}.{name}" if place else name), buffer


def _as_piece(tensor: Any, like: Tensor) -> Any:
    """Shard a whole tensor, or place the piece of a saved one, as ``like``; scalars stay as they are."""
    if not isinstance(like, DTensor) or not isinstance(tensor, Tensor) or tensor.ndim == 0:
        return tensor
    mesh, placements = like.device_mesh, like.placements
    if isinstance(tensor, DTensor):
        local = tensor.to_local().to(mesh.device_type)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())
    return distribute_tensor(tensor.to(mesh.device_type), mesh, placements, src_data_rank=None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's deprecation warnings of FSDP1, also for its own calls."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
        yield
