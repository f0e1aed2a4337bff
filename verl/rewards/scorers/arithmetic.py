"""Scores for the tasks of ``examples/data_preprocess/arithmetic.py``, which a 135M model can learn on a CPU."""

import re

_INTEGER = re.compile(r"-?\d+")


def last_number(text: str) -> str | None:
    """The last integer of a text as it is written there, or ``None``."""
    found = _INTEGER.findall(text)
    return found[-1] if found else None


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if the last number of the response is the answer; if the answer is a word, if the response begins with it."""
    answer = str(ground_truth).strip()
    if _INTEGER.fullmatch(answer):
        return float(last_number(solution_str) == answer)
    return float(re.match(rf"{re.escape(answer)}\b", solution_str.strip(), re.IGNORECASE) is not None)
