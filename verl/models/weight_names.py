"""Mapping of module names to checkpoint names.

A module's own names differ from its checkpoint's where transformers fuses weights (the experts of a mixture), where
two names mean one tied tensor, and where a wrapper puts its prefix in front. The one module that touches
``transformers.core_model_loading``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")


def plain_name(name: str) -> str:
    """Return ``name`` without the prefixes of sharding, checkpointing and compiling wrappers."""
    for prefix in _WRAPPERS:
        name = name.replace(prefix, "")
    return name


def tied_duplicates(model: Any) -> frozenset[str]:
    """Names that share their tensor with another name and are left out of checkpoints."""
    return frozenset(getattr(model, "all_tied_weights_keys", None) or ())


def checkpoint_tensors(model: Any, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Rename full tensors of ``model`` to their checkpoint names, splitting fused ones.

    Args:
        named: (module name, full tensor), in the order of the module.

    Yields:
        (checkpoint name, tensor). At most the tensors of one submodule are held, to be split together.
    """
    named = ((plain_name(name), tensor) for name, tensor in named)
    if getattr(model, "_weight_conversions", None) is None:
        remember_conversions(model)
    if not model._weight_conversions:
        yield from named
        return
    from transformers.core_model_loading import revert_weight_conversion

    held: dict[str, Tensor] = {}
    parent = None
    for name, tensor in named:
        if held and name.rpartition(".")[0] != parent:
            yield from revert_weight_conversion(model, held).items()
            held = {}
        parent = name.rpartition(".")[0]
        held[name] = tensor
    if held:
        yield from revert_weight_conversion(model, held).items()


def convert_weight_keys(state_dict: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Return the full tensors of a model's state dict under their checkpoint names."""
    return dict(checkpoint_tensors(model, state_dict.items()))


def remember_conversions(model: Any) -> None:
    """Store the name conversions of ``model`` on it, before a wrapper changes its class.

    transformers looks them up by the model's class, which sharding wrappers replace.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:  # transformers 4 loads checkpoints under their own names
        model._weight_conversions = []
        return
    found = get_model_conversion_mapping(model, add_legacy=False)
    # a change of prefix is for checkpoints that lack one: going back, it would add what was not there
    model._weight_conversions = [conversion for conversion in found if not isinstance(conversion, PrefixChange)]
