"""From a ROLL file to one plain tree: its ``defaults`` laid under it, its ``${...}`` filled in."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.config.base import ConfigError
from verl.config.roll.pipelines import unbuilt
from verl.config.tree import overlay

_BF16 = {"bf16": {"enabled": True}}
PRESETS: dict[str, dict] = {
    "deepspeed_zero": {"zero_optimization": {"stage": 0}, **_BF16},
    "deepspeed_zero2": {"zero_optimization": {"stage": 2}, **_BF16},
    "deepspeed_zero3": {"zero_optimization": {"stage": 3}, **_BF16},
    "deepspeed_zero3_cpuoffload": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        **_BF16,
    },
    "deepspeed_zero2_cpuoffload": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        **_BF16,
    },
    "envs": {},
}
"""Groups that ROLL's ``examples/config`` holds, for a file that was taken out of its folder."""


def read_roll(path: str, words: Sequence[str] = ()) -> tuple[dict[str, Any], set[str]]:
    """The tree of a ROLL configuration, and the top-level names that are there only to be referred to.

    Args:
        words: ``key=value`` of ROLL's own keys, laid over the file before ``${...}`` is filled in.

    Raises:
        ConfigError: no such file, no YAML, a ``defaults`` entry that is nowhere, or ``${...}`` that leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError([f"{path} does not exist (looked in {Path.cwd()}). Give ROLL's YAML file."])
    tree = _with_defaults(file, [])
    overlay(tree, OmegaConf.to_container(OmegaConf.from_dotlist([text.lstrip("+") for text in words])))
    referred = set(re.findall(r"\$\{([A-Za-z_]\w*)[.}]", str(tree)))
    try:
        plain = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        if whole := unbuilt(tree):
            raise ConfigError([whole]) from error
        key, reason = getattr(error, "full_key", None), str(error).splitlines()[0]
        raise ConfigError([f"{path}: {f'{key} ' if key else ''}cannot be filled in: {reason}."]) from error
    return plain, referred


def _with_defaults(file: Path, seen: list[Path]) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from yaml import YAMLError

    if file in seen:
        raise ConfigError([f"{file} names itself in its defaults, by way of {', '.join(map(str, seen))}."])
    try:
        own = OmegaConf.to_container(OmegaConf.load(file))  # reads 1e-6 as a number, which plain YAML does not
    except (YAMLError, OSError) as error:
        raise ConfigError([f"{file} is no YAML: {' '.join(str(error).split())}."]) from error
    if not isinstance(own, Mapping):
        raise ConfigError([f"{file} holds no mapping of keys to values."])
    own = {str(name): value for name, value in own.items()}
    tree: dict[str, Any] = {}
    entries = own.pop("defaults", None) or []
    for entry in entries:
        if entry == "_self_":
            overlay(tree, own)
            own = {}
        else:
            _lay_group(tree, entry, file, [*seen, file])
    overlay(tree, own)
    return tree


def _lay_group(tree: dict, entry: Any, file: Path, seen: list[Path]) -> None:
    """Lay a ``defaults`` entry over ``tree``: ``../config/name@_here_``, ``name@place``, or ``{group: name}``."""
    if isinstance(entry, Mapping):
        ((group, name),) = entry.items()
        if str(group).startswith("override ") or name is None:
            return  # hydra's own groups: logging, launcher
        name, place = f"{str(group).partition('@')[0]}/{name}", str(group).partition("@")[2]
    else:
        name, _, place = str(entry).partition("@")
    found = (file.parent / name).with_suffix(".yaml")
    if found.is_file():
        group = _with_defaults(found, seen)
    elif Path(name).name in PRESETS:
        base = Path(name).name
        group = {base: PRESETS[base]} if base.startswith("deepspeed") else PRESETS[base]
    elif "envs" in Path(name).name:
        return  # environments, of the agentic pipeline
    else:
        raise ConfigError([f"{file}: defaults names {entry}, but there is no {found}. Copy it there, or leave it out."])
    if place and place not in ("_here_", "_global_", "_group_"):
        group = {place: group}
    overlay(tree, group)
