"""Whether two mathematical answers are the same.

Cheap before dear: the same spelling; the same number; the same items of a tuple, interval, set, list or matrix; only
then algebra, by math-verify in a child process that is killed when it takes too long (``killable.py``). An answer that
cannot be compared within the limit is not equal.
"""

import re
from functools import lru_cache

from verl.utils.reward_score.killable import Killed, killable
from verl.utils.reward_score.normalise import Answer, normalise, to_number

SECONDS = 5.0
"""Of one comparison by algebra."""

MAX_LENGTH = 400
"""Characters of an answer that is looked at by algebra."""

MAX_DEPTH = 20
"""Brackets within each other, likewise."""

_OPENING, _CLOSING = "([{", ")]}"
_MATRIX = re.compile(r"\\begin\{[pbBvV]?matrix\}(.*)\\end\{[pbBvV]?matrix\}", re.DOTALL)
_TOWER = re.compile(r"\^\{?\(?\d+\)?\s*\^|\^\{?\d{4,}|\d!|\*\*")
_SEPARATOR = re.compile(r"(?:,|;)?(?:\\text\{\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))")


@lru_cache(maxsize=1 << 16)
def is_equal(answer: str, gold: str) -> bool:
    """Whether ``answer`` means what ``gold`` means; an empty one means nothing.

    Units count only where both have one. Lists without brackets and sets have no order, tuples and intervals have.
    """
    lists = [_SEPARATOR.sub(",", text) for text in (answer, gold)]
    one, other = map(normalise, lists)
    if not one.text or not other.text:
        return False
    if one.unit and other.unit and one.unit != other.unit:
        return False
    return _same(one, other)


def _same(one: Answer, other: Answer) -> bool:
    if one.text == other.text:
        return True
    if one.is_words or other.is_words:
        return one.text.lower() == other.text.lower()
    numbers = to_number(one.text), to_number(other.text)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if _base(one.text) != _base(other.text):
        return False
    items = _items(one.text), _items(other.text)
    if items[0] or items[1]:
        return _same_items(*items)
    return _same_by_algebra(one.text, other.text)


def _same_items(one: tuple[str, list[str]] | None, other: tuple[str, list[str]] | None) -> bool:
    if one is None or other is None or len(one[1]) != len(other[1]):
        return _same_by_algebra(*(part[1][0] for part in (one, other))) if _is_single(one, other) else False
    (kind, these), (other_kind, those) = one, other
    if kind != other_kind and {kind, other_kind} != {"list", "set"}:
        return False
    if kind not in ("list", "set", "union"):
        return all(is_equal(a, b) for a, b in zip(these, those, strict=True))
    left = list(those)
    for item in these:
        match = next((i for i, candidate in enumerate(left) if is_equal(item, candidate)), None)
        if match is None:
            return False
        del left[match]
    return True


def _is_single(one: tuple[str, list[str]] | None, other: tuple[str, list[str]] | None) -> bool:
    return bool(one and other and len(one[1]) == len(other[1]) == 1)


def _items(text: str) -> tuple[str, list[str]] | None:
    """(kind, items) of a compound answer: ``union``, ``list``, ``set``, ``matrix`` or a pair of brackets; else None."""
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        rows = matrix[1].strip("\\").split("\\\\")
        return f"matrix {len(rows)}", [cell for row in rows for cell in row.split("&")]
    if text.count("\\pm") == 1:
        before, _, behind = text.partition("\\pm")
        return "list", [f"{before}{'+' if before else ''}{behind}", f"{before}-{behind}"]
    parts = _split(text, "\\cup")
    if len(parts) > 1:
        return "union", parts
    parts = _split(text, ",")
    if len(parts) > 1:
        return "list", parts
    if text.startswith("\\{") and text.endswith("\\}"):
        return "set", _split(text[2:-2], ",")
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        inner = _split(text[1:-1], ",")
        if len(inner) > 1:
            return text[0] + text[-1], inner
    return None


def _split(text: str, separator: str) -> list[str]:
    """Parts of a text between separators that stand in no bracket; one part if its brackets do not match."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if text[i] in _OPENING:
            depth += 1
        elif text[i] in _CLOSING:
            depth -= 1
        if depth < 0:
            return [text]
        if depth == 0 and text.startswith(separator, i):
            parts.append(text[start:i])
            i += len(separator)
            start = i
            continue
        i += 1
    return [*parts, text[start:]] if depth == 0 else [text]


def _base(text: str) -> str | None:
    """``6`` of ``120_6``: math-verify would not look at it."""
    found = re.fullmatch(r"[\dA-Fa-f]+_\{?(\d+)\}?", text)
    return found[1] if found else None


def _same_by_algebra(one: str, other: str) -> bool:
    for text in (one, other):
        depth = max(_depths(text), default=0)
        if len(text) > MAX_LENGTH or depth > MAX_DEPTH or _TOWER.search(text) or re.search(r"\d{100}", text):
            return False
    try:
        return bool(killable("verl.utils.reward_score.algebra:is_same", SECONDS)(one, other))
    except Killed:
        return False


def _depths(text: str) -> list[int]:
    """The number of open brackets behind each character."""
    depths, depth = [], 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        depths.append(depth)
    return depths
