"""Fate of every key of verl's releases, and the list of docs/moving.md of what is not built.

python scripts/release_keys.py            write the list into docs/moving.md; print the counts of each release
python scripts/release_keys.py --check    write nothing, fail if the page says something else
python scripts/release_keys.py --keys     print what becomes of each key, with its default and with another value
"""

from __future__ import annotations

import sys
import typing
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # works from a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).parents[1]))

from verl.config.async_names import translate_async
from verl.config.base import Problem
from verl.config.checks.support import NAMES, unknown_names, unsupported_values
from verl.config.command_line import locate
from verl.config.compose import CONFIG_DIR, compose
from verl.config.features import Feature, features
from verl.config.legacy import (
    RELEASES,
    Moved,
    entry_of,
    is_legacy,
    release_keys,
    same,
    set_features_aside,
    today,
    translate,
    translate_correction,
    translate_values,
)
from verl.config.load import drop_empty_requests
from verl.config.ppo import PPOConfig
from verl.config.tree import fits, flatten, is_interpolation, put_key, section_class, section_of, types_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "moving.md"
BEGIN, END = "<!-- table: not built -->", "<!-- end of table: not built -->"
KINDS = ("accepted", "named feature", "other")


class Verdict(NamedTuple):
    """Outcome of one key with one value."""

    kind: str
    """One of ``KINDS``."""
    text: str
    """The sentence about it; empty if there is none."""


def verdict(key: str, value: Any) -> Verdict:
    """Return the message of loading ``key=value``, were it the only word."""
    if locate(PPOConfig, today(key)).kind == "unknown" and not is_legacy(key):
        return Verdict("other", f"{key} is not an option")
    tree: dict = {}
    put_key(tree, key, value)
    given, problems = {key}, []
    notices = drop_empty_requests(tree, given, PPOConfig, defaults)
    notices += translate_async(tree, given, problems)
    notices += translate(tree, given, problems) + translate_values(tree)
    notices += translate_correction(tree, given, problems) + drop_empty_requests(tree, given, PPOConfig, defaults)
    features = set_features_aside(tree, given, problems, lambda name: locate(PPOConfig, name).kind != "unknown")
    for name, item in flatten(tree):
        if is_interpolation(item):
            continue
        if locate(PPOConfig, name).kind == "unknown" or fits(PPOConfig, name, item) is False:
            problems.append(Problem(name, f"{name}={item} does not fit"))
        elif locate(PPOConfig, name).kind == "option" and not same(item, "???"):
            config = PPOConfig().with_values({name: item})
            problems += [*unsupported_values(config), *unknown_names(config)]
    for problem in problems:
        named = "not built" in problem.text or "not supported yet" in problem.text
        return Verdict("named feature" if named else "other", problem.text)
    said = next((notice for notice in features if "has no effect: it is for" in notice), "")
    return Verdict("named feature" if said else "accepted", said or "; ".join(notices + features))


@lru_cache(maxsize=1)
def defaults() -> dict:
    """The composed tree without anything of a user's."""
    return compose([], [CONFIG_DIR], "ppo_trainer", PPOConfig)[1]


def another_value(key: str, default: Any) -> Any:
    """A value of ``key`` that is not ``default`` and that its option, if it is one, can hold; None if there is none."""
    if isinstance(default, bool):
        return not default
    entry = entry_of(key)
    target = entry.new[0] if isinstance(entry, Moved) else today(key)
    convert = entry.convert if isinstance(entry, Moved) else lambda value: value
    for value in (*_choices(target), 3, 1, 0.3, "x", ["model"], [0.5, 0.5], [3], ["x"], {"x": 1}, True):
        if not same(value, default) and fits(PPOConfig, target, convert(value)) is not False:
            if fits(PPOConfig, target, value) or type(value) is type(default) or default in (None, "???"):
                return value
    return None


def _choices(key: str) -> Iterator[Any]:
    yield from next((names.built for names in NAMES if names.key == key), ())
    cls, _, name = section_of(PPOConfig, key)
    kind = types_of(cls)[name] if cls else None
    if section_class(kind) is not None:
        yield {option: "x" for option in types_of(section_class(kind)) if option == "path"}
    for part in (kind, *typing.get_args(kind)):
        if typing.get_origin(part) is typing.Literal:
            yield from typing.get_args(part)


def counts() -> dict[str, tuple[Counter, Counter]]:
    """Release -> how many of its keys come to which kind, with their default and with another value."""
    table = {}
    for column, release in enumerate(RELEASES):
        rows = {key: row[column] for key, row in release_keys().items() if row[column] is not None}
        plain = Counter(verdict(key, row.value).kind for key, row in rows.items())
        changed = {key: another_value(key, row.value) for key, row in rows.items()}
        table[release] = (plain, Counter(verdict(key, value).kind for key, value in changed.items()))
    return table


def features_table() -> str:
    """One row a feature that is not built."""
    lines = ["| not built | what to do instead | asked for by |", "|---|---|---|"]
    for feature in features():
        cells = (feature.name, feature.instead, _asked_by(feature))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _asked_by(feature: Feature) -> str:
    known = {today(key) for key in release_keys()}
    keys = [key for key in feature.keys if any(f"{name}.".startswith(f"{key}.") for name in known)] or feature.keys
    grouped = _grouped(keys)
    words = [f"`{word}`" for word in grouped[:5]] + [f"{len(grouped) - 5} more keys beside them"] * (len(grouped) > 5)
    words += [f"`model_engine={backend}`" for backend in feature.backends[:1]]
    words += [f"`--config-name={name}`" for name in feature.configs[:2]]
    words += [f"`{name}`" for name in feature.modules[:4]]
    return ", ".join(words)


def _grouped(keys: typing.Iterable[str]) -> list[str]:
    """Keys with the roles that share them in braces: ``{actor,critic}.optim.min_lr``."""
    roles = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout", "actor_rollout_ref.model")
    places: dict[str, list[str]] = {}
    for key in keys:
        role = next((role for role in (*roles, "critic.model", "critic", "reward_model") if f"{role}." in key), "")
        rest = key[len(role) :].lstrip(".") if role and key.startswith(f"{role}.") else key
        places.setdefault(rest, []).append(role.removeprefix("actor_rollout_ref.") if rest != key else "")
    return [
        rest
        if names == [""]
        else f"{names[0]}.{rest}"
        if len(names) == 1
        else f"{{{','.join(dict.fromkeys(names))}}}.{rest}"
        for rest, names in places.items()
    ]


def filled(text: str) -> str:
    """The page with the list of today."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{features_table()}\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str]) -> int:
    """See the module's docstring; returns the exit code."""
    if "--keys" in arguments:
        for key, row in release_keys().items():
            default = next(item for item in row if item is not None).value
            for value in (default, another_value(key, default)):
                found = verdict(key, value)
                print(f"{found.kind:<14} {key}={value}  {found.text[:160]}")
        return 0
    text = PAGE.read_text(encoding="utf-8")
    if filled(text) != text:
        if "--check" in arguments:
            print(f"{PAGE.relative_to(ROOT)} is not what the table says: python scripts/release_keys.py")
            return 1
        PAGE.write_text(filled(text), encoding="utf-8")
    if "--check" not in arguments:
        print(f"{'':<10}{'default: ' + ' / '.join(KINDS):<42}another value: {' / '.join(KINDS)}")
        for release, (plain, changed) in counts().items():
            shown = [" / ".join(f"{found[kind]:>4}" for kind in KINDS) for found in (plain, changed)]
            print(f"{release:<10}{shown[0]:<42}{shown[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
