"""Any mathematics: the answer wherever the response names it, compared by meaning."""

from verl.rewards.scorers.matching import is_equal
from verl.rewards.scorers.math import gold_answer
from verl.rewards.scorers.prime_math import find_answer


def compute_score(model_output: str, ground_truth: str) -> float:
    """1.0 if the response's answer equals the gold answer, else 0.0."""
    answer = find_answer(model_output)
    return float(answer is not None and is_equal(answer, gold_answer(ground_truth)))
