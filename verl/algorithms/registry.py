"""Registry: the name a user writes in the config -> the thing that does it.

One small class serves advantages, policy losses, KL estimators, aggregation modes, and whatever else is chosen by
name. Beside each built-in thing stands what a reader wants to know of it, ``About``: docs/algorithms.md is made from
that. Knows nothing of what it holds.
"""

import difflib
import importlib
import logging
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class About:
    """One row of a table of docs/algorithms.md, about a name."""

    equation: str
    """As one reads it aloud, in the letters of that page."""
    use: str
    """When to choose it."""
    source: str
    """``arXiv:2402.03300``, or a markdown link to where it was published."""
    test: str
    """The test of the equation, ``module.py::test_name`` below ``tests/algorithms``, or a path below ``tests``."""
    options: str = ""
    """Keys of the config that it reads, spaces between them, ``section.{a,b}`` for two of one section. ``actor.`` is
    short for ``actor_rollout_ref.actor.``"""
    setting: str = ""
    """Of a further row: the options that make the same name something else."""


def import_modules(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, so that each registers its methods: a new method is a new file."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


class UnknownName(ValueError, KeyError):
    """The requested name is not registered."""

    __str__ = Exception.__str__  # KeyError would show the repr of the sentence


class Registry(MutableMapping[str, T]):
    """Names and what they stand for: a dict, in which an item may also be replaced.

    Args:
        key: the option a user sets to choose among these, as it appears in errors ("algorithm.adv_estimator").
        way_out: how to add one, as it appears in errors ("@register_adv_est(name)").
        check: for registries of functions that may also be named as FILE.py:NAME: what is wrong with the parameters of
            such a function, or None. Without it there are names only.
    """

    def __init__(self, key: str, way_out: str, check: Callable[[Callable], str | None] | None = None):
        self.key = key
        self.way_out = way_out
        self.check = check
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
        rows = (about,) if isinstance(about, About) else tuple(about)

        def file(entry: T) -> T:
            for name in map(_plain, names):
                known = self._entries.get(name, entry)
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
        """What ``name`` stands for: what was registered, or the function of a file.

        Raises:
            UnknownName: nobody registered it; the message lists the known names and the nearest one.
            ValueError: there is no such function in the file.
        """
        name = _plain(name)
        if self.check is not None and name not in self._entries and _FILE.search(str(name)):
            from verl.algorithms.user_file import load_user_function  # files concern those who name one only

            return load_user_function(self.key, name, self.check)
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
        self._about.pop(_plain(name), None)

    def __delitem__(self, name: str | Enum) -> None:
        if _plain(name) not in self._entries:
            raise UnknownName(f"{self.key}={_plain(name)} is not known, and cannot be taken out.")
        del self._entries[_plain(name)]
        self._about.pop(_plain(name), None)

    def __contains__(self, name: object) -> bool:
        return _plain(name) in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def about(self, name: str | Enum) -> tuple[About, ...]:
        """What the documentation says of ``name``; empty for what users registered."""
        return self._about.get(_plain(name), ()) if name in self else ()

    def documented(self) -> dict[tuple[str, ...], tuple[About, ...]]:
        """Names of the same thing together -> their rows, in the order of registration."""
        together: dict[int, tuple[list[str], tuple[About, ...]]] = {}
        for name in self._entries:
            if rows := self._about.get(name):
                together.setdefault(id(rows), ([], rows))[0].append(name)
        return {tuple(names): rows for names, rows in together.values()}


_FILE = re.compile(r"(\.py|^pkg://.+):[^\W\d]\w*$")


def _place(entry: object) -> str:
    return f"{getattr(entry, '__module__', '')}.{getattr(entry, '__qualname__', entry)}"


def _is_verls(entry: object) -> bool:
    return getattr(entry, "__module__", "").startswith("verl.")


def _plain(name: str | Enum) -> str:
    return name.value if isinstance(name, Enum) else name
