"""Knights and knaves: every inhabitant is named rightly (Xie et al. 2025, Logic-RL, arXiv:2502.14768)."""

import re
from collections.abc import Mapping
from typing import Any

from verl.rewards.scorers.matching import after_thinking, last_tagged

_IDENTITY = re.compile(
    r"\b([A-Z][\w'-]{0,40})\W{0,4}\s*(?:is|:|=|was|->|→)\s*(?:an?\s+)?\W{0,4}(knight|knave)\b", re.IGNORECASE
)


def identities(text: str) -> dict[str, str]:
    """Name -> ``knight`` or ``knave``; a name that is called both has none."""
    roles: dict[str, set[str]] = {}
    for name, kind in _IDENTITY.findall(text):
        roles.setdefault(name.lower(), set()).add(kind.lower())
    return {name: kinds.pop() if len(kinds) == 1 else "both" for name, kinds in roles.items()}


def compute_score(
    solution_str: str, ground_truth: Mapping[str, Any] | str, format_score: float = 0.0, score: float = 1.0
) -> float:
    """``score`` if the last ``<answer>`` has every inhabitant right, ``format_score`` if it names them, else 0.

    Args:
        ground_truth: ``{"solution_text_format": "(1) Zoey is a knight\\n..."}``, or that text.
    """
    gold = ground_truth["solution_text_format"] if isinstance(ground_truth, Mapping) else ground_truth
    wanted, answer = identities(str(gold)), last_tagged(after_thinking(solution_str))
    roles = identities(answer) if answer else {}
    if roles == wanted:
        return score
    return format_score if roles.keys() == wanted.keys() else 0.0
