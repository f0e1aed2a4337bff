"""Registry: the name a user writes in the config -> the thing that does it.

One small class serves advantages, policy losses, KL estimators, aggregation modes, and whatever else is chosen by
name. Each built-in thing comes with its documentation, ``About``, from which docs/algorithms.md is made. It is
independent of what it holds.
"""

import difflib
import importlib
import logging
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from verl.utils.exit_codes import ExitCode

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TAKES_RAGGED: set[Callable] = set()


def takes_ragged(function: Callable) -> Callable:
    """Decorator: this estimator or loss takes response columns without padding too. Others get padded tensors."""
    _TAKES_RAGGED.add(function)
    return function


def does_take_ragged(function: Callable) -> bool:
    return function in _TAKES_RAGGED


@dataclass(frozen=True)
class About:
    """One row of a table of docs/algorithms.md, about a name."""

    equation: str
    """As one reads it aloud, in the letters of that page."""
    use: str
    """When to choose it."""
    source: str
    """``arXiv:2402.03300``, or a markdown link to where it was published."""
    test: str = ""
    """The test of the equation, ``module.py::test_name`` below ``tests/algorithms``, or a path below ``tests``; empty:
    the one that all entries of the registry share."""
    options: str = ""
    """Keys of the config that it reads, spaces between them, ``section.{a,b}`` for two of one section. ``actor.`` is
    short for ``actor_rollout_ref.actor.``"""
    setting: str = ""
    """Options that make the same name something else, of its further rows."""


