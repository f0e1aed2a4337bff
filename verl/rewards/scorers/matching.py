"""Find the answer in a response: the last ``\\boxed{}``, the last ``<answer>``, the last block of code."""

import re
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from verl.sandbox.fork_server import fork_server
from verl.sandbox.outcomes import SandboxError

_OPENED = re.compile("<answer>", re.IGNORECASE)
_CLOSED = re.compile("</answer>", re.IGNORECASE)
_FENCED = re.compile(r"```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_BOXES = ("\\boxed", "\\fbox")


def last_boxed(text: str) -> str | None:
    """Return the text in the last ``\\boxed{...}`` (or ``\\boxed 7``), braces balanced; None without a closed one.

    >>> last_boxed(r"\\boxed{1} no, \\boxed{\\frac{1}{2}}")
    '\\\\frac{1}{2}'
    """
    # the last of either command: what stands behind it decides
    start, command = max((text.rfind(command), command) for command in _BOXES)
    if start < 0:
        return None
    rest = text[start + len(command) :].lstrip()
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest, maxsplit=1)[0] if rest else None
    depth = 0
    for i, character in enumerate(rest):
        # \\{ and \\} are braces of the text
        if character in "{}" and (i == 0 or rest[i - 1] != "\\"):
            depth += 1 if character == "{" else -1
            if depth == 0:
                return rest[1:i]
    return None


def last_tagged(text: str) -> str | None:
    """Return the text in the last ``<answer>...</answer>``, stripped; None without one."""
    ends = [found.start() for found in _CLOSED.finditer(text)]  # one search for both would try every opening to the end
    starts = [found.end() for found in _OPENED.finditer(text, 0, ends[-1])] if ends else []
    return text[starts[-1] : ends[-1]].strip() if starts else None


def after_thinking(text: str) -> str:
    """The text behind the last ``</think>``; all of it without one."""
    return text.rpartition("</think>")[2]


def code_block(text: str, languages: tuple[str, ...] = ("python", "py", "python3")) -> str:
    """The last fenced block in one of ``languages``, else the last block of any, else the whole text.

    A block that was cut off, without its closing fence, counts.
    """
    blocks = _FENCED.findall(text)
    named = [code for language, code in blocks if language.lower() in languages]
    return (named or [code for _, code in blocks] or [text])[-1]


# -- One spelling for answers that mean the same: spaces, LaTeX sizes, units, thousands, numbers ---------------------


MAX_NUMBER = 200
"""Characters of a text that is read as a number."""

_NOISE = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|[bB]igg?[lr]?)(?![a-zA-Z])\.?"
    r"|(?<!\\)\\[!,;:> ]|\\q?quad(?![a-zA-Z])|~"
)
_FRACTION = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_BARE_FRACTION = re.compile(r"\\frac\s*(\d|\{[^{}]*\})\s*(\d|\{[^{}]*\})")
_BARE_ROOT = re.compile(r"\\sqrt\s*(\w)")
_DEGREES = re.compile(r"\^?\s*\{?\s*(?:\\circ(?![a-zA-Z])|°)\s*\}?|\\degrees?(?![a-zA-Z])")
_WORDS = r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|mbox|operatorname|hbox|bf|rm)\s*"
_WRAPPED = re.compile(_WORDS + r"\{([^{}]*)\}")
_WORD_UNIT = re.compile(
    r"([-+]?[\d.,]*\d|[-+]?[\d.,]*\\frac\{-?\d+\}\{-?\d+\}|[-+]?\d+/\d+)\s*(?:\s|(?<=\d)(?=[a-z]{2}))\s*"
    r"((?:[a-zA-Z][a-zA-Z.]+|(?<=\s)[mgsLhNJW])(?:[ /][a-zA-Z.]+)*(?:\s*\^\s*\{?\d\}?)?)"
)
# words of formulas that would otherwise be split off as units
_NO_UNITS = {"pi", "or", "and", "sqrt", "sin", "cos", "tan", "log", "ln", "mod", "exp", "to", "infty"}
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:(?:,|\{,\}|,\\!)\d{3})+(?:\.\d+)?")
_ASSIGNED = re.compile(r"[a-zA-Z](?:_\{?\w+\}?)?(?:=(?!=)|\\in(?![a-zA-Z]))")
_PI = re.compile(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])|π")
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?:"
    r"(?P<whole>\d+)?\\frac\{(?P<over>-?\d+)\}\{(?P<under>-?\d+)\}"
    r"|(?P<a>-?\d*\.?\d+|\d+\.)/(?P<b>-?\d+)"
    # three digits of exponent: an exact 10^(10^9) would fill the memory
    r"|(?P<decimal>\d+\.?\d*|\.\d+)(?:(?:e|\\(?:times|cdot)10\^)\{?(?P<exponent>[-+]?\d{1,3})\}?)?"
    r")",
    re.IGNORECASE,
)


