"""Numina's problems: a boxed answer, else what the response says its answer is (Cui et al. 2025, arXiv:2502.01456)."""

import re

from verl.rewards.scorers.matching import is_equal, last_boxed, last_tagged
from verl.rewards.scorers.math import gold_answer

_STATED = re.compile(
    r"(?:final\s+answer|answer)\s*(?:is|:|=)\s*\**\s*:?\s*([^\n]+?)(?:\.\s|\.?\s*$|\n)", re.IGNORECASE | re.MULTILINE
)
_WINDOW = 1000
"""Characters at the end of a response in which an answer without a box is looked for."""


def find_answer(response: str) -> str | None:
    """The last box; without one the last ``<answer>``, or the last "the answer is ..."; None if there is none."""
    boxed = last_boxed(response)
    if boxed is not None:
        return boxed
    tagged = last_tagged(response)
    if tagged is not None:
        return tagged
    stated = _STATED.findall(response[-_WINDOW:])
    return stated[-1].strip() if stated else None


def compute_score(solution_str: str, ground_truth: str) -> dict[str, float | bool | str | None]:
    """1.0 for the right answer, else 0.0.

    Returns:
        ``score``, ``acc``, ``format`` (whether the answer is boxed) and ``pred``.
    """
    answer = find_answer(solution_str)
    is_right = answer is not None and is_equal(answer, gold_answer(ground_truth))
    is_boxed = last_boxed(solution_str) is not None
    return {"score": float(is_right), "acc": is_right, "format": is_boxed, "pred": answer}
