"""Short answers checked by rule: multiple choice, puzzles, and the small tasks of the examples."""

import ast
import operator
import re
import string
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from verl.rewards.scorers.matching import after_thinking, last_boxed, last_tagged, normalise

# -- Multiple choice: a letter, or the number of an option counted from 0 ---------------------------------------------


_STATED = re.compile(
    r"(?i:answer|option|choice|choose|correct)\W{0,9}(?:(?i:is|would be|must be)\b)?\s{0,9}"
    r"(?i:option|choice|answer)?\W{0,6}\b([A-Z]|\d{1,2})\b(?![\w'’])"
)
_ALONE = re.compile(r"^[^\w\n]*([A-Z]|\d{1,2})[^\w\n]*$", re.MULTILINE)
_WINDOW = 2000
"""Characters at the end of a response in which an option without a mark around it is looked for."""


def choice(response: str) -> str | None:
    """The option a response settles on, as written: ``B`` or ``1``; None if it names none.

    Looked for in the last box, the last ``<answer>``, the last "answer is (B)", a line of its own, in this order.
    """
    text = after_thinking(response)
    for marked in (last_boxed(text), last_tagged(text)):
        if marked is not None:
            plain = normalise(marked).text.upper()
            found = re.fullmatch(r"(?:OPTION |CHOICE )?\W*([A-Z]|\d{1,2})\b(?:\W.*)?", plain, re.DOTALL)
            return found[1] if found else None
    for pattern in (_STATED, _ALONE):
        if options := pattern.findall(text[-_WINDOW:]):
            return options[-1]
    found = re.match(r"\W*([A-Z])(?:[).:]|\s*$)", text)
    return found[1] if found else None


def multiple_choice(solution_str: str, ground_truth: str | int) -> dict[str, float | bool | str | None]:
    """1.0 for the right option, else 0.0; with ``acc`` and ``pred``.

    Args:
        ground_truth: the letter; or the number of the option counted from 0, which then may be answered by letter.
    """
    gold, pred = str(ground_truth).strip().strip("().").upper(), choice(solution_str)
    is_right = pred is not None and (
        pred == gold or gold.isdigit() and int(gold) < 26 and pred == string.ascii_uppercase[int(gold)]
    )
    return {"score": float(is_right), "acc": is_right, "pred": pred}


# -- Countdown: an equation from given numbers (TinyZero) --------------------------------------------------------------


MAX_LENGTH = 300
"""Characters of an equation that is looked at."""

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def countdown(
    solution_str: str, ground_truth: Mapping[str, Any], format_score: float = 0.1, score: float = 1.0
) -> float:
    """``score`` for an equation that uses each number once and hits the target, else ``format_score``; 0 without one.

    Args:
        ground_truth: ``{"target": int, "numbers": [int, ...]}``.
    """
    answer = last_tagged(solution_str)
    if not answer:
        return 0.0
    equation, *claims = answer.split("=")
    try:
        value, used = equation_value(equation)
    except (ValueError, ZeroDivisionError):
        return format_score if re.search(r"\d", answer) else 0.0
    is_right = value == int(ground_truth["target"]) and used == Counter(int(n) for n in ground_truth["numbers"])
    return score if is_right and len(claims) <= 1 else format_score


def equation_value(equation: str) -> tuple[Fraction, Counter]:
    """Value of an equation of whole numbers and + - * / (also × ÷), and how often it uses each number.

    Raises:
        ValueError: it is none.
        ZeroDivisionError: it divides by zero.
    """
    plain = equation.replace("×", "*").replace("÷", "/").strip()
    try:
        # cut before it is parsed: deep nesting exhausts the parser's stack
        return _value(ast.parse(plain[:MAX_LENGTH], mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{equation[:MAX_LENGTH]!r} is no equation: {error}") from None


def _value(node: ast.expr) -> tuple[Fraction, Counter]:
    """Value of an equation, and how often it uses each number. A tree is walked: nothing is evaluated as Python."""
    # not isinstance: True would be the number 1
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value), Counter([node.value])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value, used = _value(node.operand)
        return (-value if isinstance(node.op, ast.USub) else value), used
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        (left, some), (right, others) = _value(node.left), _value(node.right)
        return _OPERATORS[type(node.op)](left, right), some + others
    raise ValueError(f"{ast.unparse(node)} is neither a whole number nor + - * / of such.")


# -- Knights and knaves: every inhabitant is named rightly (Xie et al. 2025, Logic-RL, arXiv:2502.14768) ---------------


_IDENTITY = re.compile(
    r"\b([A-Z][\w'-]{0,40})\W{0,4}\s*(?:is|:|=|was|->|→)\s*(?:an?\s+)?\W{0,4}(knight|knave)\b", re.IGNORECASE
)


def identities(text: str) -> dict[str, str]:
    """Name -> ``knight`` or ``knave``; a name that is called both has none."""
    roles: dict[str, set[str]] = {}
    for name, kind in _IDENTITY.findall(text):
        roles.setdefault(name.lower(), set()).add(kind.lower())
    return {name: kinds.pop() if len(kinds) == 1 else "both" for name, kinds in roles.items()}


def knights_and_knaves(
    solution_str: str, ground_truth: Mapping[str, Any] | str, format_score: float = 0.0, score: float = 1.0
) -> float:
    """``score`` if the last ``<answer>`` has every inhabitant right, ``format_score`` if it names them, else 0.

    Args:
        ground_truth: ``{"solution_text_format": "(1) Zoey is a knight\\n..."}``, or that text.
    """
    gold = ground_truth["solution_text_format"] if isinstance(ground_truth, Mapping) else ground_truth
    solution, answer = identities(str(gold)), last_tagged(after_thinking(solution_str))
    roles = identities(answer) if answer else {}
    if roles == solution:
        return score
    return format_score if roles.keys() == solution.keys() else 0.0


# -- Small tasks of the examples: models of random or few weights can learn them ---------------------------------------


_INTEGER = re.compile(r"-?\d+")


def arithmetic(solution_str: str, ground_truth: str) -> float:
    """1.0 if the last number of the response is the answer; if the answer is a word, if the response begins with it.

    For the tasks of ``examples/data_preprocess/arithmetic.py``, which a 135M model can learn on a CPU.
    """
    answer = str(ground_truth).strip()
    if _INTEGER.fullmatch(answer):
        return float(_INTEGER.findall(solution_str)[-1:] == [answer])
    return float(re.match(rf"{re.escape(answer)}\b", solution_str.strip(), re.IGNORECASE) is not None)


def brightness(solution_str: str, ground_truth: str) -> float:
    """Share of the response's first four characters that are digits for a bright image, letters for a dark one.

    A dense reward that a model climbs only if it sees: a response that is the same for every image scores one half at
    most, on images of both kinds.

    Args:
        ground_truth: ``bright`` or ``dark``.
    """
    kinds = {"bright": str.isdigit, "dark": str.isalpha}
    # over four, however short the response is
    return sum(map(kinds[ground_truth], solution_str[:4])) / 4


def digits(solution_str: str, ground_truth: str | int | None = None) -> float:
    """Digits in the response as a share of those asked for, between 0 and 1: any model can raise it.

    Args:
        ground_truth: the number of digits asked for; 5 if it is ``None`` or empty.
    """
    return min(1.0, sum(character in "0123456789" for character in solution_str) / int(ground_truth or 5))
