"""Shard a model with torch's fully_shard (FSDP2), fill it, move it.

Knows modules, meshes and optimizers; no config tree, no batch.

Source: Zhao et al. 2023, PyTorch FSDP (arXiv:2304.11277).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from verl.utils.device import (
    get_device_id,
    get_device_name,
    get_torch_device,
    move_optimizer_state,
)
from verl.utils.distributed import get_rank, get_world_size

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "apply_fsdp2",
    "create_device_mesh",
    "fsdp2_clip_grad_norm_",
    "fsdp2_load_full_state_dict",
    "fsdp_modules",
    "fsdp_version",
    "fully_shard",
    "get_fsdp_full_state_dict",
    "get_fsdp_wrap_policy",
    "get_init_weight_context_manager",
    "get_sharding_strategy",
    "init_fn",
    "load_fsdp_model_to_gpu",
    "load_fsdp_optimizer",
    "move_optimizer_state",
    "offload_fsdp_model_to_cpu",
    "offload_fsdp_optimizer",
    "sharding_units",
    "tied_parameters",
    "wrapped_units",
]

logger = logging.getLogger(__name__)


def _read(config: Any, name: str, default: Any) -> Any:
    """Entry ``name`` of a mapping or a dataclass, or ``default``."""
    if config is None:
        return default
    return config.get(name, default) if hasattr(config, "get") else getattr(config, name, default)


def create_device_mesh(world_size: int, fsdp_size: int, device: str | None = None) -> DeviceMesh:
    """The mesh to shard over: all ranks, or groups of ``fsdp_size`` that hold replicas (HSDP).

    Raises:
        ValueError: if ``fsdp_size`` does not divide the number of ranks.
    """
    device = device or get_device_name()
    if fsdp_size is None or fsdp_size < 0 or fsdp_size >= world_size:
        return init_device_mesh(device, (world_size,), mesh_dim_names=("fsdp",))
    if fsdp_size == 0 or world_size % fsdp_size:
        raise ValueError(
            f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world_size} ranks: use a divisor, or -1 for all"
        )
    return init_device_mesh(device, (world_size // fsdp_size, fsdp_size), mesh_dim_names=("ddp", "fsdp"))


def sharding_units(model: nn.Module, class_names: Iterable[str], min_num_params: int = 0) -> list[nn.Module]:
    """The modules to shard one by one, inner before outer.

    Args:
        class_names: classes of the layers; used where ``min_num_params`` is 0.
        min_num_params: if positive, the smallest modules with at least so many parameters not yet in a unit.
    """
    if min_num_params <= 0:
        names = set(class_names)
        return [module for module in model.modules() if type(module).__name__ in names]
    units: list[nn.Module] = []
    # The outermost unit holds what is read without calling its module: tied weights and the last linear layer.
    outer = {model, *(child for child in model.children() if isinstance(child, nn.Linear))}
    tied = tied_parameters(model)

    def visit(module: nn.Module) -> list[nn.Parameter]:
        """Collect units below ``module``; returns the parameters no unit has taken."""
        left = [*module.parameters(recurse=False), *(left for child in module.children() for left in visit(child))]
        is_small = sum(parameter.numel() for parameter in left) < min_num_params
        # a list of modules has no forward to gather its weights for
        if is_small or module in outer or tied & set(left) or isinstance(module, nn.ModuleList | nn.ModuleDict):
            return left
        units.append(module)
        return []

    visit(model)
    return units


def tied_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that several modules hold."""
    owners = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    return {parameter for parameter, count in owners.items() if count > 1}


def apply_fsdp2(model: nn.Module, fsdp_kwargs: dict[str, Any], config: Any = None) -> list[nn.Module]:
    """Shard ``model`` in place: each layer a unit, the rest another; returns the former.

    Args:
        fsdp_kwargs: for ``fully_shard``: ``mesh``, ``mp_policy``, ``reshard_after_forward``, ...
        config: may hold ``wrap_policy``.
    """
    units = wrapped_units(model, config)
    for unit in units:
        fully_shard(unit, **fsdp_kwargs)
    fully_shard(model, **fsdp_kwargs)
    return units


def wrapped_units(model: nn.Module, config: Any = None) -> list[nn.Module]:
    """The units that ``config.wrap_policy`` chooses.

    It may hold ``transformer_layer_cls_to_wrap`` and ``min_num_params``; the default is the model's
    ``_no_split_modules``.

    Raises:
        ValueError: names layers that the model has not.
    """
    policy = _read(config, "wrap_policy", {}) or {}
    classes = _read(policy, "transformer_layer_cls_to_wrap", None) or getattr(model, "_no_split_modules", None) or ()
    classes = [classes] if isinstance(classes, str) else list(classes)
    min_num_params = _read(policy, "min_num_params", 0) or 0
    units = sharding_units(model, classes, min_num_params)
    if classes and not units and not min_num_params:
        raise ValueError(
            f"wrap_policy names the layers {classes}, and {type(model).__name__} has none of them: "
            "set transformer_layer_cls_to_wrap to the class of its layers"
        )
    return units


