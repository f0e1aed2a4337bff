"""Plain nested dicts addressed by dotted keys: the composed configuration before it is typed."""

from collections.abc import Iterator
from typing import Any


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
