"""Rows of ``keys.yaml``, and the outcomes that a key of ROLL and its value come to."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from verl.config.base import did_you_mean
from verl.config.command_line import quoted
from verl.config.features import expand

if TYPE_CHECKING:
    from verl.config.roll.batch import Roll

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
ROLES = ("actor_train", "actor_infer", "reference", "critic")
"""Worker sections of ROLL."""
WORKER_TABLES = ("worker", "data", "generation")
"""Tables of ``keys.yaml`` for them and for ``validation``."""

# -- Outcomes --------------------------------------------------------------------------------------------------------


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
Translate = Callable[..., Iterator[Outcome]]
"""(ROLL key, its value, the ``Roll`` it stands in, an argument if the row has one) -> outcomes."""

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
    # Quoted, what hydra would read as a number, null or a truth value, and ~, which it expands.
    is_word = _BARE.fullmatch(text) and not re.fullmatch(r"(?i)null|true|false|nan|inf|[-+.\d_e]+", text)
    return text if is_word and not text.startswith("~") else quoted(text)


# -- Rows ------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One key of ROLL; the head of ``keys.yaml`` says what the fields mean."""

    to: tuple[str, ...] = ()
    sets: Mapping[str, Any] = {}
    if_true: Mapping[str, Any] = {}
    by: tuple[str, ...] = ()
    read: str | None = None
    no_effect: str | None = None
    not_built: str | None = None
    note: str = ""
    harmless: tuple[Any, ...] = (None, False)
    default: Any = None
    instead: tuple[str, ...] = ("{key}=null",)
    reads_null: bool = False
    sections: tuple[str, ...] = ()
    """Worker sections in which the key counts; in others it has no effect. None named: all."""

    @property
    def kind(self) -> Literal["translated", "no effect", "not built"]:
        if self.not_built is not None:
            return "not built"
        return "translated" if self.no_effect is None else "no effect"

    def described(self) -> str:
        """The row in words: its options, then its note."""
        notes = (self.read, self.no_effect, self.not_built, self.note)
        text = "; ".join(filter(None, [", ".join(f"`{option}`" for option in self.to), *notes]))
        return f"{text}. ROLL's default `{self.default}` is kept" if self.default is not None else text


_COUNT_IN = {
    "data": ("actor_train", "validation"),
    "generation": ("actor_infer", "validation"),
    "megatron_training": ("actor_train", "critic"),
}


@cache
def read_yaml(name: str) -> dict[str, Any]:
    """A file of this folder."""
    import yaml

    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return dict(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def listed(name: str) -> Any:
    """A list of ``keys.yaml`` that is no table of rows."""
    return read_yaml("keys.yaml")[name]


def place_of(key: str, kind: str) -> str | None:
    """The place of a kind (``role``, ``model``, ...) that a key's section has here."""
    found = listed("places").get(key.partition(".")[0], {}).get(kind)
    return None if found is None else str(found)


@cache
def rows(*tables: str) -> dict[str, Row]:
    """Key -> its row in one of these tables of ``keys.yaml``."""
    found: dict[str, Row] = {}
    for table in tables:
        for pattern, entry in read_yaml("keys.yaml")[table].items():
            fields: dict[str, Any] = {"sections": _COUNT_IN.get(table, ())}
            for name, value in entry.items():
                alone = name in ("to", "by") and isinstance(value, str)  # one option, or a function without argument
                fields[name] = (value,) if alone else tuple(value) if isinstance(value, list) else value
            found |= {key: Row(**fields) for key in expand(pattern)}
    return found


def translator(name: str) -> Translate:
    """Return the function that a row names."""
    from verl.config.roll import environments, keys  # which import the outcomes above

    found: Translate = getattr(keys if hasattr(keys, name) else environments, name)
    return found


_ASKS_FOR_NOTHING: tuple[Any, ...] = (None, False, "None", "null", {}, [])


def row_outcomes(row: Row | None, key: str, value: Any, roll: "Roll", known: Iterable[str]) -> Iterator[Outcome]:
    """Outcome of a key and its value.

    A key that is in no release of ROLL is refused if a known one is near: it may be a typing error, which ROLL would
    drop without a word. Any other has no effect there or here.
    """
    value = None if value in ("None", "null") else value
    section = key.partition(".")[0]
    if row is None:
        # The last name alone: sections in front of it would make all keys alike.
        near = did_you_mean(key.rpartition(".")[2], known).rstrip("?")
        if near and not any(value is item or value == item and value != 0 for item in _ASKS_FOR_NOTHING):
            yield Refuse(key, value, f"is no key of ROLL{near}", (f"{key}=null",))
        else:
            yield Idle(key)
    elif row.not_built is not None:
        # The type too: false is not 0 here.
        if not any(value is item or value == item and type(value) is type(item) for item in row.harmless):
            yield Refuse(key, value, row.not_built, tuple(text.format(key=key) for text in row.instead))
    elif row.no_effect is not None:
        yield from [] if value in (None, {}, []) else [Idle(key)]
    elif row.read is not None or value is None and not row.reads_null:
        return
    elif row.sections and section not in row.sections:
        yield Idle(key)
    elif row.by:
        yield from translator(row.by[0])(key, value, roll, *row.by[1:])
    else:
        if section != "validation":  # options that take the value as it is are those of training
            yield from (Set(option, value) for option in row.to)
        places = roll.places(section)
        for option, item in (row.sets or (row.if_true if value else {})).items():
            if all(name in places for name in re.findall(r"\{(\w+)\}", option)):
                yield Set(option.format(**places), value if item == "{value}" else item)


def section_outcomes(
    place: str, section: Mapping[str, Any], known: Mapping[str, Row], roll: "Roll", inner: str = ""
) -> Iterator[Outcome]:
    """Outcomes of the keys of a section that stands at ``place``, as deep as the rows of its table go.

    Args:
        inner: the part of a row's key that ``section`` itself has; its keys come behind.
    """
    for last, value in section.items():
        name = f"{inner}{last}"
        if isinstance(value, Mapping) and any(key.startswith(f"{name}.") for key in known):
            yield from section_outcomes(place, value, known, roll, f"{name}.")
        else:
            yield from row_outcomes(known.get(name), f"{place}{name}", value, roll, known)
