"""Distributed checkpoints of megatron-core: weights and the optimizer's state, read on any mesh.

A folder holds every parameter under its name in the whole model, whatever ranks wrote it. The format is ``torch_dist``.
"""

from __future__ import annotations

import queue
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from verl.models.megatron.bridge import MegatronModel
from verl.models.megatron.training import parts_of, torch_optimizers

MOMENTS = ("exp_avg", "exp_avg_sq")


def sharded_state(
    model: MegatronModel,
    optimizer: Any = None,
    parts: Collection[str] = ("model",),
    is_loading: bool = False,
    prefix: str = "",
) -> dict[str, Any]:
    """This rank's part of ``model`` and ``optimizer``, as megatron-core's checkpoints describe it.

    Args:
        optimizer: needed for the part ``optimizer``.
        prefix: of the names of weights.
    """
    how = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    weights = {
        name: piece.sharded_state_dict(prefix=prefix, metadata=how)
        for name, piece in zip(_piece_names(model), model.plain_pieces, strict=True)
    }
    found = dict(weights) if "model" in parts else {}
    if "optimizer" in parts:
        by_part = [
            _sharded_part(part, weights, is_loading)
            if isinstance(part, DistributedOptimizer)
            else part.sharded_state_dict(weights, is_loading)
            for part in parts_of(optimizer)
        ]
        found["optimizer"] = by_part[0] if len(by_part) == 1 else dict(enumerate(by_part))
    return found


def _piece_names(model: MegatronModel) -> list[str]:
    return ["model"] if len(model.pieces) == 1 else [f"model{number}" for number in range(len(model.pieces))]


def _sharded_part(part: DistributedOptimizer, weights: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    """A distributed optimizer's state with the moments of each parameter whole, so that any mesh can read it.

    megatron-core's ``fully_reshardable``, by the same names; its own takes the wrong numbers where a buffer has padding
    between parameters, as with tied weights on two pipeline stages.
    """
    by_parameter = {id(one.data): one for one in nested_values(extract_sharded_tensors_and_factories(weights)[0])}
    ranges = _own_ranges(part)
    found: dict[int, dict[str, Any]] = {}
    for parameter in (one for buffer in part.buffers for one in buffer.param_index_map):
        place = by_parameter[id(parameter)]
        tensors = {}
        for name in ("param", *MOMENTS):
            tensor = torch.empty(parameter.shape) if is_loading else _whole(part, parameter, name, ranges)
            changes: dict[str, Any] = {"key": f"optimizer.state.{name}.{place.key}", "data": tensor}
            if not isinstance(place, ShardedTensorFactory):
                changes["dtype"] = tensor.dtype
            tensors[name] = replace(place, **changes)
        found[len(found)] = tensors
    return {**part.state_dict(), "param_state": found, "param_state_sharding_type": "fully_reshardable"}


def _own_ranges(part: DistributedOptimizer) -> dict[int, Any]:
    """Parameter (by id) -> range of its numbers that this rank's optimizer has."""
    maps = (ranges["param_map"] for buffer in part.gbuf_ranges for buckets in buffer.values() for ranges in buckets)
    return {id(parameter): entry["param"] for one in maps for parameter, entry in one.items()}


def _own_state(part: DistributedOptimizer, parameter: Tensor) -> dict[str, Tensor]:
    """fp32 weight and moments of this rank's range of ``parameter``."""
    group, order = part.model_param_group_index_map[parameter]
    main = part.optimizer.param_groups[group]["params"][order]
    return {"param": main, **part.optimizer.state[main]}


def _whole(part: DistributedOptimizer, parameter: Tensor, name: str, ranges: dict[int, Any]) -> Tensor:
    """One state of a parameter, joined from data-parallel ranks in host memory of the first, the one that writes it."""
    group = part.data_parallel_group
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    own = ranges.get(id(parameter))
    # other optimizers than torch's have no moments before their first step
    if own is not None and (state := _own_state(part, parameter).get(name)) is not None:
        whole[own.start : own.end] = state.view(-1)
    if group.size() > 1:
        dist.all_reduce(whole, group=group)
    if group.rank() > 0:
        return torch.zeros(1).expand(parameter.shape)
    return whole.cpu().view(parameter.shape)


def save(folder: Path, model: MegatronModel, optimizer: Any = None, parts: Collection[str] = ("model",)) -> None:
    """Write the parts to ``folder``, which is made; all ranks call it together."""
    state = sharded_state(model, optimizer, parts)
    folder.mkdir(exist_ok=True)
    # its own queue is served by a process that is started anew, and outlives this one if it is killed; nothing is
    # written in the background here
    filesystem_async._results_queue = queue.SimpleQueue()
    dist_checkpointing.save(state, str(folder), TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1))