def import_modules(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, so that each registers its methods: a new method is a new file."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


class UnknownName(ValueError, KeyError):
    """The requested name is not registered."""

    exit_class = ExitCode.CONFIGURATION

    __str__ = Exception.__str__  # KeyError would show the repr of the sentence


class Registry(MutableMapping[str, T]):
    """Names and what they stand for: a dict, in which an item may also be replaced.

    Args:
        key: the option a user sets to choose among these, as it appears in errors ("algorithm.adv_estimator").
        way_out: how to add one, as it appears in errors ("@register_adv_est(name)").
        check: for registries of functions that may also be named as FILE.py:NAME: what is wrong with the parameters of
            such a function, or None. Without it there are names only.
        test: of entries whose ``About`` names none.
    """

    def __init__(self, key: str, way_out: str, check: Callable[[Callable], str | None] | None = None, test: str = ""):
        self.key, self.way_out, self.check, self.test = key, way_out, check, test
        self._entries: dict[str, T] = {}
        self._about: dict[str, tuple[About, ...]] = {}

    def register(self, *names: str | Enum, about: About | Sequence[About] = ()) -> Callable[[T], T]:
        """Decorator: file the decorated thing under each of ``names``.

        Args:
            about: what the documentation says of it; several where options make it several things. Yours needs none.

        A name of verl's own is taken over, with a warning: files written before it had that name go on working.

        Raises:
            ValueError: a name is taken by something else of the user's.
        """
        given = (about,) if isinstance(about, About) else tuple(about)
        rows = tuple(row if row.test else replace(row, test=self.test) for row in given)

        def file(entry: T) -> T:
            for name in map(_plain, names):
                known = self._entries.get(name, entry)  # of a name that is free: the entry itself
                if _is_verls(known) and not _is_verls(entry):
                    logger.warning("%s: %r is %s from now on, not verl's own.", self.key, name, _place(entry))
                    self._about.pop(name, None)
                elif known is not entry:
                    raise ValueError(
                        f"{self.key}: the name {name!r} is already taken by {self._entries[name]!r}. "
                        f"Names are unique; choose another for {entry!r}."
                    )
                self._entries[name] = entry
                if rows:
                    self._about[name] = rows
            return entry

        return file

    def __getitem__(self, name: str | Enum) -> T:
        """Return the thing registered as ``name``, or the function of a file.

        Raises:
            UnknownName: it is not registered; the message lists the known names and the nearest one.
            ValueError: there is no such function in the file.
        """
        name = _plain(name)
        if self.check is not None and name not in self._entries and _FILE.search(str(name)):
            return load_user_function(self.key, str(name), self.check)
        if name not in self._entries:
            near = difflib.get_close_matches(str(name), self._entries, n=1)
            raise UnknownName(
                f"{self.key}={name} is not known"
                + (f"; did you mean {near[0]!r}?" if near else ".")
                + f" Known: {', '.join(self._entries)}. Add your own with {self.way_out}."
            )
        return self._entries[name]

    def __setitem__(self, name: str | Enum, entry: T) -> None:
        self._entries[_plain(name)] = entry
        # the rows were about what stood there before
        self._about.pop(_plain(name), None)

    def __delitem__(self, name: str | Enum) -> None:
        if self._entries.pop(_plain(name), None) is None:
            raise UnknownName(f"{self.key}={_plain(name)} is not known, and cannot be taken out.")
        self._about.pop(_plain(name), None)

    def __contains__(self, name: object) -> bool:
        return _plain(name) in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def about(self, name: str | Enum) -> tuple[About, ...]:
        """Rows of the documentation on ``name``; none for what users registered."""
        return self._about.get(_plain(name), ()) if name in self else ()

    def documented(self) -> dict[tuple[str, ...], tuple[About, ...]]:
        """Names of the same thing together -> their rows, in the order of registration."""
        together: dict[int, tuple[list[str], tuple[About, ...]]] = {}
        for name in self._entries:
            if rows := self._about.get(name):
                # by identity: names of one call share their rows, equal rows of two entries stay apart
                together.setdefault(id(rows), ([], rows))[0].append(name)
        return {tuple(names): rows for names, rows in together.values()}


# `.py:` or `pkg://`, and an identifier at the end: any other name with a colon is only looked up
_FILE = re.compile(r"(\.py|^pkg://.+):[^\W\d]\w*$")


def _place(entry: object) -> str:
    return f"{getattr(entry, '__module__', '')}.{getattr(entry, '__qualname__', entry)}"


def _is_verls(entry: object) -> bool:
    return getattr(entry, "__module__", "").startswith("verl.")


def _plain(name: Any) -> Any:
    return name.value if isinstance(name, Enum) else name


def load_user_function(key: str, name: str, check: Callable[[Callable], str | None]) -> Any:
    """Read the function behind ``key=name`` from its file; a decorated one is the function it decorates.

    Only what the config names is run, as with ``custom_reward_function``.

    Args:
        name: ``path/to/file.py:function`` or ``pkg://package.module:function``.
        check: says what is wrong with the function's parameters and how they should be, or None.

    Raises:
        ValueError: no such file, no such name in it, or parameters by which it cannot be called.
        RuntimeError: the file fails while it runs; the cause is chained.
    """
    # files concern those who name one: the algorithms themselves import torch and numpy only
    from verl.utils.fs import copy_to_local
    from verl.utils.import_utils import load_extern_type, split_file_name

    path, function_name = split_file_name(name)
    try:
        function = load_extern_type(copy_to_local(path), function_name)
    except FileNotFoundError as error:
        raise ValueError(
            f"{key}={name}: there is no file {path} (looked in {Path.cwd()}). It must be there on every node; give "
            "its full path."
        ) from error
    except AttributeError as error:
        raise ValueError(f"{key}={name}: {error} The name after the colon must be one of them; correct it.") from error
    wrong = check(function) if callable(function) else f"is a {type(function).__name__}. Name a function"
    if wrong:
        raise ValueError(f"{key}={name}: {function_name} {wrong}.")
    return function


# -- Options around an estimator and a loss ---------------------------------------------------------------------------


CONTROLS: Registry[Callable] = Registry("a control", "@CONTROLS.register(option)")
"""Option of the config -> function, for the documentation: equation, source and test of each in one record. Nothing is
looked up here when a run starts, callers call their functions directly."""


def control(
    option: str, equation: str, use: str, source: str, test: str, options: str | None = None
) -> Callable[[Callable], Callable]:
    """Decorator: record the function that ``option`` switches on; the other arguments are those of `About`.

    Args:
        options: keys it reads; None: ``option`` alone.
    """
    return CONTROLS.register(option, about=About(equation, use, source, test, options or option))


# `Shaping` (verl/trainer/ppo/experience.py) applies them: who changes the order there changes it here
_SHAPING = "algorithm.reward_shaping."
STEPS = (
    *(f"{_SHAPING}{step}" for step in ("overlong_buffer", "norm", "scale", "shift", "clip_range", "clip")),
    "algorithm.use_kl_in_reward",
    f"{_SHAPING}whiten",
    *(f"algorithm.sample_mask.{mask}" for mask in ("drop_truncated", "error_max_len", "difficulty")),
    "algorithm.advantage.whiten",
    "algorithm.advantage.clip",
)
"""Steps between the scores of a batch and its update, in this order; the estimator comes before the last two."""
