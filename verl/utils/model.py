"""Small facts and edits of Hugging Face models and their configs."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Count the real tokens of each row from 0; padding on the left stays at 0, on the right goes on as the last one.

    Args:
        mask: (B, L), 1 on real tokens.
    """
    return torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0, max=None)


def update_model_config(config: Any, override_config_kwargs: Mapping[str, Any]) -> None:
    """Set entries of a Hugging Face config in place; nested mappings change nested configs.

    A name the config does not have is set too, since remote code may read it, with a warning that names the nearest.
    """
    for name, value in override_config_kwargs.items():
        inner = getattr(config, name, None)
        if isinstance(value, Mapping) and inner is not None and not isinstance(inner, dict):
            update_model_config(inner, value)
            continue
        if not hasattr(config, name):
            near = difflib.get_close_matches(name, [key for key in vars(config) if not key.startswith("_")], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            logger.warning("override_config.%s is not an entry of %s%s", name, type(config).__name__, hint)
        setattr(config, name, value)


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
