"""From the lists of numbers a step collects to one number a metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """One number for each name: the largest for names with ``max``, the least for ``min``, else the mean.

    The rule looks at the last part of the name (``actor/kl_max``, ``response_length/min``), not at the whole path, so
    ``minmax_diff`` is averaged.

    Args:
        metrics: name -> number, or a list of numbers (Python, numpy or torch scalars).

    Raises:
        ValueError: a metric has no values, or a value is not a number.
    """
    return {name: _reduce(name, values) for name, values in metrics.items()}


def _reduce(name: str, values: Any) -> float:
    try:
        numbers = np.asarray([float(value) for value in _as_list(values)], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {name!r}={values!r} cannot be reduced: give a number or a list of numbers") from error
    if numbers.size == 0:
        raise ValueError(f"metric {name!r} has no values: leave it out, or give it at least one number")
    words = name.rsplit("/", 1)[-1].split("_")
    if "max" in words:
        return float(numbers.max())
    if "min" in words:
        return float(numbers.min())
    return float(numbers.mean())


def _as_list(values: Any) -> list:
    if isinstance(values, (list, tuple)):
        return list(values)
    if hasattr(values, "tolist"):  # numpy and torch, any number of dimensions
        flat = values.reshape(-1).tolist()
        return flat
    return [values]
