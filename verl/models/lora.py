"""Low-rank adapters on the linear layers of a model: added, switched off, merged, written for peft.

A layer y = W x gets y = W x + s B A x with W frozen, A (r, in) and B (out, r) trained and s = alpha / r. B starts at
zero, so a fresh adapter changes nothing. The one module that imports peft, and imported only by a run with adapters.
Knows modules and names; knows no sharding and no batch.

Source: Hu et al. 2021, LoRA (arXiv:2106.09685).
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, TaskType, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from verl.models.multimodal import vision_tower
from verl.models.weight_names import plain_name
from verl.utils.distributed import get_rank
from verl.utils.py_functional import derive_seed

if TYPE_CHECKING:
    from verl.models.loader import LoRASpec

logger = logging.getLogger(__name__)

_ADAPTER = "default"  # peft's name of a model's only adapter
_WRAPPED_NAME = "model"  # name of the model below the wrapper that peft injects into
_HEADS = ("score", "classifier")
_MAX_LISTED = 12
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # prefix of module names in peft's files


def add_adapter(model: Any, spec: LoRASpec, seed: int, is_value: bool = False) -> None:
    """Add an adapter to every target layer of ``model``, in place, and freeze the rest except a value head.

    The first A is uniform in +-1/sqrt(in), generated from ``seed`` and the layer's name only; with
    ``spec.adapter_path`` A and B come from there. Within ``torch.device("meta")`` the adapter gets its shapes only;
    else it has memory also where the model's weights have none.

    Raises:
        ValueError: a target that is no linear layer of the model, or a saved adapter that does not fit ``spec``.
    """
    chosen = target_layers(model, spec)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=[f"{_WRAPPED_NAME}.{name}" for name in chosen],
        lora_dropout=0.0,
        bias="none",
        task_type=TaskType.TOKEN_CLS if is_value else TaskType.CAUSAL_LM,
        base_model_name_or_path=getattr(model, "name_or_path", None),
    )
    # without a wrapper peft mistakes ``gate_proj`` of a mixture of experts for the fused experts
    wrapper = nn.Module()
    wrapper.add_module(_WRAPPED_NAME, model)
    with warnings.catch_warnings():  # of Conv1D layers, which it then handles
        warnings.simplefilter("ignore")
        inject_adapter_in_model(config, wrapper, _ADAPTER)
    config.target_modules = set(chosen)
    model.peft_config = {_ADAPTER: config}
    for name in _HEADS if is_value else ():
        if isinstance(getattr(model, name, None), nn.Linear):
            getattr(model, name).requires_grad_(True)
            config.modules_to_save = [name]
    layers = adapter_layers(model)
    if torch.get_default_device().type == "meta":
        return
    with torch.no_grad():
        for name, layer in layers.items():
            for part in (layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]):
                if part.weight.is_meta:  # as the weight it adapts
                    part.to_empty(device="cpu")
            first = layer.lora_A[_ADAPTER].weight
            generator = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
            bound = first.shape[1] ** -0.5
            first.copy_(torch.empty(first.shape).uniform_(-bound, bound, generator=generator))
            layer.lora_B[_ADAPTER].weight.zero_()
        if spec.adapter_path:
            _load_adapter(model, spec)


def target_layers(model: Any, spec: LoRASpec) -> list[str]:
    """Return the names of the layers that get an adapter.

    ``all-linear`` means every adaptable linear layer except the last. A string is a regular expression for the
    whole name or, as every entry of a list, the name itself or its end. ``spec.leaves_vision_tower`` excludes the
    tower.

    Raises:
        ValueError: an entry matches nothing; names it and the layers there are.
    """
    adaptable, not_adaptable = _linear_layers(model, vision_tower(model) if spec.leaves_vision_tower else None)
    if spec.target_modules == "all-linear":
        chosen = set(adaptable)
        if not_adaptable and get_rank() == 0 and torch.get_default_device().type != "meta":
            reasons = {".".join(name.split(".")[-2:]): reason for name, reason in not_adaptable.items()}
            left_out = "; ".join(f"{name} ({reason})" for name, reason in reasons.items())
            logger.warning("model.target_modules=all-linear leaves out layers that cannot get an adapter: %s", left_out)
    else:
        chosen = _matching_layers(spec.target_modules, adaptable, not_adaptable, "target_modules")
    chosen -= _matching_layers(spec.exclude_modules or [], [*adaptable, *not_adaptable], {}, "exclude_modules")
    if not chosen:
        raise ValueError(
            f"model.target_modules={spec.target_modules!r} without model.exclude_modules={spec.exclude_modules!r} "
            f"leaves no layer to train: the model's linear layers are {_list_layers(adaptable)}. Exclude less."
        )
    return [name for name in adaptable if name in chosen]


def _linear_layers(model: Any, without: nn.Module | None) -> tuple[list[str], dict[str, str]]:
    """Return the adaptable linear layers, and those that are not with the reason.

    The output layer is in neither, since its logits are chunked, nor is a value head, which is trained whole.

    Args:
        without: a part of the model to leave out.
    """
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    left_out = set() if without is None else set(without.modules())
    adaptable: list[str] = []
    not_adaptable: dict[str, str] = {}
    for name, module in model.named_modules():
        if module is output or module in left_out or name in _HEADS:
            continue
        if isinstance(module, nn.Linear | Conv1D):
            parent, _, child = name.rpartition(".")
            reason = _not_adaptable_reason(module, model.get_submodule(parent), child)
            if reason:
                not_adaptable[name] = reason
            else:
                adaptable.append(name)
        elif not type(module).__module__.startswith("torch.nn"):  # a convolution's weight has three dimensions too
            stacked = [child for child, p in module.named_parameters(recurse=False) if p.ndim == 3]
            not_adaptable |= {
                f"{name}.{child}": "is many matrices in one tensor, as fused experts are" for child in stacked
            }
    return adaptable, not_adaptable


def _not_adaptable_reason(module: Any, parent: Any, name: str) -> str | None:
    """Return why an adapter on the linear layer ``parent.name`` would have no effect, or None."""
    if not _is_linear_map(module):
        return f"is a {type(module).__name__}, which computes more than a matrix product"
    if _reads_weight(parent.__class__, name):
        return f"is not called: {type(parent).__name__} passes its weight to a kernel"
    return None


def _is_linear_map(module: Any) -> bool:
    """Whether a linear layer, perhaps with a custom forward, returns one tensor of its width."""
    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = module(module.weight.new_zeros(2, module.weight.shape[1]))
    except Exception as error:  # of the model's code, which may take more than one tensor
        logger.debug("%s is not adapted: it raised %s on two vectors", type(module).__name__, error)
        return False
    return isinstance(found, Tensor) and found.shape == (2, module.weight.shape[0])


@lru_cache(maxsize=1024)
def _reads_weight(owner: type, name: str) -> bool:
    """Whether the code of ``owner`` reads the weight or bias of its layer ``name`` instead of calling it.

    Reading their type and shape, or slices of them as Megatron's split products do, is allowed.
    """
    use = re.compile(rf"self\.{name}\.(weight|bias)\b(?!\.(dtype|device|shape|size)|\[)")
    for cls in owner.__mro__[: owner.__mro__.index(nn.Module)]:
        try:
            source = inspect.getsource(cls)
        except (OSError, TypeError):  # defined at run time, without source
            continue
        if use.search(source):
            return True
    return False


def _matching_layers(
    entries: str | Iterable[str], adaptable: list[str], not_adaptable: dict[str, str], option: str
) -> set[str]:
    """Return the layers matching ``entries`` of ``option``; an entry without a match is an error."""
    found: set[str] = set()
    for entry in [entries] if isinstance(entries, str) else entries:
        matches = {name for name in adaptable if _matches(entry, name)}
        if not matches:
            refused = next(
                (f" ({name} {reason})" for name, reason in not_adaptable.items() if _matches(entry, name)), ""
            )
            raise ValueError(
                f"model.{option}: {entry!r} names no linear layer of this model that can be adapted{refused}. "
                f"There are {_list_layers(adaptable)}. Use names, ends of names, or a regular expression."
            )
        found |= matches
    return found


def _matches(entry: str, name: str) -> bool:
    try:
        return name == entry or name.endswith(f".{entry}") or bool(re.fullmatch(entry, name))
    except re.error:  # a name is no regular expression
        return False


def _list_layers(adaptable: list[str]) -> str:
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in adaptable))
    more = f" and {len(ends) - _MAX_LISTED} more" if len(ends) > _MAX_LISTED else ""
    return f"{', '.join(ends[:_MAX_LISTED])}{more} (as in {adaptable[0]})" if adaptable else "none"


# -- switching off ------------------------------------------------------------------------------------------------


def adapter_layers(model: Any) -> dict[str, LoraLayer]:
    """Adapted layers by name."""
    return {plain_name(name): module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Disable the adapter within the block; outputs are then bit-identical to the base model's."""
    layers = list(adapter_layers(model).values())
    # peft's own switch also flips requires_grad, which a sharded model must not see change
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, was_off in zip(layers, before, strict=True):
            layer._disable_adapters = was_off


