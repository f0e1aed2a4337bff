"""Explanations of options, read from where they stand: the docstring below each field."""

import ast
import dataclasses
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl.config.base import Config, get_path
from verl.config.build import section_class, show, types_of

_WIDTH = 110


def explanation(cls: type[Config], name: str) -> str:
    """Docstring of an option, in one paragraph; the empty string if it has none."""
    for base in cls.__mro__:
        text = _docstrings(base.__module__).get((base.__name__, name))
        if text is not None:
            return " ".join(text.split())
    return ""


@lru_cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """(class, field) -> docstring of everything a module declares."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file or not file.endswith(".py"):
        return {}
    found = {}
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                found[node.name, field.target.id] = str(text.value.value)
    return found


def describe(root: type[Config], key: str = "", tree: Mapping | None = None) -> Iterator[str]:
    """Lines of annotated YAML for an option or a section.

    Args:
        root: class of the whole tree.
        key: dotted key; "" for everything.
        tree: values to show, for example with interpolations unresolved. None: the defaults of the classes.
    """
    defaults = root()
    shown = defaults if tree is None else tree
    if not key:
        yield from _section(defaults, shown, "", 0)
        return
    parent, _, name = key.rpartition(".")
    holder = get_path(defaults, parent) if parent else defaults
    if holder is None:  # a section that is null by default
        holder = _class_at(root, parent)()
    values = _value(shown, parent) if parent else shown
    yield from _option(holder, name, values, parent, 0, path=True)


def _class_at(root: type[Config], key: str) -> type[Config]:
    cls = root
    for name in key.split("."):
        cls = section_class(types_of(cls)[name])
    return cls


def _value(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _section(config: Config, values: Any, key: str, depth: int) -> Iterator[str]:
    for item in dataclasses.fields(config):
        yield from _option(config, item.name, values, key, depth)


def _option(config: Config, name: str, values: Any, parent: str, depth: int, path: bool = False) -> Iterator[str]:
    indent, key = "  " * depth, f"{parent}.{name}".lstrip(".")
    default = config[name]
    for line in textwrap.wrap(explanation(type(config), name), _WIDTH - len(indent)):
        yield f"{indent}# {line}"
    label = key if path else name
    if isinstance(default, Config):
        yield f"{indent}{label}:"
        yield from _section(default, _value(values, name), key, depth + 1)
        return
    value = values.get(name, default) if isinstance(values, Mapping) else default
    yield f"{indent}{label}: {_yaml(value)}  # {_kind(config, name)}{_limits(key)}"
    inner = section_class(types_of(type(config))[name])
    if inner is not None and value is None:
        yield from (f"{indent}#   {line}" for line in _section(inner(), inner(), key, 0))


def _yaml(value: Any) -> str:
    import json

    if isinstance(value, dict | list) or value == "":
        return json.dumps(value)
    return show(value)


def _kind(config: Config, name: str) -> str:
    bounds = next(item for item in dataclasses.fields(config) if item.name == name).metadata.get("bounds")
    signs = zip((">", ">=", "<", "<="), bounds, strict=True) if bounds else ()
    limits = [f"{sign} {limit:g}" for sign, limit in signs if limit is not None]
    return " ".join([_type_name(types_of(type(config))[name]), *limits])


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " | ".join(_type_name(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(typing.get_args(kind))
    if typing.get_origin(kind) is list:
        return f"list of {_type_name(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) is dict:
        return "free-form"
    if isinstance(kind, type) and issubclass(kind, Config):
        return "section"
    return {type(None): "null", Any: "anything"}.get(kind) or kind.__name__


def _limits(key: str) -> str:
    from verl.config.support import LIMITS, NAMES

    for names in NAMES:
        if names.key == key:
            return f"; built: {', '.join(names.built)}"
    for limit in LIMITS:
        if limit.key == key or (limit.key.endswith(".*") and key.startswith(limit.key[:-1])):
            works = f" beside {', '.join(map(str, limit.works))}" if limit.works else ""
            return f"; other values{works} not supported yet ({limit.what})"
    return ""
