"""Who reads an option: recorded once, at its first reading, in whatever process that happens.

A watched section keeps its values aside until they are asked for. The first reading of each goes through a descriptor,
which notes the reader and puts the value where ordinary attributes are: from then on a reading costs what it always
did. What only copies, prints or checks an option does not count as a reader. Knows no hydra and no trainer.
"""

import dataclasses
import sys
from types import FrameType
from typing import Any

READ: dict[str, str] = {}
"""Options read in this process: key -> ``module:line`` of the first reader. Workers report theirs to the driver."""

_WAITING, _PATH = "_waiting", "_path"
_TRANSPARENT = {"_collections_abc", "collections.abc", "functools", "verl.config.base", "verl.config.watch"}
"""Modules that read on behalf of whoever called them."""
_COPIERS = ("dataclasses", "copy", "copyreg", "pickle", "pprint", "reprlib", "json", "yaml", "omegaconf", "ray",
            "verl.config", "verl.utils.config", "verl.preflight", "verl.trainer.ppo.job")  # fmt: skip
"""Modules, and those below them, that copy, print or check options without acting on them."""
_SECTIONS: set[str] = set()
"""Modules that declare watched sections: a property there reads on behalf of whoever asked for it."""


def watch(config: Any, path: str = "") -> Any:
    """Record who reads what below ``config``, a section at the dotted key ``path``; returns it."""
    for name in config:
        value = peek(config, name)
        if hasattr(value, "__dataclass_fields__"):
            watch(value, f"{path}.{name}".lstrip("."))
    _watch_one(config, path)
    return config


def is_watched(config: Any) -> bool:
    return _PATH in vars(config)


def peek(config: Any, name: str) -> Any:
    """Value of an option, without counting as its reader."""
    values = vars(config)
    return values[name] if name in values else values[_WAITING][name]


def is_set(config: Any, name: str) -> bool:
    """Whether ``__init__`` has given the option its value."""
    return name in vars(config) or name in vars(config).get(_WAITING, ())


def state_of(config: Any) -> dict[str, Any]:
    """What a copy of a section in this or another process is made of."""
    state = dict(vars(config))
    return state.pop(_WAITING, {}) | state


def restore(config: Any, state: dict[str, Any]) -> None:
    """Make ``config``, an empty instance, the copy; a copy of a watched section is watched too."""
    vars(config).update(state)
    if _PATH in state:
        _watch_one(config, state[_PATH])


def rewatched(config: Any, original: Any) -> Any:
    """``config``, a changed copy of ``original``, watched if that is."""
    return watch(config, vars(original)[_PATH]) if is_watched(original) else config


def _watch_one(config: Any, path: str) -> None:
    cls, values = type(config), vars(config)
    names = [item.name for item in dataclasses.fields(config)]
    for name in names:
        if not isinstance(cls.__dict__.get(name), _FirstReading):
            setattr(cls, name, _FirstReading(name, getattr(cls, name, dataclasses.MISSING)))
    _SECTIONS.update(base.__module__ for base in cls.__mro__ if hasattr(base, "__dataclass_fields__"))
    waiting = values.get(_WAITING, {})
    waiting.update({name: values.pop(name) for name in names if name in values})
    values[_PATH], values[_WAITING] = path, waiting


class _FirstReading:
    """In the place of a field's default on the class. Python looks here only if the instance has no value yet."""

    def __init__(self, name: str, default: Any) -> None:
        self.name, self.default = name, default

    def __get__(self, section: Any, owner: type) -> Any:
        if section is None:
            if self.default is dataclasses.MISSING:
                raise AttributeError(self.name)
            return self.default
        values, name = vars(section), self.name
        waiting = values.get(_WAITING, {})
        if name not in waiting:  # another thread was faster, or __init__ is under way
            return values[name] if name in values else self.__get__(None, owner)
        value = waiting[name] if name in waiting else values[name]
        reader = _reader(sys._getframe(1))
        if reader is not None:
            READ.setdefault(f"{values[_PATH]}.{name}".lstrip("."), reader)
            values[name] = value
            waiting.pop(name, None)
        return value


def _reader(frame: FrameType | None) -> str | None:
    """``module:line`` of who reads; None for one who only copies, prints or checks."""
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module in _SECTIONS and function in ("__repr__", "__eq__", "__hash__"):
            return None
        if module not in _TRANSPARENT and module not in _SECTIONS:
            copies = any(module == name or module.startswith(f"{name}.") for name in _COPIERS)
            return None if copies else f"{module}:{frame.f_lineno}"
        if module == "verl.config.base" and function in ("to_dict", "leaves", "schema_tree", "with_values"):
            return None
        frame = frame.f_back
    return None
