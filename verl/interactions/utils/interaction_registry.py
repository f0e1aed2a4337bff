"""Interactions of a run: read from the YAML file of ``multi_turn.interaction_config_path``."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl.interactions.base import BaseInteraction
from verl.utils.import_utils import load_class_from_fqn, load_extern_type, split_file_name
from verl.utils.py_functional import nearest_name

KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"

_METHODS = ("start_interaction", "generate_response", "finalize_interaction")


def initialize_interactions_from_config(interaction_config_file: str) -> dict[str, BaseInteraction]:
    """Return the interactions of a YAML file by name: ``interaction: [{name, class_name, config}]``.

    ``class_name`` is a dotted class or ``path/file.py:Class``. Without ``name`` it is the class's, in small letters and
    without "interaction".

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file lists no interaction, an entry lacks its class, or two have one name.
        TypeError: a class is no interaction.
        ModuleNotFoundError: a class is in no module that can be imported.
    """
    classes = _classes(interaction_config_file)
    return {name: cls({"name": name, **config}) for name, (cls, config) in classes.items()}


def interaction_names(interaction_config_file: str) -> list[str]:
    """Return the names of a file's interactions, whose classes are imported and not made. Raises as above."""
    return list(_classes(interaction_config_file))


@lru_cache(maxsize=8)
def interactions_of(interaction_config_file: str) -> dict[str, BaseInteraction]:
    """Return `initialize_interactions_from_config`, made once: one object of a name serves all rows of a process."""
    return initialize_interactions_from_config(interaction_config_file)


def select_interaction(interactions: Mapping[str, BaseInteraction], name: str | None) -> BaseInteraction:
    """Return the interaction of a row's ``interaction_kwargs.name``; without one, ``gsm8k``, or else the first.

    Raises:
        ValueError: none has this name.
    """
    if name is None:
        return interactions.get("gsm8k") or next(iter(interactions.values()))
    if name not in interactions:
        raise ValueError(
            f"extra_info.interaction_kwargs.name={name!r} is no interaction of {KEY}; those are "
            f"{', '.join(interactions)}.{nearest_name(name, list(interactions))} Add it to that file."
        )
    return interactions[name]


def _classes(path: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return name -> (class, its ``config``) of a file's entries."""
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    for entry in _entries(path):
        name, cls = _named_class(entry, path)
        if name in found:
            raise ValueError(f"{KEY}={path}: two interactions are named {name!r}. Rename one.")
        found[name] = cls, dict(entry.get("config") or {})
    return found


def _entries(path: str) -> list[Mapping[str, Any]]:
    from omegaconf import OmegaConf  # not at the top: reading a configuration costs less than importing it

    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"{KEY}={path}: there is no such file. Name a YAML file with a list 'interaction'.")
    tree = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    entries = tree.get("interaction") if isinstance(tree, Mapping) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(
            f"{KEY}={path} lists no interaction: it must have the key 'interaction' with a list of "
            "{name, class_name, config}."
        )
    return entries


def _named_class(entry: Mapping[str, Any], path: str) -> tuple[str, Any]:
    target = entry.get("class_name")
    if not isinstance(target, str) or not target:
        raise ValueError(f"{KEY}={path}: the entry {dict(entry)!r} has no class_name. Give the dotted name of a class.")
    in_file = split_file_name(target)
    cls = load_extern_type(*in_file) if in_file else load_class_from_fqn(target, "class_name")
    missing = [method for method in _METHODS if not callable(getattr(cls, method, None))]
    if not isinstance(cls, type) or missing:
        raise TypeError(
            f"{KEY}={path}: {target} is no interaction: it has no {', '.join(missing) or 'class'}. Derive it from "
            "verl.interactions.base.BaseInteraction."
        )
    return str(entry.get("name") or cls.__name__.lower().replace("interaction", "") or cls.__name__.lower()), cls