class Answer(NamedTuple):
    """An answer in its normal spelling."""

    text: str
    """Without spaces and without its unit; empty for no answer."""
    unit: str
    """``cm``, ``cm^2``; empty if it has none."""
    is_words: bool
    """Whether it is a name or sentence, not a formula."""


def normalise(answer: str) -> Answer:
    """The normal spelling of an answer.

    >>> normalise(r"$x = \\dfrac12\\text{ cm}$.")
    Answer(text='\\\\frac{1}{2}', unit='cm', is_words=False)
    """
    text = _strip(_NOISE.sub(" ", _strip(answer)))
    # \\dfrac and \\tfrac first: the rules below know \\frac only
    text = _FRACTION.sub(r"\\frac", text)
    text = _BARE_FRACTION.sub(lambda found: f"\\frac{_braced(found[1])}{_braced(found[2])}", text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    text = _DEGREES.sub("", text)
    # currency and percent signs go, the minus before a dollar sign stays
    text = re.sub(r"^[-+]?\\?\$|\\%|%|\\\$|(?<=\d)\$", lambda found: found[0][:1] if found[0][0] in "+-" else "", text)
    text, unit = _split_unit(text.strip())
    was_wrapped = _WRAPPED.search(text) is not None
    text = _WRAPPED.sub(r"\1", text).strip()
    # before spaces are taken out, which words keep
    if is_words(text, was_wrapped):
        return Answer(re.sub(r"[\s.]+", " ", text.strip("() .")).strip().lower(), unit, True)
    text = re.sub(r"\s+", "", _PI.sub(r"\\pi", text.replace("−", "-").replace("∞", "\\infty")))
    if _THOUSANDS.fullmatch(text):
        text = re.sub(r"[^\d.+-]", "", text)
    text = _ASSIGNED.sub("", text, count=1) if len(_ASSIGNED.findall(text)) == 1 and _ASSIGNED.match(text) else text
    text = _strip(text)
    return Answer("" if text in ("{}", "()") else text, unit, False)


def is_words(text: str, was_wrapped: bool) -> bool:
    """Whether a text is words: ``\\text{Evelyn}``, ``east``, ``(C)``; not ``xy``, ``pi`` or ``2x``."""
    bare = text.strip("() .")
    if re.search(r"[\\^_=+*/<>{}\[\]\d|]", bare):
        return False
    if was_wrapped:
        return re.search(r"[^\W\d]", bare) is not None
    return bare not in _NO_UNITS and re.fullmatch(r"[A-Z]|(?=.*[^\W\d]{3})[^\W\d][\w\s'’,;-]*", bare) is not None


def to_number(text: str) -> Fraction | None:
    """The exact value of a normal text that is a plain number, fraction, mixed number or power-of-ten notation."""
    if len(text) > MAX_NUMBER:
        return None
    found = _NUMBER.fullmatch(text)
    if not found:
        return None
    try:
        if found["over"]:
            value = int(found["whole"] or 0) + Fraction(int(found["over"]), int(found["under"]))
        elif found["a"]:
            value = Fraction(found["a"].rstrip(".")) / int(found["b"])
        else:
            value = Fraction(found["decimal"].rstrip(".")) * Fraction(10) ** int(found["exponent"] or 0)
    except ZeroDivisionError:
        return None
    return -value if found["sign"] == "-" else value


def _strip(text: str) -> str:
    """Without the mathematics delimiters, spaces and full stops around it."""
    before = None
    # until nothing changes: delimiters stand within each other, as in **$7$.**
    while before != text:
        before = text
        text = text.strip().rstrip(".,;:").strip()
        for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`")):
            is_around = text.startswith(opening) and text.endswith(closing) and len(text) > len(opening + closing)
            text = text[len(opening) : -len(closing)] if is_around else text
    return text


def _split_unit(text: str) -> tuple[str, str]:
    """``10\\text{ cm}^2`` or ``10 square cm`` -> the text before the unit, and the unit."""
    wrapped = re.fullmatch(r"(.*\S)\s*" + _WORDS + r"\{([^{}]*)\}(\s*\^\s*\{?\d\}?)?", text, re.DOTALL)
    if wrapped and not re.search(_WORDS, wrapped[1]) and re.search(r"[\w})\]]$", wrapped[1]):
        unit = wrapped[2].strip()
        if not re.match(r"(and|or|if|for|to|when)\b", unit):
            return wrapped[1].strip(), _unit(unit + (wrapped[3] or ""))
    plain = _WORD_UNIT.fullmatch(text)
    if plain and not _NO_UNITS & set(re.findall(r"[a-z]+", plain[2].lower())):
        return plain[1], _unit(plain[2])
    return text, ""


def _unit(text: str) -> str:
    # the s of a plural goes; so `s` for seconds is no unit, and compared with nothing
    return re.sub(r"[\s.{}]+", "", text).lower().replace("squared", "^2").removesuffix("s")


def _braced(text: str) -> str:
    return text if text.startswith("{") else f"{{{text}}}"


# -- Whether two mathematical answers are the same -------------------------------------------------------------------


SECONDS = 5.0
"""Seconds of one comparison by algebra."""

MAX_LENGTH = 400
"""Characters of an answer that is looked at by algebra."""

MAX_DEPTH = 20
"""Brackets within each other in an answer that is looked at by algebra."""

_OPENING, _CLOSING = "([{", ")]}"
_MATRIX = re.compile(r"\\begin\{[pbBvV]?matrix\}(.*)\\end\{[pbBvV]?matrix\}", re.DOTALL)
_TOWER = re.compile(r"\^\{?\(?\d+\)?\s*\^|\^\{?\d{4,}|\d!|\*\*")
_SEPARATOR = re.compile(r"(?:,|;)?(?:\\text\{\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))")


# the responses to a prompt repeat each other's answers; a comparison that timed out is kept as unequal
@lru_cache(maxsize=1 << 16)
def is_equal(answer: str, gold: str) -> bool:
    """Whether ``answer`` means what ``gold`` means; an empty one means nothing.

    Units count only where both have one. Lists without brackets and sets have no order, tuples and intervals have.
    """
    # "2 and 3" is a list like "2, 3"; before units are split off, which may hold words
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
    # from cheap to expensive: exact numbers, then parts, then a child process with sympy
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
        return False
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
        # matched once: 1, 1, 2 is not 1, 2, 2
        del left[match]
    return True


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
    """Parts of a text between separators outside of brackets; one part if its brackets do not match."""
    # kinds of brackets are not told apart: [0, 1) closes
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
    """Return the base of a number, ``6`` of ``120_6``, which math-verify ignores."""
    found = re.fullmatch(r"[\dA-Fa-f]+_\{?(\d+)\}?", text)
    return found[1] if found else None


def _same_by_algebra(one: str, other: str) -> bool:
    for text in (one, other):
        # the number of open brackets behind each character
        depths = accumulate((character in _OPENING) - (character in _CLOSING) for character in text)
        is_deep = max(depths, default=0) > MAX_DEPTH
        # towers of powers and factorials are what sympy would not come back from
        if len(text) > MAX_LENGTH or is_deep or _TOWER.search(text) or re.search(r"\d{100}", text):
            return False
    try:
        return bool(fork_server("verl.rewards.scorers.algebra:is_same", SECONDS)(one, other))
    except SandboxError:
        # not shown to be equal in time and memory: wrong, rather than an error of the run
        return False
