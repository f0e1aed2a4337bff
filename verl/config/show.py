"""``verl config``: the options, what each is about, and how two configurations differ."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from verl.config.base import ConfigError
from verl.config.compose import CONFIG_DIR, compose
from verl.config.describe import describe, explain, keys_page
from verl.config.legacy import replacement
from verl.config.overrides import check_overrides, locate, unknown_key
from verl.config.ppo import PPOConfig
from verl.config.tree import flatten

_ABOUT = """\
Show options with their meaning, type, range and value.

  verl config                                      everything
  verl config actor_rollout_ref.rollout            a section or an option; also the beginning of a name
  verl config trainer trainer.seed=3               with other values; interpolations stay unresolved
  verl config --explain algorithm.lam              all that is known about one option, and who reads it
  verl config --diff a.yaml run.sh                 what differs once composed: YAML, shell scripts, checkpoints
"""


def main(arguments: Sequence[str]) -> int:
    """Print what ``arguments`` ask for; returns the exit code, 1 if ``--diff`` found differences."""
    parser = argparse.ArgumentParser(
        prog="verl config", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="KEY | key=value", help="what to print; what to change")
    parser.add_argument("--explain", metavar="KEY", help="one option in full")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="two files or folders")
    parser.add_argument("--key-value", action="store_true", help="one `key: value` line per option")
    parser.add_argument("--markdown", action="store_true", help="the page docs/keys.md")
    options = parser.parse_args(arguments)
    try:
        if options.diff:
            return _diff(*options.diff)
        if options.markdown:
            print(keys_page(PPOConfig), end="")
            return 0
        changes = [word for word in options.words if "=" in word]
        tree = _tree(changes)
        if options.explain:
            print("\n".join(explain(PPOConfig, _place(options.explain), tree)))
            return 0
        keys = [key for word in options.words if "=" not in word for key in _matching(word)]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.key_value:
        for key, value in flatten(tree):
            if not keys or any(key == wanted or key.startswith(f"{wanted}.") for wanted in keys):
                print(f"{key}: {value}")
        return 0
    for place in keys or [""]:
        print("\n".join(describe(PPOConfig, place, tree)))
    return 0


def _tree(changes: Sequence[str]) -> dict[str, Any]:
    checked = check_overrides(changes, PPOConfig, lambda name: (CONFIG_DIR / name).is_dir())
    if checked.problems:
        raise ConfigError([problem.text for problem in checked.problems])
    return compose(checked.overrides, [CONFIG_DIR], "ppo_trainer", PPOConfig)[1]


def _place(key: str) -> str:
    """The option or section a name means. Raises ConfigError, with the nearest name or the new one."""
    place = locate(PPOConfig, key)
    if place.kind != "unknown":
        return place.reached
    old = replacement(key)
    raise ConfigError([old or unknown_key(PPOConfig, key, place)])


def _matching(word: str) -> list[str]:
    """The option or section of that name; else all options beside which the word is the beginning of a name."""
    place = locate(PPOConfig, word)
    if place.kind == "unknown" and not replacement(word):
        last = word.rpartition(".")[2]
        begun = [name for name in place.siblings if name.startswith(last)]
        if begun and word == f"{place.reached}.{last}".lstrip("."):
            return [f"{place.reached}.{name}".lstrip(".") for name in begun]
    return [_place(word)]


def _diff(one: str, other: str) -> int:
    from verl.config.build import show
    from verl.config.sources import read_source

    first, second = read_source(one), read_source(other)
    for path, source in ((one, first), (other, second)):
        for note in source.notes:
            print(f"note: {path}: {note}", file=sys.stderr)
    keys = [key for key in dict.fromkeys([*first.values, *second.values])]
    differing = [key for key in keys if first.values.get(key) != second.values.get(key)]
    for key in differing:
        print(f"{key}: {show(first.values.get(key))} -> {show(second.values.get(key))}")
    if not differing:
        print("no option differs")
    return 1 if differing else 0
