"""Geometry3K: mostly the answer, a little the format (Lu et al. 2021, arXiv:2105.04165)."""

from verl.rewards.scorers.matching import is_equal, last_boxed
from verl.rewards.scorers.math import gold_answer


def format_reward(predict_str: str) -> float:
    """1.0 if the response is ``<think>...</think>`` and then a ``\\boxed{}``."""
    _, is_thought, rest = predict_str.partition("</think>")
    _, is_boxed, rest = rest.partition("\\boxed{")
    # any closing brace will do for the format: the answer itself is read with balanced ones
    return float(bool(predict_str.startswith("<think>") and is_thought and is_boxed and "}" in rest))


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """1.0 for the right answer, which is the last box or, without ``use_boxed``, the whole response."""
    answer = last_boxed(predict_str) if use_boxed else predict_str
    return float(answer is not None and is_equal(answer, gold_answer(ground_truth)))


def compute_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """(1 - ``format_score``) x answer + ``format_score`` x format: 0.9 and 0.1."""
    answer = acc_reward(predict_str, ground_truth, use_boxed)
    return (1 - format_score) * answer + format_score * format_reward(predict_str)
