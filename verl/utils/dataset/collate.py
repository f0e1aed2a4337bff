"""Rows of a data set to the columns of one batch. Knows neither prompts nor files."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor | np.ndarray]:
    """Rows to one batch: tensors are stacked, everything else becomes a one-dimensional object array.

    A non-tensor that some rows lack is ``None`` there (files of one dataset need not agree on their columns).
    """
    names = dict.fromkeys(name for row in data_list for name in row)
    batch: dict[str, torch.Tensor | np.ndarray] = {}
    for name in names:
        values = [row.get(name) for row in data_list]
        if isinstance(values[0], torch.Tensor):
            batch[name] = torch.stack(values)
        else:
            batch[name] = np.fromiter(values, dtype=object, count=len(values))  # np.array would stack equal lengths
    return batch
