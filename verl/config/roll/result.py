"""Outcomes of a row of the tables."""

import json
import re
from typing import Any, NamedTuple


class Set(NamedTuple):
    """An option of ours and its value."""

    key: str
    value: Any


class Refuse(NamedTuple):
    """A key that is refused, the reason, and words to add to the command instead."""

    key: str
    value: Any
    why: str
    instead: tuple[str, ...] = ()
    """Words, ``key=value`` of our options or of ROLL's: each settles the refusal. Without ``=value`` it is the
    user's to choose."""


class Note(NamedTuple):
    """Something the user should know."""

    text: str


class Idle(NamedTuple):
    """A key without effect here; docs/roll.md has the reason of each."""

    key: str


class Secret(NamedTuple):
    """A value that belongs into an environment variable, not on a command line."""

    key: str
    variable: str
    value: str


Outcome = Set | Refuse | Note | Idle | Secret

_BARE = re.compile(r"[\w./:@~+*-]+")


def word(key: str, value: Any) -> str:
    """``key=value`` in hydra's grammar."""
    return f"{key}={_text(value)}"


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}: {_text(item)}" for name, item in value.items()) + "}"
    text = str(value)
    is_word = _BARE.fullmatch(text) and not re.fullmatch(r"(?i)null|true|false|nan|inf|[-+.\d_e]+", text)
    return text if is_word and not text.startswith("~") else "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
