"""Weighted means of a loss's metrics over micro-batches and ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.utils.distributed import all_gather_objects
from verl.workers.engine.topology import Topology


class WeightedMeans:
    """Means over micro-batches and ranks, fetched from the device once, after the step."""

    def __init__(self) -> None:
        self._parts: list[tuple[float, dict[str, Any]]] = []

    def add(self, metrics: dict[str, Any], share: float) -> None:
        """Count ``metrics`` with weight ``share``; weights are compared among equal names only."""
        kept = {name: value.detach() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        if kept:
            self._parts.append((share, kept))

    def reduce(self, topology: Topology) -> dict[str, float]:
        """Return the means over all ranks; a rank without valid tokens contributes nothing."""
        fetched = iter(to_floats([value for _, kept in self._parts for value in kept.values()]))
        parts = [(share, {name: next(fetched) for name in kept}) for share, kept in self._parts]
        if topology.dp_size > 1:
            parts = [part for rank in all_gather_objects(parts, topology.dp_group) for part in rank]
        sums: dict[str, float] = {}
        shares: dict[str, float] = {}
        for share, metrics in parts:
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + share * value
                shares[name] = shares.get(name, 0.0) + share
        return {name: sums[name] / shares[name] for name in sums}


def to_floats(values: list[Any]) -> list[float]:
    """Convert numbers and scalar tensors to floats; those on a device are fetched in one transfer."""
    away = [isinstance(value, Tensor) and value.device.type != "cpu" for value in values]
    scalars = [value.detach().double().reshape(()) for value, is_away in zip(values, away, strict=True) if is_away]
    fetched = iter(torch.stack(scalars).tolist() if scalars else ())
    return [next(fetched) if is_away else float(value) for value, is_away in zip(values, away, strict=True)]
