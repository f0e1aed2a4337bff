"""Registry: the name a user writes in the config -> the thing that does it.

One small class serves advantages, policy losses, KL estimators, aggregation modes, and whatever else is chosen by
name. Knows nothing of what it holds.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Names and what they stand for.

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

    def register(self, *names: str | Enum) -> Callable[[T], T]:
        """Decorator: file the decorated thing under each of ``names``.

        Raises:
            ValueError: a name is taken by something else.
        """

        def file(entry: T) -> T:
            for name in map(_plain, names):
                if name in self._entries and self._entries[name] is not entry:
                    raise ValueError(
                        f"{self.key}: the name {name!r} is already taken by {self._entries[name]!r}. "
                        f"Names are unique; choose another for {entry!r}."
                    )
                self._entries[name] = entry
            return entry

        return file

    def get(self, name: str | Enum) -> T:
        """What ``name`` stands for: what was registered, or the function of a file.

        Raises:
            ValueError: nobody registered it; the message lists the known names and the nearest one. Or there is no such
                function in the file.
        """
        name = _plain(name)
        if self.check is not None and name not in self._entries and _FILE.search(str(name)):
            from verl.algorithms.user_file import load_user_function  # files concern those who name one only

            return load_user_function(self.key, name, self.check)
        if name not in self._entries:
            near = difflib.get_close_matches(str(name), self._entries, n=1)
            raise ValueError(
                f"{self.key}={name} is not known"
                + (f"; did you mean {near[0]!r}?" if near else ".")
                + f" Known: {', '.join(self._entries)}. Add your own with {self.way_out}."
            )
        return self._entries[name]

    __getitem__ = get

    def __contains__(self, name: object) -> bool:
        return _plain(name) in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self) -> list[str]:
        """The known names, in the order of registration."""
        return list(self._entries)


_FILE = re.compile(r"(\.py|^pkg://.+):[^\W\d]\w*$")


def _plain(name: str | Enum) -> str:
    return name.value if isinstance(name, Enum) else name
