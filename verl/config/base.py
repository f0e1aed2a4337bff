"""Base of every section of the configuration: a read-only dataclass that is also a mapping, and who reads its options.

No YAML, no hydra, no torch here: a misspelt key must be refusable before anything heavy is imported.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from functools import partial
from types import FrameType
from typing import Any, ClassVar, NamedTuple, TypeVar

from verl.utils.exit_codes import ExitCode

MISSING = "???"
"""Default of an option the user must give; hydra's and OmegaConf's spelling of it."""


class Problem(NamedTuple):
    """One thing wrong with a configuration: the key to blame, the sentence for the user, other keys it speaks of."""

    key: str
    text: str
    also: tuple[str, ...] = ()

    @property
    def keys(self) -> set[str]:
        return {self.key, *self.also}


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, found in one go. ``problems`` lists the sentences."""

    exit_class = ExitCode.CONFIGURATION

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        if len(self.problems) == 1:
            message = self.problems[0]
        else:
            message = f"{len(self.problems)} problems in the configuration:\n" + "\n".join(
                f"  {number}. {text}" for number, text in enumerate(self.problems, 1)
            )
        super().__init__(message)

    def __reduce__(self):
        return type(self), (self.problems,)


class ConfigWarning(UserWarning):
    """A setting that has no effect, or an old name that was understood."""


class Bounds(NamedTuple):
    """Range of a number, checked when the tree is built. ``None`` leaves that side open."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def broken_by(self, value: float) -> str | None:
        """The rule ``value`` breaks, in words; None if it breaks none (NaN breaks every bound)."""
        for limit, holds, words in (
            (self.above, lambda limit: value > limit, "greater than"),
            (self.at_least, lambda limit: value >= limit, "at least"),
            (self.below, lambda limit: value < limit, "less than"),
            (self.at_most, lambda limit: value <= limit, "at most"),
        ):
            if limit is not None and not holds(limit):
                return f"must be {words} {limit:g}"
        return None


class ReadIf(NamedTuple):
    """Value that another option must have for an option to be read; without it, setting the latter has no effect."""

    key: str
    """The other option: a name in the same section, or a dotted key from the root."""
    values: tuple[str, ...]
    """Values that will do, as a user writes them. Empty: all but null, false, 0 and what holds nothing."""
    remark: str
    """End of the warning's sentence, after the other option and its value."""


def read_if(key: str, *values: str, remark: str = "") -> ReadIf:
    """The condition under which an option, or all options of a section (``_read_if``), are read."""
    return ReadIf(key, values, remark)


