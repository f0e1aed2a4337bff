"""Mapping of module names to checkpoint names.

A module's own names differ from its checkpoint's where transformers fuses weights (the experts of a mixture), where
two names mean one tied tensor, and where a wrapper puts its prefix in front. The one module that touches
``transformers.core_model_loading``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

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
    if not conversions(model):
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


def conversions(model: Any) -> list:
    """The conversions between names of ``model`` and of its checkpoint; empty where they are the same."""
    if getattr(model, "_weight_conversions", None) is None:
        remember_conversions(model)
    return model._weight_conversions


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


# -- from the names of files to those of a model -----------------------------------------------------------------------


class Origin(NamedTuple):
    """Tensors of a model's files of which one or more of its tensors are made."""

    stored: tuple[tuple[str, str], ...]
    """(Name in the files, pattern of the conversion that it matched), in the order in which they are joined."""
    target: str
    """Name of the first tensor made of them."""
    converter: Any = None
    """transformers' conversion; None where the one tensor only gets another name."""


def origins(model: Any, stored: Iterable[str]) -> list[Origin]:
    """Where the tensors of ``model`` come from, as ``from_pretrained`` would load them from files with these names.

    Names that the model has no place for are left out.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    own, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if name not in own and key in own:
            name, pattern = rename_source_key(key, [], [], prefix, own)
        if name in own:
            found.setdefault(name, []).append((key, pattern or ""))
    return [
        Origin(tuple(pairs), name, of_pattern[pairs[0][1]] if pairs[0][1] else None) for name, pairs in found.items()
    ]


def converted(origin: Origin, tensors: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Make the tensors of ``model`` whose origin this is, of the files' ``tensors`` by name."""
    if origin.converter is None:
        return {origin.target: tensors[origin.stored[0][0]]}
    converter = deepcopy(origin.converter)
    for key, pattern in origin.stored:
        converter.add_tensor(origin.target, key, pattern, tensors[key])
    made = converter.convert(origin.target, model=model, config=model.config)
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def keeps_rows(origin: Origin) -> bool:
    """Whether row i of what is made depends on nothing but the i-th tensor of each pattern: the fused experts."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    first, *others = origin.converter.operations
    return (
        type(first) is MergeModulelist
        and first.dim == 0
        and all(
            type(one) is Concatenate and one.dim > 0 or type(one) is Transpose and min(one.dim0, one.dim1) > 0
            for one in others
        )
    )
