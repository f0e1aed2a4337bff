"""Features of verl's releases v0.5 to v0.9 that are not built: each once, with what to do instead.

Keys, modules, configuration files and backends lead to a row of ``features.yaml``, so that a request is answered
with its name. The file is read when something is met that this package does not know, which most runs never do.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_name("features.yaml")


class Feature(NamedTuple):
    """Something that a user of verl may ask for by a key, a module, a configuration file or a backend's name."""

    name: str
    """Noun phrase; fits behind "asks for"."""
    instead: str
    """The way out: whole sentences."""
    keys: tuple[str, ...] = ()
    """Dotted keys; one of a section stands for all below it."""
    switches: tuple[str, ...] = ()
    """Keys of which one must be on for the others to ask for anything; ``.name`` is one of the same section."""
    takes: tuple[Any, ...] = ()
    """Values other than the releases' defaults that ask for what is done anyway."""
    asks: tuple[Any, ...] = ()
    """Of null, false and the like: those that do ask for the feature."""
    is_free: bool = False
    """No value of its keys changes a number, so that any is accepted and said to have no effect."""
    modules: tuple[str, ...] = ()
    """Modules and packages, with all below them."""
    configs: tuple[str, ...] = ()
    """Names of YAML files of verl's, without suffix, or words between underscores of such."""
    backends: tuple[str, ...] = ()
    """Values of ``strategy`` and ``model_engine``, and the beginnings of YAML files of a group."""


class FeatureKey(NamedTuple):
    """The feature that a key belongs to."""

    feature: Feature
    section: str
    """The part of the key that the table names."""


def expand(pattern: str) -> list[str]:
    """Keys of a pattern with choices in braces: ``{actor,critic}.optim.{lr,eps}`` names four, actor's first."""
    choices = re.search(r"\{([^{}]*)\}", pattern)
    if choices is None:
        return [pattern]
    before, after = pattern[: choices.start()], pattern[choices.end() :]
    return [key for choice in choices[1].split(",") for key in expand(f"{before}{choice.strip()}{after}")]


@lru_cache(maxsize=1)
def features() -> tuple[Feature, ...]:
    """All rows of ``features.yaml``."""
    import yaml  # not at the top: it costs a tenth of what a misspelt key may

    # The C loader takes 3 ms, the one in Python 60 ms.
    rows = yaml.load(TABLE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    found = []
    for row in rows:
        lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
        keys = tuple(key for pattern in row.get("keys", ()) for key in expand(pattern))
        found.append(Feature(**{**row, **lists, "keys": keys}))
    return tuple(found)


@lru_cache(maxsize=1)
def _by_key() -> dict[str, Feature]:
    return {key: feature for feature in features() for key in feature.keys}


@lru_cache(maxsize=1)
def _by_module() -> dict[str, Feature]:
    return {module: feature for feature in features() for module in feature.modules}


def feature_of_key(key: str) -> FeatureKey | None:
    """The feature that a dotted key, or a section it stands in, asks for."""
    named = next((name for name in prefixes(key) if name in _by_key()), None)
    return FeatureKey(_by_key()[named], named) if named else None


def feature_of_module(name: str) -> Feature | None:
    """The feature of a module of verl's, ``verl.tools.base_tool`` for example, that does not exist here."""
    return next((_by_module()[prefix] for prefix in prefixes(name) if prefix in _by_module()), None)


def prefixes(name: str) -> list[str]:
    """A dotted name and the sections it stands in, the longest first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def feature_of_config(name: str) -> Feature | None:
    """The feature of a configuration file of verl's, named as behind ``--config-name``."""
    name = name.removesuffix(".yaml").rpartition("/")[2]
    backend = feature_of_backend(name, within=True)
    return backend or next((item for item in features() if {name, *name.split("_")} & set(item.configs)), None)


def feature_of_backend(name: str, within: bool = False) -> Feature | None:
    """The feature of a training backend, or of a YAML file named after one (``megatron_actor``).

    Args:
        name: as behind ``strategy=``, ``model_engine=`` or ``actor@actor_rollout_ref.actor=``.
        within: whether the backend may stand anywhere between underscores of ``name``.
    """
    words = name.split("_") if within else [name]
    return next((item for item in features() for backend in item.backends if backend in words), None)


def not_built(what: str, feature: Feature) -> str:
    """The sentence to somebody whose ``what`` (``key=value``, a module) asks for a feature."""
    return f"{what} asks for {feature.name}: that is not built. {feature.instead}"
