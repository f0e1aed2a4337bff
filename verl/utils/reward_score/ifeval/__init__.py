"""IFEval: instructions that can be checked by rule (Zhou et al. 2023, arXiv:2311.07911)."""

import json
from collections.abc import Mapping
from typing import Any

from verl.utils.py_functional import nearest_name
from verl.utils.reward_score.ifeval.checks import CHECKS


def compute_score(
    solution_str: str, ground_truth: str | Mapping[str, Any], continuous: bool = False
) -> dict[str, float | bool]:
    """1.0 if a response follows all its instructions, else 0.0. An empty response follows none.

    Args:
        ground_truth: ``{"instruction_id_list": [...], "kwargs": [{...}, ...]}``, as JSON or dict.
        continuous: the score is the share of instructions that are followed.

    Returns:
        ``score``, ``acc`` (whether all are followed) and ``instruction_acc`` (the share that is).

    Raises:
        ValueError: an instruction is not known.
    """
    gold = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    names, kwargs = list(gold["instruction_id_list"]), list(gold["kwargs"])
    followed = [follows(solution_str, name, some) for name, some in zip(names, kwargs, strict=True)]
    share = sum(followed) / len(followed)
    return {"score": share if continuous else float(all(followed)), "acc": all(followed), "instruction_acc": share}


def follows(response: str, instruction: str, kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether a response follows one instruction, e.g. ``punctuation:no_comma``."""
    check = CHECKS.get(instruction)
    if check is None:
        raise ValueError(
            f"instruction_id={instruction!r} is not known.{nearest_name(instruction, CHECKS)} "
            f"Known are {', '.join(CHECKS)}."
        )
    given = {name: value for name, value in (kwargs or {}).items() if value is not None}
    return bool(response.strip()) and check(response, **given)
