"""MATH: the last ``\\boxed{}`` (Hendrycks et al. 2021, arXiv:2103.03874)."""

from verl.rewards.scorers.matching import is_equal, last_boxed

__all__ = ["compute_score", "is_equiv", "last_boxed_only_string", "remove_boxed"]


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if the last ``\\boxed{}`` of the response means the same as the answer, else 0.0."""
    answer = last_boxed(solution_str)
    return float(answer is not None and is_equal(answer, gold_answer(ground_truth)))


def gold_answer(ground_truth: str) -> str:
    """The answer of a row, out of its box if it stands in one."""
    text = str(ground_truth)
    # an empty box is no answer: then the text itself is it
    return last_boxed(text) or text


def is_equiv(str1: str | None, str2: str | None) -> bool:
    """Whether two answers mean the same; an answer that is not there does not."""
    return str1 is not None and str2 is not None and is_equal(str1, str2)


def last_boxed_only_string(string: str) -> str | None:
    """The last ``\\boxed{...}`` with its command, for preprocessing solutions; None without one."""
    inner = last_boxed(string)
    return None if inner is None else f"\\boxed{{{inner}}}"


def remove_boxed(s: str) -> str:
    """Return the text in ``\\boxed{...}``.

    Raises:
        ValueError: the text is not one box.
    """
    inner = last_boxed(s)
    if inner is None or not s.lstrip().startswith(("\\boxed", "\\fbox")):
        raise ValueError(f"{s!r} is no \\boxed{{...}}: take it from the solution with last_boxed_only_string.")
    return inner
