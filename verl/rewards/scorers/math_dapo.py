"""DAPO and AIME: the last ``Answer:`` line, +1 or -1 (Yu et al. 2025, arXiv:2503.14476)."""

import re

from verl.rewards.scorers.matching import is_equal, last_boxed
from verl.rewards.scorers.math import gold_answer

_ANSWER_WINDOW = 300
"""Characters at the end of a response in which the answer is looked for."""

_ANSWER_LINE = re.compile(r"answer\**\s*:\**\s*([^\n]+)", re.IGNORECASE)

INVALID = "[INVALID]"
"""``pred`` of a response without an answer."""


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, boxed_too: bool = False
) -> dict[str, float | bool | str]:
    """+1.0 for the right answer, else -1.0, read off the last 300 characters of the response.

    Args:
        strict_box_verify: the answer is the last ``\\boxed{}``, and spelt as the gold answer is.
        boxed_too: without an ``Answer:`` line, take the last ``\\boxed{}``.

    Returns:
        ``score``, ``acc`` (whether it is right) and ``pred`` (the answer, for majority votes).
    """
    tail = solution_str[-_ANSWER_WINDOW:]
    # within the window, too: a box that begins before it is not found
    boxed = last_boxed(tail)
    if strict_box_verify:
        pred = boxed
        is_right = pred is not None and pred.strip() == gold_answer(ground_truth).strip()
    else:
        lines = _ANSWER_LINE.findall(tail)
        pred = (last_boxed(lines[-1]) or lines[-1].strip()) if lines else boxed if boxed_too else None
        is_right = pred is not None and is_equal(pred, gold_answer(ground_truth))
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": INVALID if pred is None else pred}


def compute_score_boxed_too(solution_str: str, ground_truth: str) -> dict[str, float | bool | str]:
    """``compute_score`` with ``boxed_too``, for contest sets whose prompts ask for a box."""
    return compute_score(solution_str, ground_truth, boxed_too=True)
