"""Where in a transformers module each tensor of its checkpoint lives: what a weight sync writes to and reads back.

Mostly a module's own names and tensors, or other names (vision-language models); the experts of a mixture are slices
of fused tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

import torch
from torch import Tensor, nn

from verl.models.loader import LoRASpec, cast_parameters
from verl.models.weight_names import checkpoint_tensors


def checkpoint_places(model: nn.Module) -> dict[str, Tensor]:
    """Checkpoint name -> view into the module's memory, for all parameters and saved buffers.

    Tied tensors appear under each of their names.
    """
    own = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in own.items()}
    name_of = {id(shape): name for name, shape in shapes.items()}
    renamed = {name: name_of.get(id(shape)) for name, shape in checkpoint_tensors(model, shapes.items())}
    if None in renamed.values():
        return _sliced_places(model, own)
    return {name: own[old] for name, old in renamed.items()}


def split_places(places: dict[str, Tensor], has_adapter: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The places of a model's weights, and those of its adapter, by the names in a sync."""
    if not has_adapter:
        return places, {}
    from verl.models.lora import is_adapter, plain_adapter_name, without_wrapper

    base = {without_wrapper(name): place for name, place in places.items() if not is_adapter(name)}
    return base, {plain_adapter_name(name): place for name, place in places.items() if is_adapter(name)}


def add_unit_adapter(model: nn.Module, spec: LoRASpec, dtype: torch.dtype) -> None:
    """Put an adapter of scale 1 on the layers of ``spec``; its values come by a sync."""
    from verl.models.lora import add_adapter

    add_adapter(model, replace(spec, alpha=spec.rank, adapter_path=None), seed=0)
    cast_parameters(model, dtype)


def _sliced_places(model: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Let transformers cut tensors that hold their own cell numbers, and read from the pieces which cells they are."""
    names, starts, total = list(own), [], 0
    for tensor in own.values():
        starts.append(total)
        total += tensor.numel()

    def numbered():
        for name, start in zip(names, starts, strict=True):
            cells = torch.arange(start, start + own[name].numel())
            yield name, cells.view(own[name].shape)

    places = {}
    for name, cells in checkpoint_tensors(model, numbered()):
        owner = bisect_right(starts, int(cells.flatten()[0])) - 1
        places[name] = _view_of_cells(name, own[names[owner]], cells - starts[owner])
    return places


def _view_of_cells(name: str, tensor: Tensor, cells: Tensor) -> Tensor:
    """The view of a contiguous ``tensor`` whose elements have the flat numbers ``cells``."""
    first = int(cells.flatten()[0])
    strides = [
        int(cells.select(axis, 1).flatten()[0]) - first if size > 1 else 0 for axis, size in enumerate(cells.shape)
    ]
    expected = first + sum(
        torch.arange(size).mul(stride).view([-1 if i == axis else 1 for i in range(cells.ndim)])
        for axis, (size, stride) in enumerate(zip(cells.shape, strides, strict=True))
    )
    if not tensor.is_contiguous() or not torch.equal(cells, expected.expand(cells.shape)):
        raise NotImplementedError(
            f"{name} is not a slice of one of the model's own tensors, so a weight sync cannot place it. "
            "This family is not supported by rollout.name=hf."
        )
    return tensor.as_strided(cells.shape, strides, tensor.storage_offset() + first)