def fsdp2_load_full_state_dict(
    model: nn.Module, full_state: dict[str, Tensor], device_mesh: DeviceMesh | None = None, cpu_offload: Any = None
) -> None:
    """Fill a sharded model, with all its buffers, from rank 0.

    Args:
        model: sharded while on the meta device and given memory by ``to_empty``, or sharded with weights.
        full_state: on rank 0, full tensors of all parameters and *all* buffers, also those not saved in checkpoints
            (``full_model_state``); ignored elsewhere.
    """
    # torch would look for buffers that are in no state dict, so they go by hand
    buffers = dict(model.named_buffers())
    weights: dict[str, Any] = {name: tensor for name, tensor in full_state.items() if name not in buffers}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=get_world_size() > 1, strict=False)
    set_model_state_dict(model, weights, options=options)
    # Buffers such as rotary frequencies are in no state dict, and to_empty left them undefined.
    for name, buffer in buffers.items():
        if name in full_state:
            buffer.copy_(full_state[name])
        if get_world_size() > 1:
            dist.broadcast(buffer, src=0)


def full_model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers of an unsharded model, also those that checkpoints leave out."""
    return {**model.state_dict(), **dict(model.named_buffers())}


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Every unit of sharding in ``model``."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def fsdp_version(model: nn.Module) -> int:
    """2 for a model sharded by ``fully_shard``, 1 for FullyShardedDataParallel, 0 for neither."""
    if isinstance(model, FSDPModule):
        return 2
    from torch.distributed.fsdp import FullyShardedDataParallel

    return 1 if isinstance(model, FullyShardedDataParallel) else 0


def get_fsdp_full_state_dict(model: nn.Module, offload_to_cpu: bool = True, rank0_only: bool = True) -> dict:
    """The whole state dict of a sharded model; with ``rank0_only`` and offload, empty on other ranks."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload_to_cpu)
    state = get_model_state_dict(model, options=options)
    return {} if rank0_only and dist.is_initialized() and dist.get_rank() else state


def fsdp2_clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale sharded gradients so that their norm over all ranks is at most ``max_norm``; returns the norm before."""
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    total = total.full_tensor() if hasattr(total, "full_tensor") else total
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def get_fsdp_wrap_policy(module: nn.Module, config: Any = None, is_lora: bool = False) -> Any:
    """The ``auto_wrap_policy`` by which torch's FullyShardedDataParallel takes the units of `wrapped_units`.

    None where the model names no layers and ``config`` asks for none.

    Args:
        config: ``fsdp_config.wrap_policy``, a mapping; ``disable`` in it means None.
        is_lora: also make a unit of every layer whose only trained weight is its own, as adapters are.
    """
    from torch.distributed.fsdp.wrap import CustomPolicy

    if _read(config, "disable", False):
        return None
    units = {*wrapped_units(module, {"wrap_policy": config or {}})}
    if is_lora:
        units |= {
            layer
            for layer in module.modules()
            if not list(layer.children()) and getattr(getattr(layer, "weight", None), "requires_grad", False)
        }
    return CustomPolicy(lambda child: child in units) if units else None


def get_init_weight_context_manager(use_meta_tensor: bool = True, mesh: DeviceMesh | None = None) -> Any:
    """A callable whose ``with`` block makes weights on the host, or on the meta device where others fill them.

    Args:
        use_meta_tensor: only one rank of each group that shards together reads the weights; the others get empty ones.
        mesh: of sharding; its last dim is such a group. None: all ranks are.
    """
    rank = mesh.get_local_rank(mesh.ndim - 1) if mesh is not None else get_rank()
    return partial(torch.device, "meta" if use_meta_tensor and rank else "cpu")


def init_fn(x: nn.Module) -> nn.Module:
    """Give a module that is still on the meta device memory on the current device: FSDP's ``param_init_fn``."""
    if any(parameter.is_meta for parameter in x.parameters()):
        x.to_empty(device=get_torch_device().current_device(), recurse=False)
    return x


def get_sharding_strategy(device_mesh: DeviceMesh) -> Any:
    """Torch's ShardingStrategy of a mesh of `create_device_mesh`: FULL_SHARD of one dim, HYBRID_SHARD of two."""
    from torch.distributed.fsdp import ShardingStrategy

    strategies = {1: ShardingStrategy.FULL_SHARD, 2: ShardingStrategy.HYBRID_SHARD}
    if device_mesh.ndim not in strategies:
        raise ValueError(f"a mesh of {device_mesh.ndim} dims has no sharding strategy: use one of 1 or 2 dims.")
    return strategies[device_mesh.ndim]


# -- between host and device --------------------------------------------------------------------------------------


def offload_fsdp_model_to_cpu(model: nn.Module, empty_cache: bool = True) -> None:
    """Move a (sharded) model to host memory."""
    # gathered weights would stay on the device
    for unit in fsdp_modules(model):
        unit.reshard()
    model.to("cpu")
    if empty_cache and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def load_fsdp_model_to_gpu(model: nn.Module) -> None:
    """Move a (sharded) model to the current device."""
    model.to(get_device_id() if get_device_name() == "cuda" else "cpu")


def offload_fsdp_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Move the optimizer's state to host memory."""
    move_optimizer_state(optimizer, torch.device("cpu"))


def load_fsdp_optimizer(optimizer: torch.optim.Optimizer, device_id: int | str | torch.device) -> None:
    """Move the optimizer's state to a device."""
    move_optimizer_state(optimizer, torch.device(device_id))
