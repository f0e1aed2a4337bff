"""Command-line overrides checked against the tree of dataclasses, before hydra is imported.

Only the key is looked at here; values, with hydra's whole grammar, are hydra's. Group choices (``actor@...=x``) and
hydra's own keys pass through untouched.
"""

import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from verl.config.base import Config, Problem
from verl.config.build import types_of
from verl.config.features import feature_of_backend, not_built
from verl.config.legacy import ALIASES, is_legacy, strip_prefix, today

_OVERRIDE = re.compile(r"(?P<mark>\+\+|\+|~)?(?P<key>[^=@\s]+)(?P<package>@[^=\s]*)?(?P<assign>=.*)?", re.DOTALL)

_HOME_PATH = re.compile(r"(?<=[=\[,\s])~/[^\s,\[\]'\"]*(?=\s*(?:[,\]]|$))")
"""A path that begins with ``~``, alone or in a list: hydra's grammar wants it in quotes."""


class Place(NamedTuple):
    """Where a dotted key leads in the tree."""

    kind: Literal["option", "section", "free", "unknown"]
    reached: str
    """The part of the key that exists."""
    siblings: tuple[str, ...] = ()
    """For an unknown key: the names that stand where it went astray."""


class CheckedOverrides(NamedTuple):
    """Overrides as hydra is to get them, the keys they set, and what is wrong with them."""

    overrides: list[str]
    given: set[str]
    problems: list[Problem]
    stripped_prefix: bool


def check_overrides(arguments: Iterable[str], root: type[Config], is_group: Callable[[str], bool]) -> CheckedOverrides:
    """Refuse unknown keys; turn ``key=``, ``+key=`` and ``++key=`` on known and free-form keys into one form.

    Args:
        arguments: ``key=value`` words of the command line.
        root: class of the whole tree.
        is_group: is this name a folder of YAML files on the search path?
    """
    overrides, given, problems, stripped = [], set(), [], False
    for text in arguments:
        match = _OVERRIDE.fullmatch(text)
        if match is None or (match["assign"] is None and match["mark"] != "~"):
            problems.append(
                Problem(
                    text,
                    f"{text!r} is no override: write key=value, with quotes around "
                    f"values that hold spaces or commas. All options: --help.",
                )
            )
            continue
        key, mark = match["key"], match["mark"] or ""
        if re.split(r"[./]", key)[0] == "hydra":
            overrides.append(text)
            continue
        if match["package"] or "/" in key or is_group(key) or key == "model_engine":
            kept, wrong = _judge_group(text, key, (match["assign"] or "")[1:].strip("'\""), is_group)
            overrides += kept
            problems += wrong
            continue
        bare = strip_prefix(key)
        stripped |= bare != key
        place = locate(root, today(bare))
        if place.kind == "unknown" and not is_legacy(bare):
            problems.append(Problem(key, unknown_key(root, bare, place)))
            continue
        if mark == "~" and place.kind == "unknown":
            continue  # nothing to delete
        if mark == "~" and place.kind != "free":
            problems.append(
                Problem(key, f"{text}: an option cannot be deleted. Leave it out for its default, or set it to null.")
            )
            continue
        given.add(bare)
        assign = _HOME_PATH.sub(r"'\g<0>'", match["assign"] or "")
        overrides.append(f"{mark if mark == '~' else '++'}{bare}{assign}")
    return CheckedOverrides(overrides, given, problems, stripped)


_ENGINES = ("dp", "fsdp", "fsdp2")
_GROUPS = {
    "model": "hf_model", "optim": "fsdp", "engine": "fsdp", "algorithm": "rollout_correction", "reward": "reward",
    "reward_manager": "reward_manager", "distillation": "distillation", "profiler": "profiler",
    "legacy_reward_impl": "", "reward_model": "dp_reward_loop",
}  # fmt: skip
"""Groups of verl's YAML that are not here, and what its releases choose of them."""


