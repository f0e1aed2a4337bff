"""Built-in rule-based scorers: text in, number out. No torch, no tokenizer.

A scorer is chosen by the row's ``data_source``. Anything else is scored by the function the user names with
``custom_reward_function.path``.
"""

from collections.abc import Callable
from typing import Any

from verl.utils.py_functional import nearest_name
from verl.utils.reward_score import arithmetic, brightness, digits, gsm8k

__all__ = ["default_compute_score", "known_data_sources"]

_SCORERS: dict[str, Callable[[str, Any], float | dict]] = {
    "openai/gsm8k": gsm8k.compute_score,
    "digit_add": arithmetic.compute_score,
    "arithmetic/add1": arithmetic.compute_score,
    "arithmetic/mul1": arithmetic.compute_score,
    "arithmetic/max3": arithmetic.compute_score,
    "arithmetic/even": arithmetic.compute_score,
    "brightness": brightness.compute_score,
    "digits": digits.compute_score,
}


def known_data_sources() -> list[str]:
    """The data sources that have a built-in scorer."""
    return list(_SCORERS)


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> float | dict:
    """Score a response with the built-in rule of its data source.

    Args:
        data_source: name of the dataset, as in the row's ``data_source``.
        solution_str: the decoded response.
        ground_truth: ``reward_model.ground_truth`` of the row.
        sandbox_fusion_url, concurrent_semaphore, memory_limit_mb: for scorers that run code; none of these does.

    Raises:
        NotImplementedError: the data source has no built-in scorer.
    """
    scorer = _SCORERS.get(data_source)
    if scorer is None:
        raise NotImplementedError(
            f"data_source={data_source!r} has no built-in scorer; known are {', '.join(_SCORERS)}."
            f"{nearest_name(data_source, _SCORERS)} Name a function of your own with custom_reward_function.path."
        )
    return scorer(solution_str, ground_truth)
