"""What every section of the configuration is made of: a read-only dataclass that is also a mapping.

No YAML, no hydra, no torch here: a misspelt key must be refusable before anything heavy is imported.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

from verl.config.watch import is_set, peek, restore, rewatched, state_of

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


def option(default: Any, **bounds: float) -> Any:
    """A field whose number must stay within ``Bounds(**bounds)``, or whose default is a list or dict."""
    metadata = {"bounds": Bounds(**bounds)} if bounds else {}
    if isinstance(default, list | dict):
        return field(default_factory=partial(_copied, default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, **defaults: Any) -> Any:
    """A field holding the section ``cls``, with defaults of its own where the place differs from the class."""
    return field(default_factory=partial(cls, **defaults))


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return FreeDict({key: _copied(item) for key, item in value.items()})
    return list(value) if isinstance(value, list) else value


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
        return _copied(self)


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
    _mutable_fields: ClassVar[frozenset[str] | set[str]] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
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
    tree = {} if config._target_ is None else {"_target_": config._target_}
    for name, value in config.items():
        tree[name] = schema_tree(value) if isinstance(value, Config) else plain(value)
    return tree


def did_you_mean(name: str, known: Any) -> str:
    """``"; did you mean 'x'?"`` for the nearest of ``known``, or the empty string if none is near."""
    import difflib

    near = difflib.get_close_matches(str(name), [str(item) for item in known], n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