@torch.no_grad()
def load(
    folder: Path,
    model: MegatronModel,
    optimizer: Any = None,
    parts: Collection[str] = ("model",),
    prefix: str = "",
) -> None:
    """Read the parts from ``folder`` into ``model`` and ``optimizer``; all ranks call it together.

    Raises:
        FileNotFoundError: the folder holds no distributed checkpoint.
        ValueError: it is of another model.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
        there = sorted(path.name for path in folder.iterdir())[:8] if folder.is_dir() else []
        raise FileNotFoundError(
            f"{folder} holds no distributed checkpoint of megatron-core, but {', '.join(there) or 'nothing'}: give a "
            "folder with metadata.json"
        )
    state = sharded_state(model, optimizer, parts, is_loading=True, prefix=prefix)
    new_head = _take_new_head(state, model, folder, prefix)
    try:
        state = dist_checkpointing.load(state, str(folder))
    except (CheckpointingException, KeyError) as error:
        raise ValueError(
            f"{folder} is of another model, or lacks a part of {', '.join(parts)}: {error}. Set model.path to the one "
            "that it was saved from"
        ) from error
    if "model" in parts:
        for name, piece in zip(_piece_names(model), model.plain_pieces, strict=True):
            weights = {key.removeprefix(prefix): value for key, value in state[name].items()}
            piece.load_state_dict(weights, strict=not new_head)
    if "optimizer" in parts:
        _load_optimizer(optimizer, state["optimizer"])
    elif optimizer is not None:
        optimizer.reload_model_params()


def _take_new_head(state: dict[str, Any], model: MegatronModel, folder: Path, prefix: str) -> bool:
    """Leave out of ``state`` the head of a critic that starts from a language model; returns whether it was there."""
    if model.head == "lm" or "optimizer" in state:
        return False
    saved, found = dist_checkpointing.load_tensors_metadata(str(folder)), False
    for weights in (state[name] for name in _piece_names(model) if name in state):
        for name in [name for name in weights if name.startswith(f"{prefix}output_layer.")]:
            same = saved.get(weights[name].key)
            if same is None or tuple(same.global_shape) != tuple(weights[name].global_shape):
                del weights[name]
                found = True
    return found


def _load_optimizer(optimizer: Any, state: dict[Any, Any]) -> None:
    parts = parts_of(optimizer)
    if not all(isinstance(part, DistributedOptimizer) for part in parts):
        optimizer.load_state_dict(state)
    else:
        for part, own in zip(parts, _state_of_parts(parts, state), strict=True):
            moments = own.pop("param_state")
            part.load_state_dict(own)
            ranges = _own_ranges(part)
            for number, parameter in enumerate(one for buffer in part.buffers for one in buffer.param_index_map):
                if (place := ranges.get(id(parameter))) is not None:
                    kept = _own_state(part, parameter)
                    for name in ("param", *MOMENTS):
                        kept[name].view(-1).copy_(moments[number][name].view(-1)[place.start : place.end])
    for inner in torch_optimizers(optimizer):
        for entry in inner.state.values():
            if isinstance(entry.get("step"), Tensor):
                # without Apex and Transformer Engine all parameters are given one tensor, which AdamW would raise once
                # for each of them
                entry["step"] = entry["step"].detach().clone()


_GROUP_KEYS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Entries by which megatron-core finds the group of a saved optimizer that belongs to one of its own."""


def _state_of_parts(parts: list[Any], state: dict[Any, Any]) -> list[dict[str, Any]]:
    """The state of each part, with the saved rates and steps: experts that are spread over ranks have an optimizer of
    their own, and now there may be one more or one less."""
    saved = next(one for one in (state, *state.values()) if isinstance(one, dict) and "optimizer" in one)
    group = saved["optimizer"]["param_groups"][0]
    found = []
    for number, part in enumerate(parts):
        own = state if len(parts) == 1 else state[number]
        groups = [{**group, **{key: one[key] for key in _GROUP_KEYS if key in one}} for one in part.param_groups]
        found.append({"optimizer": {**saved["optimizer"], "param_groups": groups}, "param_state": own["param_state"]})
    return found
