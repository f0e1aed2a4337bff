"""The transformers model of the engine: built without values, its attention, and its weight map: the view that holds
each checkpoint tensor, written and read back by a sync.

Mostly a module's own names and tensors, or other names (vision-language models); the experts of a mixture are slices
of fused tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from verl.models.loader import LoRASpec, cast_parameters, language_model_class
from verl.models.multimodal import is_vision_language
from verl.models.weight_names import checkpoint_tensors
from verl.workers.rollout.hf.kv_cache import DECODE_ATTENTION


def weight_map(model: nn.Module) -> dict[str, Tensor]:
    """Checkpoint name -> view into the module's memory, for all parameters and saved buffers.

    Tied tensors appear under each of their names.
    """
    own = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in own.items()}
    name_of = {id(shape): name for name, shape in shapes.items()}
    renamed = {name: name_of.get(id(shape)) for name, shape in checkpoint_tensors(model, shapes.items())}
    if None in renamed.values():
        return _fused_weight_map(model, own)
    return {name: own[old] for name, old in renamed.items()}


def split_weight_map(views: dict[str, Tensor], has_adapter: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weight map of a model, and that of its adapter, by the names in a sync."""
    if not has_adapter:
        return views, {}
    from verl.models.lora import is_adapter, plain_adapter_name, without_wrapper

    base = {without_wrapper(name): view for name, view in views.items() if not is_adapter(name)}
    return base, {plain_adapter_name(name): view for name, view in views.items() if is_adapter(name)}


def add_unscaled_adapter(model: nn.Module, spec: LoRASpec, dtype: torch.dtype) -> None:
    """Put an adapter of scale 1 on the layers of ``spec``; its values come by a sync."""
    from verl.models.lora import add_adapter

    add_adapter(model, replace(spec, alpha=spec.rank, adapter_path=None), seed=0)
    cast_parameters(model, dtype)


def _fused_weight_map(model: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weight map by element indices: transformers splits tensors of indices; the pieces tell their elements."""
    names, starts, total = list(own), [], 0
    for tensor in own.values():
        starts.append(total)
        total += tensor.numel()

    def numbered():
        for name, start in zip(names, starts, strict=True):
            indices = torch.arange(start, start + own[name].numel())
            yield name, indices.view(own[name].shape)

    views = {}
    for name, indices in checkpoint_tensors(model, numbered()):
        owner = bisect_right(starts, int(indices.flatten()[0])) - 1
        views[name] = _view_of_elements(name, own[names[owner]], indices - starts[owner])
    return views


def _view_of_elements(name: str, tensor: Tensor, indices: Tensor) -> Tensor:
    """The view of a contiguous ``tensor`` whose elements have the flat ``indices``."""
    first = int(indices.flatten()[0])
    strides = [
        int(indices.select(axis, 1).flatten()[0]) - first if size > 1 else 0 for axis, size in enumerate(indices.shape)
    ]
    expected = first + sum(
        torch.arange(size).mul(stride).view([-1 if i == axis else 1 for i in range(indices.ndim)])
        for axis, (size, stride) in enumerate(zip(indices.shape, strides, strict=True))
    )
    if not tensor.is_contiguous() or not torch.equal(indices, expected.expand(indices.shape)):
        raise NotImplementedError(
            f"{name} is not a slice of one of the model's own tensors, so a weight sync cannot write to it. "
            "This family is not supported by rollout.name=hf."
        )
    return tensor.as_strided(indices.shape, strides, tensor.storage_offset() + first)


# -- The model itself: attention, and parameters without values --------------------------------------------------------


def choose_attention(model: nn.Module, requested: str | None) -> None:
    """Use `decode_attention` where torch's fused attention is right; eager code where scores are capped."""
    text = model.config.get_text_config(decoder=True)
    if requested is not None:
        model.set_attn_implementation(requested)
    elif getattr(text, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    elif text._attn_implementation == "sdpa":
        # a vision tower has no cache to read
        model.set_attn_implementation(
            {"text_config": DECODE_ATTENTION} if is_vision_language(model.config) else DECODE_ATTENTION
        )


def uninitialized_model(
    model_config: Any, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> nn.Module:
    """A model with real buffers (rotary frequencies) and parameters of the right size that hold nothing yet."""
    with _parameters_on_meta():
        auto_class = language_model_class(model_config) or AutoModelForCausalLM
        model = auto_class.from_config(model_config, dtype=dtype, trust_remote_code=trust_remote_code)
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    model.tie_weights()
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built inside hold their parameters on the meta device: no memory, no time spent on random numbers."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
