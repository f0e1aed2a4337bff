"""Small facts and edits of Hugging Face models and their configs."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from verl.compat import missing

logger = logging.getLogger(__name__)


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Count the real tokens of each row from 0; padding on the left stays at 0, on the right goes on as the last one.

    Args:
        mask: (B, L), 1 on real tokens.
    """
    return torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0, max=None)


def update_model_config(module_config: Any, override_config_kwargs: Mapping[str, Any]) -> None:
    """Set entries of a Hugging Face config in place; nested mappings change nested configs.

    A name the config does not have is set too, since remote code may read it, with a warning that names the nearest.
    """
    for name, value in override_config_kwargs.items():
        inner = getattr(module_config, name, None)
        if isinstance(value, Mapping) and inner is not None and not isinstance(inner, dict):
            update_model_config(inner, value)
            continue
        if not hasattr(module_config, name):
            near = difflib.get_close_matches(name, [key for key in vars(module_config) if not key.startswith("_")], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            logger.warning("override_config.%s is not an entry of %s%s", name, type(module_config).__name__, hint)
        setattr(module_config, name, value)


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

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def __getattr__(name: str) -> Any:
    if name == "convert_weight_keys":
        from verl.models.weight_names import convert_weight_keys

        return convert_weight_keys
    raise missing(__name__, name)
