"""One spelling for answers that mean the same: spaces, LaTeX sizes, units, thousands, numbers.

Text only: no sympy. What differs after this may still be equal (``equal.py`` goes on from here).
"""

import re
from fractions import Fraction
from typing import NamedTuple

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
_NO_UNITS = {"pi", "or", "and", "sqrt", "sin", "cos", "tan", "log", "ln", "mod", "exp", "to", "infty"}
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:(?:,|\{,\}|,\\!)\d{3})+(?:\.\d+)?")
_ASSIGNED = re.compile(r"[a-zA-Z](?:_\{?\w+\}?)?(?:=(?!=)|\\in(?![a-zA-Z]))")
_PI = re.compile(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])|π")
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?:"
    r"(?P<whole>\d+)?\\frac\{(?P<over>-?\d+)\}\{(?P<under>-?\d+)\}"
    r"|(?P<a>-?\d*\.?\d+|\d+\.)/(?P<b>-?\d+)"
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
    text = _FRACTION.sub(r"\\frac", text)
    text = _BARE_FRACTION.sub(lambda found: f"\\frac{_braced(found[1])}{_braced(found[2])}", text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    text = _DEGREES.sub("", text)
    text = re.sub(r"^[-+]?\\?\$|\\%|%|\\\$|(?<=\d)\$", lambda found: found[0][:1] if found[0][0] in "+-" else "", text)
    text, unit = _split_unit(text.strip())
    was_wrapped = _WRAPPED.search(text) is not None
    text = _WRAPPED.sub(r"\1", text).strip()
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
    return re.sub(r"[\s.{}]+", "", text).lower().replace("squared", "^2").removesuffix("s")


def _braced(text: str) -> str:
    return text if text.startswith("{") else f"{{{text}}}"
