"""Learning-rate curves: functions of the step that give the share of the peak rate. No torch, no configuration.

All rise linearly over ``warmup`` steps, n of which run at n / warmup: the first does not move the weights. Those that
fall end at ``low`` on step ``total`` and start their warm-up from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Curve = Callable[[int], float]

DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "exponential": lambda x: 2 * 0.5**x - 1,
    "minus_sqrt": lambda x: 1 - math.sqrt(x),
}
"""Ways from 1 to 0 as x goes from 0 to 1. ``minus_sqrt`` is that of Hagele et al. 2024 (arXiv:2405.18392)."""


def constant_with_warmup(warmup: int) -> Curve:
    """Stay at the peak."""
    return lambda step: min(1.0, step / warmup) if warmup else 1.0


def cosine_with_warmup(warmup: int, total: int, low: float = 0.0, cycles: float = 0.5) -> Curve:
    """Fall from 1 to ``low`` along ``cycles`` waves of a cosine.

    Step n, with x = (n - warmup) / (total - warmup), runs at low + (1 - low) (1 + cos(2 pi cycles x)) / 2.

    Source: Loshchilov & Hutter 2017, SGDR (arXiv:1608.03983).
    """
    return _fall(warmup, warmup, total, low, lambda x: (1 + math.cos(2 * math.pi * cycles * x)) / 2)


def linear_with_warmup(warmup: int, total: int, low: float = 0.0) -> Curve:
    """Fall from 1 to ``low`` by the same amount each step."""
    return _fall(warmup, warmup, total, low, DECAYS["linear"])


def wsd(warmup: int, total: int, low: float = 0.0, decay_steps: int | None = None, style: str = "cosine") -> Curve:
    """Warmup-stable-decay: stay at the peak and fall only over the last steps.

    Args:
        decay_steps: how many; None: a tenth of those after the warm-up, rounded up.
        style: a name of ``DECAYS``.

    Source: Hu et al. 2024, MiniCPM (arXiv:2404.06395).
    """
    after = max(0, total - warmup)
    falling = math.ceil(after / 10) if decay_steps is None else min(decay_steps, after)
    return _fall(warmup, total - falling, total, low, DECAYS[style])


def _fall(warmup: int, start: int, total: int, low: float, decay: Callable[[float], float]) -> Curve:
    """From ``low`` to 1 over the warm-up, 1 until ``start``, then down along ``decay`` to ``low`` at ``total``."""

    def factor(step: int) -> float:
        if step < warmup:
            return low + (1 - low) * step / warmup
        x = min(1.0, max(0, step - start) / max(1, total - start))
        return low + (1 - low) * decay(x)

    return factor
