"""Countdown: an equation from given numbers (TinyZero). Read as a syntax tree; nothing is evaluated as Python."""

import ast
import operator
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from verl.rewards.scorers.matching import last_tagged

MAX_LENGTH = 300
"""Characters of an equation that is looked at."""

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def compute_score(
    solution_str: str, ground_truth: Mapping[str, Any], format_score: float = 0.1, score: float = 1.0
) -> float:
    """``score`` for an equation that uses each number once and hits the target, else ``format_score``; 0 without one.

    Args:
        ground_truth: ``{"target": int, "numbers": [int, ...]}``.
    """
    answer = last_tagged(solution_str)
    if not answer:
        return 0.0
    equation, *claims = answer.replace("×", "*").replace("÷", "/").split("=")
    try:
        value, used = _value(ast.parse(equation.strip()[:MAX_LENGTH], mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return format_score if re.search(r"\d", answer) else 0.0
    is_right = value == int(ground_truth["target"]) and used == Counter(int(n) for n in ground_truth["numbers"])
    return score if is_right and len(claims) <= 1 else format_score


def _value(node: ast.expr) -> tuple[Fraction, Counter]:
    """Value of an equation, and how often it uses each number."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value), Counter([node.value])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value, used = _value(node.operand)
        return (-value if isinstance(node.op, ast.USub) else value), used
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        (left, some), (right, others) = _value(node.left), _value(node.right)
        return _OPERATORS[type(node.op)](left, right), some + others
    raise ValueError(f"{ast.unparse(node)} is neither a whole number nor + - * / of such.")
