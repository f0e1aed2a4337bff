"""Configurations composed once and changed many times: hydra takes a quarter of a second, mostly for the same YAML."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl.config.command_line import CheckedOverrides, check_overrides
from verl.config.compose import compose, search_folders
from verl.config.load import LoadedConfig, interpret, load
from verl.config.ppo import PPOConfig


def load_over(base: Sequence[str], words: Sequence[str]) -> LoadedConfig:
    """As ``load([*base, *words])``; hydra composes the former once, and reads the latter only.

    ``tests/config/test_values.py`` and ``tests/preflight/test_corpus.py`` hold it against the whole way.
    """
    later = _checked(words)
    try:
        parsed = OverridesParser.create().parse_overrides(later.overrides)
    except OverrideParseException:
        return load([*base, *words])
    if later.problems or any(word.is_delete() or word.is_sweep_override() or word.package for word in parsed):
        return load([*base, *words])
    composed, given = copy.deepcopy(_composed(tuple(base))), _checked(base).given | later.given
    for word in parsed:
        try:
            with open_dict(composed):
                OmegaConf.update(composed, word.key_or_group, word.value(), force_add=True)
        except OmegaConfBaseException:  # a value that does not fit: hydra says so in its own words
            return load([*base, *words])
    tree = OmegaConf.to_container(composed, resolve=False)
    return interpret(tree, given, composed=composed, stripped_prefix=later.stripped_prefix)


def _checked(words: Sequence[str]) -> CheckedOverrides:
    return check_overrides(words, PPOConfig, lambda name: any((folder / name).is_dir() for folder in _folders()))


def _folders() -> list:
    return search_folders(None, None)


@lru_cache
def _composed(base: tuple[str, ...]) -> Any:
    return compose(_checked(base).overrides, _folders(), "ppo_trainer", PPOConfig)[0]
