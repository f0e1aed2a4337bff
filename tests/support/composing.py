"""Configurations composed once and changed many times: hydra takes a quarter of a second, mostly for the same YAML."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl.config.command_line import CheckedOverrides, check_overrides
from verl.config.compose import compose, search_folders
from verl.config.load import OWN_NAMES, LoadedConfig, interpret, load
from verl.config.ppo import PPOConfig
from verl.config.tree import differing


class Start(NamedTuple):
    """A configuration to start from."""

    config_path: str | None = None
    config_name: str = "ppo_trainer"
    root: type[PPOConfig] = PPOConfig

    def checked(self, words: Sequence[str]) -> CheckedOverrides:
        return check_overrides(words, self.root, lambda name: any((path / name).is_dir() for path in self.folders()))

    def folders(self) -> list:
        return search_folders(self.config_path, None)


def load_over(base: Sequence[str], words: Sequence[str], start: Start = Start()) -> LoadedConfig:  # noqa: B008
    """As ``load([*base, *words], *start)``; hydra composes the former once, and reads the latter only.

    ``tests/config/test_values.py`` and ``tests/preflight/test_corpus.py`` hold it against the whole way.
    """
    later, whole = start.checked(words), [*base, *words]
    try:
        parsed = OverridesParser.create().parse_overrides(later.overrides)
    except OverrideParseException:
        return load(whole, start.config_path, start.config_name, root=start.root)
    if later.problems or any(word.is_delete() or word.is_sweep_override() or word.package for word in parsed):
        return load(whole, start.config_path, start.config_name, root=start.root)
    composed, given = pickle.loads(_composed(tuple(base), start)), start.checked(base).given | later.given
    for word in parsed:
        try:
            with open_dict(composed):
                OmegaConf.update(composed, word.key_or_group, word.value(), force_add=True)
        except OmegaConfBaseException:  # a value that does not fit: hydra says so in its own words
            return load(whole, start.config_path, start.config_name, root=start.root)
    tree = OmegaConf.to_container(composed, resolve=False)
    if start.config_name not in ("ppo_trainer", *OWN_NAMES):
        plain = OmegaConf.to_container(pickle.loads(_composed((), Start(root=start.root))), resolve=False)
        by_file = differing(tree, plain)
        given |= {key for key in by_file if not any(own.startswith(f"{key}.") for own in later.given)}
    return interpret(tree, given, start.root, composed=composed, stripped_prefix=later.stripped_prefix)


@lru_cache
def _composed(base: tuple[str, ...], start: Start) -> bytes:
    """The composed tree, pickled: a third of the time of ``deepcopy``."""
    return pickle.dumps(compose(start.checked(base).overrides, start.folders(), start.config_name, start.root)[0])
