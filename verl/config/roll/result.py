"""What a row of the tables may come to."""

import json
import re
from typing import Any, NamedTuple


class Set(NamedTuple):
    """An option of ours and its value."""

    key: str
    value: Any


class Refuse(NamedTuple):
    """A key that is not done, why, and the way out."""

    key: str
    value: Any
    why: str
    instead: tuple[str, ...] = ()
    """Options of ours: if the command line sets one of them, the refusal is settled."""


class Note(NamedTuple):
    """Something the user should know."""

    text: str


Outcome = Set | Refuse | Note

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