def option(default: Any, *conditions: ReadIf, never_read: str = "", **bounds: float) -> Any:
    """A field that says more of itself than its type.

    Args:
        default: may be a list or a dict.
        conditions: it is read only if all of them hold; ``checks.base`` warns of the first that does not.
        never_read: why no value changes anything.
        bounds: of ``Bounds``, within which its number must stay.
    """
    metadata = {"bounds": Bounds(**bounds) if bounds else None, "read_if": conditions, "never_read": never_read}
    # a default that could be changed in place would be shared by all sections
    if isinstance(default, list | dict):
        return field(default_factory=partial(read_only, default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, **defaults: Any) -> Any:
    """A field holding the section ``cls``, with defaults of its own where the place differs from the class."""
    return field(default_factory=partial(cls, **defaults))


def read_only(value: Any) -> Any:
    """A copy of a free-form value, its mappings as ``FreeDict``s."""
    if isinstance(value, Mapping):
        return FreeDict({key: read_only(item) for key, item in value.items()})
    return [read_only(item) for item in value] if isinstance(value, list | tuple) else value


class FreeDict(dict):
    """Content of a free-form option: a read-only dict whose keys can also be read as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no key {name!r}; there are {sorted(self)}") from None

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("configuration values are read-only: copy with dict(...) and change the copy")

    __setitem__ = __delitem__ = __setattr__ = __delattr__ = _refuse
    update = pop = popitem = clear = setdefault = __ior__ = _refuse

    def __reduce__(self):
        return FreeDict, (dict(self),)

    def __deepcopy__(self, memo: dict) -> "FreeDict":
        return read_only(self)


@dataclass
class Config(Mapping):
    """A section: read as ``config.name``, ``config["name"]`` or ``config.get("name")``; ``**config`` works too.

    A field can be set once, by ``__init__``; assigning again raises ``FrozenInstanceError``, as does a name that is
    no field. (Not ``frozen=True``: then no ordinary dataclass could inherit, and users' own sections do.)
    Names listed in ``_mutable_fields`` of a subclass stay assignable. A section class of a user's may also keep what
    it derives, in attributes that are no fields and are set once; these and its properties are read as options are.
    """

    _target_: ClassVar[str | None] = None
    """Class path that verl's own YAML names for this section. Written into the tree for tools that look for it,
    never followed: the section's class is decided by its place."""
    _schema: ClassVar[str | None] = None
    """Of a root other than main_ppo's: the name of its ``schema/*`` node."""
    _mutable_fields: ClassVar[frozenset[str] | set[str]] = frozenset()
    _read_if: ClassVar[ReadIf | None] = None
    """Condition under which all options of the section are read, but for the one that it names."""

    def __setattr__(self, name: str, value: Any) -> None:
        # users' own sections may keep what they derive; a name misspelt in verl itself is a defect
        if name not in self.__dataclass_fields__ and type(self).__module__.startswith("verl."):
            raise FrozenInstanceError(f"{type(self).__name__} has no option {name!r}{did_you_mean(name, self)}")
        if is_set(self, name) and name not in self._mutable_fields:
            raise FrozenInstanceError(
                f"{type(self).__name__}.{name} is read-only: make a changed copy with .with_values({{{name!r}: ...}})"
            )
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"{type(self).__name__}.{name} is read-only")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{type(self).__name__} has no option {name!r}{did_you_mean(name, self)}")

    def __getitem__(self, name: str) -> Any:
        is_derived = is_set(self, name) or isinstance(getattr(type(self), name, None), property)
        if name not in self.__dataclass_fields__ and not (is_derived and not type(self).__module__.startswith("verl.")):
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (item.name for item in dataclasses.fields(self))

    def __len__(self) -> int:
        return len(dataclasses.fields(self))

    def __getstate__(self) -> dict[str, Any]:
        return state_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore(self, state)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts and lists, safe to change or to write as JSON or YAML."""
        return {name: plain(peek(self, name)) for name in self}

    def with_values(self, changes: Mapping[str, Any]) -> "Config":
        """A copy in which the dotted keys of ``changes`` have new values; nothing is converted or checked."""
        per_field: dict[str, Any] = {}
        deeper: dict[str, dict[str, Any]] = {}
        for key, value in changes.items():
            head, _, rest = key.partition(".")
            if head not in self.__dataclass_fields__:
                raise KeyError(f"{type(self).__name__} has no option {head!r}{did_you_mean(head, self)}")
            if rest:
                deeper.setdefault(head, {})[rest] = value
            else:
                per_field[head] = value
        for head, inner in deeper.items():
            child = per_field.get(head, peek(self, head))
            if isinstance(child, Config):
                per_field[head] = child.with_values(inner)
            else:
                per_field[head] = FreeDict({**(child or {}), **inner})
        # a copy made of a watched section goes on recording, under the same key
        return rewatched(dataclasses.replace(self, **per_field), self)


def plain(value: Any) -> Any:
    """``value`` with sections and free-form dicts as ordinary dicts."""
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def get_path(config: Mapping, key: str) -> Any:
    """Value at a dotted key; None below a section that is null. Raises KeyError for a key that does not exist."""
    value: Any = config
    for name in key.split("."):
        if value is None:
            return None
        value = value[name]
    return value


def leaves(config: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every option; a free-form dict counts as one option."""
    for name, value in config.items():
        if isinstance(value, Config):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def schema_tree(config: Config) -> dict[str, Any]:
    """The section as the nested dict that YAML composes over, ``_target_`` included."""
    tree: dict[str, Any] = {} if config._target_ is None else {"_target_": config._target_}
    for name, value in config.items():
        tree[name] = schema_tree(value) if isinstance(value, Config) else plain(value)
    return tree


def did_you_mean(name: str, known: Any) -> str:
    """``"; did you mean 'x'?"`` for the nearest of ``known``, or the empty string if none is near."""
    # for a message only: most runs never need it
    import difflib

    near = difflib.get_close_matches(str(name), [str(item) for item in known], n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


# -- Who reads an option: recorded once, at its first reading, in whatever process that happens ----------------------
# A watched section keeps its values aside until they are asked for. The first reading of each goes through a
# descriptor, which notes the reader and puts the value where ordinary attributes are: from then on a reading costs what
# it always did. What only copies, prints or checks an option does not count as a reader.


READ: dict[str, str] = {}
"""Options read in this process: key -> ``module:line`` of the first reader. Workers report theirs to the driver."""

_WAITING, _PATH = "_waiting", "_path"

_TRANSPARENT = {"_collections_abc", "collections.abc", "functools", "verl.config.base"}
"""Modules that read on behalf of whoever called them."""

_COPIERS = ("dataclasses", "copy", "copyreg", "pickle", "pprint", "reprlib", "json", "yaml", "omegaconf", "ray",
            "verl.config", "verl.utils.config", "verl.preflight", "verl.trainer.ppo.job")  # fmt: skip
"""Modules, and those below them, that copy, print or check options without acting on them."""

_SECTIONS: set[str] = set()
"""Modules that declare watched sections: a property there reads on behalf of whoever asked for it."""


Watched = TypeVar("Watched", bound=Config)


def watch(config: Watched, path: str = "") -> Watched:
    """Record who reads what below ``config``, a section at the dotted key ``path``; returns it."""
    for name in config:
        value = peek(config, name)
        if hasattr(value, "__dataclass_fields__"):
            watch(value, f"{path}.{name}".lstrip("."))
    _watch_one(config, path)
    return config


def is_watched(config: Config) -> bool:
    return _PATH in vars(config)


def peek(config: Config, name: str) -> Any:
    """Value of an option, without counting as its reader."""
    values = vars(config)
    return values[name] if name in values else values[_WAITING][name]


def is_set(config: Config, name: str) -> bool:
    """Whether ``__init__`` has given the option its value."""
    return name in vars(config) or name in vars(config).get(_WAITING, ())


def state_of(config: Config) -> dict[str, Any]:
    """State that makes a copy of a section, in this or another process."""
    state = dict(vars(config))
    return state.pop(_WAITING, {}) | state


def restore(config: Config, state: dict[str, Any]) -> None:
    """Make ``config``, an empty instance, the copy; a copy of a watched section is watched too."""
    vars(config).update(state)
    if _PATH in state:
        _watch_one(config, state[_PATH])


def rewatched(config: Watched, original: Config) -> Watched:
    """``config``, a changed copy of ``original``, watched if that is, and what is kept with it."""
    if is_watched(original):
        watch(config, vars(original)[_PATH])
        kept = {name: value for name, value in vars(original).items() if name not in original.__dataclass_fields__}
        vars(config).update({name: value for name, value in kept.items() if name not in vars(config)})
    return config


def _watch_one(config: Config, path: str) -> None:
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
