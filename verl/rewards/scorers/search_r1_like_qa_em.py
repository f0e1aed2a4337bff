"""Questions with short answers: exact match after SQuAD's normalisation (Jin et al. 2025, arXiv:2503.09516)."""

import re
import string
from collections.abc import Iterable, Mapping
from typing import Any

from verl.rewards.scorers.matching import last_tagged

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(s: str) -> str:
    """Lower case, without punctuation, articles and doubled spaces.

    >>> normalize_answer("The  U.S.A.!")
    'usa'
    """
    return " ".join(_ARTICLES.sub(" ", s.lower().translate(_NO_PUNCTUATION)).split())


def golden_answers(ground_truth: Any) -> list[str]:
    """The answers that count: of ``{"target": [...]}``, of a list, or the one text."""
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    if isinstance(target, str) or not isinstance(target, Iterable):
        return [str(target)]
    return [str(answer) for answer in target]


def em_check(prediction: str, answers: Any) -> bool:
    """Whether the prediction equals one of the golden answers."""
    given = normalize_answer(prediction)
    return any(given == normalize_answer(answer) for answer in golden_answers(answers))


def subem_check(prediction: str, answers: Any) -> bool:
    """Whether one of the golden answers stands in the prediction."""
    given = normalize_answer(prediction)
    # an empty golden answer would stand in every prediction
    return any(answer and answer in given for answer in map(normalize_answer, golden_answers(answers)))


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """``score`` if the last ``<answer>`` is one of the golden answers, ``format_score`` if it is another, else 0.

    Args:
        method: ``strict`` wants all of the answer to be equal, ``subem`` finds the golden answer in it.

    Raises:
        ValueError: unknown method.
    """
    if method not in ("strict", "subem"):
        raise ValueError(f"method={method!r} is not a way to compare answers: use 'strict' or 'subem'.")
    answer = last_tagged(solution_str)
    if answer is None:
        return 0.0
    check = em_check if method == "strict" else subem_check
    return score if check(answer, ground_truth) else format_score
