"""From nested plain values (as YAML gives them) to typed sections, collecting every problem on the way.

Conversions are OmegaConf's: text becomes a number or a truth value where one is expected, a number becomes text, and
nothing else changes its kind. In addition 1e3 is accepted where an integer is expected.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union

from verl.config.base import Config, FreeDict, Problem, did_you_mean, read_only

_TRUE, _FALSE = {"true", "yes", "on", "y", "1"}, {"false", "no", "off", "n", "0"}


Section = TypeVar("Section", bound=Config)


class _Unfit(Exception):
    """A value cannot become the type of its option; the message says what it must be."""


def build(defaults: Section, values: Mapping, key: str, problems: list[Problem]) -> Section:
    """The section ``defaults`` with ``values`` laid over it.

    Args:
        defaults: an instance; options that ``values`` does not name keep its value.
        values: plain nested mapping. ``_target_`` is skipped: the place decides the class.
        key: dotted key of the section, "" for the root; only for messages.
        problems: receives unknown keys and unfit values; such options keep their default.
    """
    fields = {item.name: item for item in dataclasses.fields(defaults)}
    kinds = types_of(type(defaults))
    chosen: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{key}.{name}" if key else str(name)
        if name == "_target_":
            continue
        if name not in fields:
            problems.append(Problem(path, f"{path} is not an option{did_you_mean(name, fields)}"))
            continue
        # a section laid over the default of its place, which may differ from its class's (optim.lr of the critic)
        default = getattr(defaults, name)
        try:
            converted = _convert(kinds[name], value, default, path, problems)
            _check_bounds(fields[name].metadata.get("bounds"), converted)
        except _Unfit as unfit:
            problems.append(Problem(path, f"{path}={show(value)} {unfit}."))
            continue
        chosen[name] = converted
    return dataclasses.replace(defaults, **chosen)


def fits(root: type[Config], key: str, value: Any) -> bool | None:
    """Can the option at a dotted key hold ``value``? None if there is no such option, or it is free-form."""
    # free-form content has no class: whatever stands there fits
    cls, _, name = section_of(root, key)
    if cls is None:
        return None
    try:
        bounds = cls.__dataclass_fields__[name].metadata.get("bounds")
        _check_bounds(bounds, _convert(types_of(cls)[name], value, None, key, []))
    except _Unfit:
        return False
    return True


def is_text(root: type[Config], key: str) -> bool:
    """Does an option hold text, and no truth value?"""
    cls, _, name = section_of(root, key)
    kind = types_of(cls)[name] if cls is not None else None
    kinds = typing.get_args(kind) or (kind,)
    return str in kinds and bool not in kinds


def section_of(root: type[Config], key: str) -> tuple[type[Config] | None, str, str]:
    """The class of the section that holds an option, the section's key, the option's name. No class: no such option."""
    parent, _, name = key.rpartition(".")
    cls: type[Config] | None = root
    for part in parent.split(".") if parent else ():
        cls = section_class(types_of(cls).get(part)) if cls is not None else None
    return (cls if cls is not None and name in types_of(cls) else None), parent, name


def show(value: Any) -> str:
    """A value as the user would write it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if value == "" or isinstance(value, list | dict) else str(value)


@cache
def types_of(cls: type) -> dict[str, Any]:
    """Option -> declared type of a section class."""
    declared = {item.name: item.type for item in dataclasses.fields(cls)}
    if any(isinstance(kind, str) for kind in declared.values()):  # the section's module postpones annotations
        return typing.get_type_hints(cls)
    return declared


def section_class(kind: Any) -> type[Config] | None:
    """The section a declared type holds, null allowed or not; None for any other type."""
    kinds = typing.get_args(kind) or (kind,)
    return next((part for part in kinds if isinstance(part, type) and issubclass(part, Config)), None)


def _convert(kind: Any, value: Any, default: Any, key: str, problems: list[Problem]) -> Any:
    origin = typing.get_origin(kind)
    if origin is Union or origin is types.UnionType:
        return _convert_union(typing.get_args(kind), value, default, key, problems)
    if isinstance(kind, type) and issubclass(kind, Config):
        if not isinstance(value, Mapping):
            raise _Unfit(f"must be a section with the options {', '.join(types_of(kind))}")
        return build(default if isinstance(default, kind) else kind(), value, key, problems)
    if origin is Literal:
        return _convert_literal(typing.get_args(kind), value)
    if origin is list:
        if not isinstance(value, list | tuple):
            raise _Unfit("must be a list, written [a,b]")
        (item_kind,) = typing.get_args(kind)
        return [_convert(item_kind, item, None, key, problems) for item in value]
    if origin is dict or kind is dict:
        if not isinstance(value, Mapping):
            raise _Unfit("must be a mapping, written {name: value}")
        _, item_kind = typing.get_args(kind) or (Any, Any)
        items = {}
        for name, item in value.items():
            try:
                items[name] = _convert(item_kind, item, None, f"{key}.{name}", problems)
            except _Unfit as unfit:
                raise _Unfit(f"holds {name}={show(item)}, which {unfit}") from None
        return FreeDict(items)
    if kind is Any:
        return read_only(value)
    return _convert_scalar(kind, value)