# -- as tensors ---------------------------------------------------------------------------------------------------
# A state dict of an adapted model has P.base_layer.weight, P.lora_A.default.weight and P.lora_B.default.weight where
# the layer P had P.weight. Streams below keep its order, in which these follow one another.


def is_adapter(name: str) -> bool:
    """Whether a module's tensor ``name`` belongs to an adapter."""
    return f".lora_A.{_ADAPTER}." in name or f".lora_B.{_ADAPTER}." in name


def merge_adapter(model: Any, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Merge full tensors of an adapted model into those of a plain model: W + s B A.

    Computed and returned in fp32; one layer at a time is held.
    """
    layers = adapter_layers(model)
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named:
        layer, part = _split(name)
        if part == "base_layer.weight" or is_adapter(name):
            parts = held.setdefault(layer, {})
            parts[part] = tensor
            if len(parts) == 3:
                weight, first, second = held.pop(layer).values()
                adapted = layers[layer]
                delta = (second.float() @ first.float()) * adapted.scaling[_ADAPTER]
                yield f"{layer}.weight", weight.float() + (delta.T if adapted.fan_in_fan_out else delta)
        else:
            yield without_wrapper(name), tensor
    assert not held, f"adapters without all of their tensors: {sorted(held)}"


def _split(name: str) -> tuple[str, str]:
    """Split the name of an adapted layer's tensor into (layer, rest)."""
    for part in (".base_layer.", ".lora_A.", ".lora_B."):
        layer, found, rest = name.partition(part)
        if found:
            return layer, f"{part[1:]}{rest}"
    return name, ""


def without_wrapper(name: str) -> str:
    """Return the tensor's name before its layer was wrapped."""
    return name.replace(".base_layer.", ".")


def scaled_adapter(model: Any, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter for rollout engines: ``P.lora_A.weight`` is A and ``P.lora_B.weight`` s B, so its scale is 1."""
    layers = adapter_layers(model)
    for name, tensor in named:
        layer, part = _split(name)
        if part.startswith("lora_B"):
            tensor = tensor.float() * layers[layer].scaling[_ADAPTER]
        yield plain_adapter_name(name), tensor


def plain_adapter_name(name: str) -> str:
    """Return an adapter tensor's name without peft's adapter name."""
    return name.replace(f".{_ADAPTER}.", ".")


# -- as files -----------------------------------------------------------------------------------------------------


def write_adapter(model: Any, named: Iterable[tuple[str, Tensor]], folder: Path, base: str) -> None:
    """Write the trained tensors in the format of ``peft.PeftModel.from_pretrained``.

    Args:
        named: full tensors of the adapter and of a trained head, by module name.
        base: folder or hub name of the base model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{_PREFIX}{plain_adapter_name(name)}": tensor.to("cpu").contiguous() for name, tensor in named}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    config = copy.copy(model.peft_config[_ADAPTER])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.target_modules = sorted(config.target_modules)  # peft makes it a set, whose order varies
    config.save_pretrained(folder)


def _load_adapter(model: Any, spec: LoRASpec) -> None:
    """Fill the adapter from a folder that peft or ``write_adapter`` wrote."""
    folder = Path(spec.adapter_path).expanduser()
    if not (folder / _CONFIG).exists() or not (folder / _WEIGHTS).exists():
        raise ValueError(f"model.lora_adapter_path={spec.adapter_path!r} holds no {_CONFIG} with {_WEIGHTS}.")
    saved = json.loads((folder / _CONFIG).read_text())
    for key, option, value in (("r", "lora_rank", spec.rank), ("lora_alpha", "lora_alpha", spec.alpha)):
        if saved.get(key) != value:
            raise ValueError(
                f"model.{option}={value} is not that of model.lora_adapter_path={spec.adapter_path!r}, which was "
                f"trained with {saved.get(key)}. Set model.{option}={saved.get(key)}."
            )
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(folder / _WEIGHTS).items()}
    parameters = {plain_adapter_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    if odd := sorted(parameters.keys() ^ tensors.keys()):
        raise ValueError(
            f"model.lora_adapter_path={spec.adapter_path!r} and model.target_modules={spec.target_modules!r} differ in "
            f"{len(odd)} tensors, first {odd[0]!r}. Set target_modules and exclude_modules to what it was trained "
            f"with: {saved.get('target_modules')}."
        )
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
