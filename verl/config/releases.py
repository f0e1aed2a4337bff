"""Keys and defaults of verl's releases, from ``release_keys.tsv``; read when a key is met that is no option here."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_name("release_keys.tsv")
RELEASES = ("v0.5.0", "2025-08", "v0.6.0", "v0.7.0", "v0.9.0", "2026-08")


class Default(NamedTuple):
    """What a release gives a key."""

    value: Any
    """Interpolations resolved; ``???`` where the user must give it."""
    megatron: bool
    """Only its Megatron trainer has the key."""


@lru_cache(maxsize=1)
def release_keys() -> dict[str, tuple[Default | None, ...]]:
    """Dotted key -> its default in each of ``RELEASES``, None where a release does not have it."""
    table = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith(("#", "key\t")):
            continue
        key, *cells = line.split("\t")
        row: list[Default | None] = []
        for cell in (*cells, *["="] * (len(RELEASES) - len(cells))):
            if cell == "=":
                row.append(row[-1])
            elif cell == "-":
                row.append(None)
            else:
                row.append(Default(json.loads(cell.removeprefix("M:")), cell.startswith("M:")))
        table[key] = tuple(row)
    return table


def is_release_default(key: str, value: Any) -> bool:
    """Does some release give ``key`` this value? ``true`` is not 1."""
    return any(row is not None and same(row.value, value) for row in release_keys().get(key, ()))


def asks_for_nothing(value: Any) -> bool:
    """Is this null, false, or an empty list, mapping or text?"""
    return value is None or value is False or (isinstance(value, list | dict | str) and not value)


def unquoted(value: Any) -> Any:
    """Text that names a truth value or null as that value."""
    names = {"true": True, "false": False, "null": None, "none": None}
    return names.get(value.lower(), value) if isinstance(value, str) else value


def same(one: Any, other: Any) -> bool:
    """Equality of plain values that tells truth values from numbers; 1 and 1.0 are the same number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    return one == other
