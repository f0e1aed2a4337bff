"""GSM8K: the number after the last ``####`` (Cobbe et al. 2021, arXiv:2110.14168)."""

import re

_ANSWER_WINDOW = 300
"""Characters at the end of a response in which the answer is looked for: a regex over a long response is slow."""

# a full stop behind the number is taken for part of it: `#### 18.` is not 18
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The answer as a string without commas and dollar signs, or ``None``.

    Args:
        method: ``strict`` wants the format ``#### <number>``; ``flexible`` takes the last number there is.

    Raises:
        ValueError: unknown method.
    """
    tail = solution_str[-_ANSWER_WINDOW:]
    if method == "strict":
        found = _MARKED.findall(tail)
    elif method == "flexible":
        # not a lone full stop or comma, which the pattern matches too
        found = [number for number in _NUMBER.findall(tail) if number.strip(".,-")]
    else:
        raise ValueError(f"method={method!r} is not a way to find the answer: use 'strict' or 'flexible'.")
    return found[-1].replace(",", "").replace("$", "") if found else None


def compute_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """``score`` for the right answer, ``format_score`` for a wrong one in the right format, else 0."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    # as text: 18.00 is not 18
    return score if answer == str(ground_truth) else format_score