def _judge_group(
    text: str, group: str, choice: str, is_group: Callable[[str], bool]
) -> tuple[list[str], list[Problem]]:
    """The choice of a group of YAML files: as hydra is to get it, nothing for what verl chooses anyway; problems."""
    feature = feature_of_backend(choice, within=True)
    if feature:
        return [], [Problem(group, not_built(text, feature))]
    if group == "model_engine" and choice not in _ENGINES:
        return [], [
            Problem(
                group, f"{text} is not a known training backend; known are {', '.join(_ENGINES)}. Use model_engine=dp."
            )
        ]
    if group == "model_engine" or (group in _GROUPS and choice in ("", _GROUPS[group])):
        return [], []
    if not is_group(group):
        return [], [Problem(group, f"{text}: there is no folder {group} of YAML files. Set the options themselves.")]
    return [text], []


def unknown_key(root: type[Config], key: str, place: Place) -> str:
    """The sentence about a key that does not exist, with the nearest one that does."""
    near = nearest_key(root, key, place)
    there = ", ".join(place.siblings) or f"none below {place.reached}"
    hint = f"; did you mean {near!r}?" if near else f". Options there: {there}."
    return f"{key} is not an option{hint}"


@lru_cache
def locate(root: type[Config], key: str) -> Place:
    """Follow a dotted key through the classes of the tree."""
    kind: Any = root
    reached: list[str] = []
    for name in key.split("."):
        kind = _section_or_free(kind)
        if kind is dict:
            return Place("free", ".".join(reached))
        if kind is None:
            return Place("unknown", ".".join(reached))
        if name == "_target_":
            reached.append(name)
            kind = str
            continue
        known = types_of(kind)
        if name not in known:
            return Place("unknown", ".".join(reached), tuple(known))
        reached.append(name)
        kind = known[name]
    return Place({None: "option", dict: "free"}.get(_section_or_free(kind), "section"), key)


def _section_or_free(kind: Any) -> Any:
    """The section class, ``dict`` for free-form content, None for a plain value."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        inner = [_section_or_free(item) for item in typing.get_args(kind)]
        return next((item for item in inner if item is not None), None)
    if isinstance(kind, type) and issubclass(kind, Config):
        return kind
    return dict if kind is Any or kind is dict or typing.get_origin(kind) is dict else None


@lru_cache
def all_keys(root: type[Config]) -> tuple[str, ...]:
    """Every dotted key, sections included."""

    def walk(cls: type[Config], prefix: str) -> Iterator[str]:
        for name, kind in types_of(cls).items():
            yield f"{prefix}{name}"
            inner = _section_or_free(kind)
            if isinstance(inner, type) and issubclass(inner, Config):
                yield from walk(inner, f"{prefix}{name}.")

    return tuple(walk(root, ""))


def nearest_key(root: type[Config], key: str, place: Place) -> str | None:
    """The existing key most like ``key``: a sibling, the same name elsewhere, or a similar path."""
    from difflib import SequenceMatcher

    def alike(one: str, other: str) -> float:
        return SequenceMatcher(None, one, other).ratio()

    rest = key[len(place.reached) :].lstrip(".")
    wrong, _, below = rest.partition(".")
    scored: list[tuple[float, str]] = []
    for name in place.siblings:
        candidate = f"{place.reached}.{name}".lstrip(".")
        if below and locate(root, f"{candidate}.{below}").kind != "unknown":
            scored.append((alike(wrong, name) + 0.1, f"{candidate}.{below}"))
        scored.append((alike(wrong, name), candidate))
    last = key.rpartition(".")[2]
    is_common = sum(candidate.rpartition(".")[2] == last for candidate in all_keys(root)) > 2
    aliases = (alias for alias in ALIASES if locate(root, alias.rpartition(".")[0]).kind == "section")
    for candidate in (*all_keys(root), *aliases):
        if f".{candidate}".endswith(f".{key}"):
            scored.append((1.2, candidate))  # the section was left out
        elif candidate.rpartition(".")[2] == last and not is_common:  # ``name`` alone says nothing
            scored.append((0.8 + 0.2 * alike(key, candidate), candidate))
        elif alike(last, candidate.rpartition(".")[2]) >= 0.7:
            scored.append((alike(key, candidate) - 0.1, candidate))
    score, best = max(scored, key=lambda pair: pair[0], default=(0.0, None))
    return best if score >= 0.6 else None
