"""Metadata and edits of Hugging Face models and their configs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from verl.compat import missing


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Count the real tokens of each row from 0; padding on the left stays at 0, on the right goes on as the last one.

    Args:
        mask: (B, L), 1 on real tokens.
    """
    return torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0, max=None)


def update_model_config(module_config: Any, override_config_kwargs: Mapping[str, Any]) -> None:
    """Set entries of a Hugging Face config in place; nested mappings change nested configs.

    ``rope_theta`` and ``rope_scaling``, as config.json of older releases has them, go to where the config's class keeps
    them. A name that the config does not have is set too; see `unknown_entries`.
    """
    for name, value in override_config_kwargs.items():
        inner = getattr(module_config, name, None)
        if isinstance(value, Mapping) and inner is not None and not isinstance(inner, dict):
            update_model_config(inner, value)
        elif _is_old_rope(module_config, name):
            _set_rope(module_config, name, value)
        else:
            setattr(module_config, name, value)


def unknown_entries(config: Any, overrides: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Say of each of ``overrides`` that ``config``, a Hugging Face config, has no such entry; one sentence each.

    An entry is what the class or its config.json names, an alias of it (``attribute_map``), or a name of older releases
    that the class still takes.
    """
    # a config accepts any name and ignores those it does not know, so a typing error would go unseen
    for name, value in overrides.items():
        inner = getattr(config, name, None)
        if isinstance(value, Mapping) and inner is not None and not isinstance(inner, dict):
            yield from unknown_entries(inner, value, f"{prefix}{name}.")
        elif not (hasattr(config, name) or _is_old_rope(config, name) or _asks_nothing_of_megatron(name, value)):
            yield (
                f"override_config.{prefix}{name}={value!r} is no entry of {type(config).__name__}, so the model would "
                f"not read it.{_nearest_entry(config, name, prefix)}"
            )


def _nearest_entry(config: Any, name: str, prefix: str) -> str:
    parts = {key: value for key, value in vars(config).items() if hasattr(value, "attribute_map")}
    holders = [key for key, part in parts.items() if hasattr(part, name)]
    if holders:
        return f" Write it as {prefix}{holders[0]}.{name}."
    known = [*(key for key in vars(config) if not key.startswith("_")), *getattr(config, "attribute_map", {})]
    near = difflib.get_close_matches(name, known, 1)
    return f" Did you mean {prefix + near[0]!r}?" if near else " Leave it out."


def _asks_nothing_of_megatron(name: str, value: Any) -> bool:
    """True for one of verl's Megatron sections of ``override_config`` with nothing switched on in it."""
    if name not in ("model_config", "moe_config"):
        return False
    return value is None or isinstance(value, Mapping) and not any(value.values())


def _is_old_rope(config: Any, name: str) -> bool:
    # transformers 5 keeps both entries in ``rope_parameters``
    is_old = name == "rope_scaling" or name == "rope_theta" and not hasattr(config, "rope_theta")
    return is_old and isinstance(getattr(config, "rope_parameters", None), dict)


def _set_rope(config: Any, name: str, value: Any) -> None:
    """Lay an entry of older config.json files over ``rope_parameters``; where layers are of two kinds, the global's."""
    whole = dict(config.rope_parameters)
    rope = dict(whole["full_attention"] if "full_attention" in whole else whole)
    if name == "rope_theta":
        rope["rope_theta"] = value
    else:
        kept = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        given = {("rope_type" if key == "type" else key): entry for key, entry in dict(value or {}).items()}
        rope = {"rope_type": "default", **kept, **given}
    config.rope_parameters = {**whole, "full_attention": rope} if "full_attention" in whole else rope


def get_generation_config(model: str, trust_remote_code: bool = False) -> Any:
    """The GenerationConfig in the folder (or under the hub id) ``model``, else that its model config implies.

    None where neither can be read.
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:  # there is no generation_config.json
        try:
            config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        except OSError:
            return None
        return GenerationConfig.from_model_config(config)


def count_parameters(model: nn.Module) -> int:
    """Number of parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def get_model_size(model: nn.Module, scale: str = "auto") -> tuple[float, str]:
    """Number of parameters in units of ``scale`` (``"B"``, ``"M"``, ``"K"``, ``""`` or ``"auto"``), and the unit."""
    # largest first: the first that fits is chosen
    units = {"B": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
    count = count_parameters(model)
    if scale == "auto":
        scale = next(unit for unit, size in units.items() if count >= size or unit == "")
    if scale not in units:
        raise ValueError(f"scale={scale!r} is unknown: use one of 'B', 'M', 'K', '' or 'auto'")
    return count / units[scale], scale


def print_model_size(model: nn.Module, name: str | None = None) -> None:
    """Print one line with the class name and the number of parameters."""
    size, unit = get_model_size(model)
    print(f"{name or type(model).__name__} contains {size:.2f}{unit} parameters")


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers loads and saves in silence here."""
    from transformers.utils import logging as hf_logging

    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            hf_logging.enable_progress_bar()


def __getattr__(name: str) -> Any:
    if name == "convert_weight_keys":
        from verl.models.weight_names import convert_weight_keys

        return convert_weight_keys
    raise missing(__name__, name)
