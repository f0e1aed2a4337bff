"""Bounds that the learning tests hold a run to, and the record of a run from which they were chosen.

``scripts/learning_spread.py`` runs these tests for several seeds and instruction sets without their bounds and writes
what they reached to ``tests/learning-spread.json``; ``tests/test_learning_spread.py`` holds the bounds against it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SEED = int(os.environ.get("VERL_TEST_SEED", "0"))
"""Of the weights, the data's order and the sampling of the runs of ``tests.support.runs``."""
RECORD = os.environ.get("VERL_LEARNING_RECORD")
"""File to which scores are appended in place of being judged."""


class Bound(NamedTuple):
    """The mean score that a run starts below, and the one that it ends above."""

    first: float
    last: float


BOUNDS = {
    "grpo": Bound(0.2, 0.85),
    "rloo": Bound(0.2, 0.85),
    "reinforce_plus_plus": Bound(0.2, 0.85),
    "remax": Bound(0.2, 0.85),
    "ppo": Bound(0.2, 0.85),
    "gspo": Bound(0.2, 0.85),
    "cispo": Bound(0.2, 0.85),
    "dapo": Bound(0.2, 0.8),  # of groups that differ: never near 1
    "tis": Bound(0.2, 0.85),
    "kl_cov": Bound(0.2, 0.85),
    "dr_grpo": Bound(0.2, 0.85),
    "optimal_token_baseline": Bound(0.2, 0.85),
    "two ranks on Ray": Bound(0.5, 0.85),
    "megatron": Bound(0.5, 0.75),
    "vllm, async": Bound(0.5, 0.85),
    "sglang, async": Bound(0.5, 0.85),
    "adapter, hf": Bound(0.25, 0.4),  # of 11 runs the worst ends at 0.48, the best at 0.82
    "adapter, vllm": Bound(0.25, 0.4),
    "images, hf": Bound(0.5, 0.85),
    "images, vllm": Bound(0.5, 0.85),
    "reward model": Bound(0.1, 0.15),  # the share of digits among all tokens, the prompt's too: at most 0.2
    "servers": Bound(0.5, 0.85),
    "partial rollouts": Bound(0.5, 0.85),
    "one step off": Bound(0.5, 0.85),
    "0 steps behind": Bound(0.2, 0.9),
    "2 steps behind": Bound(0.2, 0.9),
    "frozen lake, grpo": Bound(0.1, 0.82),  # success; half of the lakes are crossed without reading the map
    "frozen lake, vllm": Bound(0.1, 0.17),  # 20 steps, the beginning of its rise
    "tool": Bound(0.1, 0.85),  # 0.7 is the most without reading the answer
    "simulated user": Bound(0.2, 0.8),  # success; two thirds is the most without reading the answer
}


def check_learned(name: str, scores: Sequence[float], over: tuple[int, int] = (3, 3)) -> None:
    """Hold a run's mean scores to ``BOUNDS[name]``.

    Args:
        scores: of each step.
        over: how many of the first and of the last steps are averaged.
    """
    first, last = sum(scores[: over[0]]) / over[0], sum(scores[-over[1] :]) / over[1]
    if RECORD:
        row = {"run": name, "seed": SEED, "first": round(first, 3), "last": round(last, 3)}
        with Path(RECORD).open("a") as file:
            file.write(json.dumps({**row, "scores": [round(score, 3) for score in scores]}) + "\n")
        return
    bound = BOUNDS[name]
    assert first < bound.first and last > bound.last, f"{name}: from {first:.3f} to {last:.3f}, {bound}"
