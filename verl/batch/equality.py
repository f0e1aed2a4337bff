"""Equality in value of two columns or entries of ``meta_info``, and their first difference."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from verl.batch.ragged import Ragged


def first_difference(a, b) -> str | None:
    """Return a text on how ``a`` and ``b`` differ, with the first row; None if they are equal.

    A packed and a padded column are compared on the valid tokens of the packed one.
    """
    if isinstance(a, Ragged) != isinstance(b, Ragged) and a.shape == b.shape:
        layout = a.layout if isinstance(a, Ragged) else b.layout
        a, b = (column if isinstance(column, Ragged) else Ragged.from_padded(column, layout) for column in (a, b))
    if is_same(a, b):
        return None
    if not (getattr(a, "shape", ()) and getattr(b, "shape", ())):
        return f"{_short(a)} and {_short(b)}"
    kinds = [(c.values.dtype if isinstance(c, Ragged) else c.dtype, tuple(c.shape)) for c in (a, b)]
    if kinds[0] != kinds[1]:
        return " and ".join(f"{dtype} {shape}" for dtype, shape in kinds)
    rows = (column.rows() if isinstance(column, Ragged) else column for column in (a, b))
    for i, (x, y) in enumerate(zip(*rows, strict=True)):
        if not is_same(x, y):
            return f"first at row {i}, {_short(x)} and {_short(y)}"
    return "equal rows, but at other positions of the window"


def is_same(a, b) -> bool:
    """Equal in value. In arrays and nested objects NaN equals NaN; in tensors it does not, as in ``torch.equal``."""
    if a is b:
        return True
    if isinstance(a, Ragged) and isinstance(b, Ragged):
        return a.layout == b.layout and is_same(a.values, b.values)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.dtype == object or b.dtype == object:
            return a.shape == b.shape and all(map(is_same, a.flat, b.flat))
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc")
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_same, a, b))
    return bool(np.all(a == b)) or (isinstance(a, float | np.floating) and bool(a != a and b != b))


def _short(value) -> str:
    text = repr(value.tolist() if isinstance(value, Tensor | np.ndarray) else value)
    return text if len(text) <= 80 else text[:77] + "..."