def _convert_union(kinds: tuple, value: Any, default: Any, key: str, problems: list[Problem]) -> Any:
    if value is None:
        if type(None) in kinds:
            return None
        raise _Unfit("must not be null")
    if set(kinds) == {bool, type(None)}:
        return _convert_switch(value)
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    for kind in kinds:  # what already fits keeps its kind: "8" stays text in str | int
        if (typing.get_origin(kind) or kind) is type(value):
            return _convert(kind, value, default, key, problems)
    complaints = []
    for kind in kinds:
        try:
            return _convert(kind, value, default, key, problems)
        except _Unfit as unfit:
            complaints.append(str(unfit))
    raise _Unfit(" or ".join(complaints))


def _convert_switch(value: Any) -> bool | None:
    """A truth value, or null for the automatic choice, which may be written ``auto``."""
    if isinstance(value, str) and value.lower() == "auto":
        return None
    try:
        return bool(_convert_scalar(bool, value))
    except _Unfit:
        raise _Unfit("must be true, false or auto (null: the automatic choice)") from None


def _convert_literal(allowed: tuple, value: Any) -> Any:
    # YAML 1.1 and hydra read on/off/yes/no as words or truth values; text is compared as text.
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)
    if value is not None and text in allowed:
        return text
    raise _Unfit(f"must be one of {', '.join(allowed)}{did_you_mean(text, allowed).rstrip('?')}")


def _convert_scalar(kind: type, value: Any) -> Any:
    if value is None:
        raise _Unfit("must not be null")
    if isinstance(value, Mapping | list | tuple):
        raise _Unfit(f"must be {_EXPECTED[kind]}, not a {'mapping' if isinstance(value, Mapping) else 'list'}")
    return _SCALARS[kind](value)


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise _Unfit("must be true or false")


def _to_int(value: Any) -> int:
    try:
        # True is an int in Python, and nobody means 1 by it
        if isinstance(value, bool):
            raise ValueError
        number = float(value) if isinstance(value, str) and not _is_int_text(value) else value
        if isinstance(number, float) and not number.is_integer():
            raise ValueError
        return int(number)
    except (ValueError, OverflowError):
        raise _Unfit("must be a whole number") from None


def _to_float(value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except ValueError:
        raise _Unfit("must be a number") from None
    if not math.isfinite(number):
        raise _Unfit("must be a finite number")
    return number


def _is_int_text(text: str) -> bool:
    return text.lstrip("+-").replace("_", "").isdigit()


_SCALARS: dict[type, Callable[[Any], Any]] = {bool: _to_bool, int: _to_int, float: _to_float, str: str}

_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _check_bounds(bounds: Any, value: Any) -> None:
    if bounds is None or value is None:
        return
    for number in value if isinstance(value, list) else [value]:
        broken = bounds.broken_by(number)
        if broken:
            raise _Unfit(broken)


# -- Plain nested dicts addressed by dotted keys: the composed configuration before it is typed ----------------------


def at_key(tree: dict, key: str) -> Any:
    """Value at a dotted key; None if there is none."""
    node: Any = tree
    for name in key.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node


def section_at(tree: dict, key: str) -> dict:
    """The dict at a dotted key; an empty one if there is none."""
    node = at_key(tree, key)
    return node if isinstance(node, dict) else {}


def put_key(tree: dict, key: str, value: Any) -> None:
    """Set a dotted key, making sections on the way."""
    *path, last = key.split(".")
    for name in path:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[last] = value


def pop_key(tree: dict, key: str) -> tuple[bool, Any]:
    """Remove a dotted key: (was it there, its value). A section that held nothing else goes with it."""
    *path, last = key.split(".")
    nodes = [tree]
    for name in path:
        if not isinstance(nodes[-1], dict) or name not in nodes[-1]:
            return False, None
        nodes.append(nodes[-1][name])
    if not isinstance(nodes[-1], dict) or last not in nodes[-1]:
        return False, None
    value = nodes[-1].pop(last)
    # from the innermost section outwards: one that is left empty is removed too
    for depth in range(len(path), 0, -1):
        if not nodes[depth]:
            nodes[depth - 1].pop(path[depth - 1])
    return True, value


def overlay(tree: dict, other: dict) -> None:
    """Lay ``other`` over ``tree``, section by section, in place."""
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            overlay(tree[name], value)
        else:
            tree[name] = value


def flatten(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf; an empty dict is a leaf."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def copy_tree(tree: dict) -> dict:
    """A copy whose sections can be changed without touching ``tree``; leaves are shared."""
    return {name: copy_tree(value) if isinstance(value, dict) else value for name, value in tree.items()}


def differing(tree: dict, base: dict, prefix: str = "") -> set[str]:
    """Dotted keys whose value in ``tree`` is not that of ``base``."""
    found: set[str] = set()
    for name, value in tree.items():
        other = base.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            found |= differing(value, other, f"{prefix}{name}.")
        elif name not in base or value != other:
            found.add(f"{prefix}{name}")
    return found


def is_interpolation(value: Any) -> bool:
    """Does a value refer to others (``${...}``)?"""
    if isinstance(value, list):
        return any(is_interpolation(item) for item in value)
    return isinstance(value, str) and "${" in value
