"""How much a response counts in the policy loss, by its difficulty and its length.

Knows one number a response; the engine brings those of all ranks of a mini-batch together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.controls import CONTROLS
from verl.algorithms.registry import About


@CONTROLS.register(
    "actor.length_loss_weight",
    about=About(
        "w_i = 3/2 - (T_i - T_min) / (T_max - T_min), over the mean of w",
        "shorter responses",
        "[ROLL](https://github.com/alibaba/ROLL)",
        "test_response_weights.py::test_weights_by_hand",
        options="actor.length_loss_weight",
    ),
)
@CONTROLS.register(
    "actor.difficulty_loss_weight",
    about=About(
        "w_i = 1/2 + 3/2 clip(d_i, 0, 1), over the mean of w",
        "data with a difficulty a row: the hard ones count more",
        "[ROLL](https://github.com/alibaba/ROLL)",
        "test_response_weights.py::test_weights_by_hand",
        options="actor.difficulty_loss_weight",
    ),
)
def response_weights(lengths: Tensor, difficulty: Tensor | None = None, by_length: bool = False) -> Tensor:
    """Weigh hard prompts and short responses up, the mean over a mini-batch staying 1:

        w_i = (1/2 + 3/2 clip(d_i, 0, 1)) (3/2 - (T_i - T_min) / (T_max - T_min)),      divided by the mean of w

    The first factor needs ``difficulty``, the second ``by_length``; it is the same for all where lengths are equal.
    A response without a token is none: it is in no minimum, maximum or mean, and weighs 0.

    Args:
        lengths: (B,) tokens of each response of the whole mini-batch.
        difficulty: (B,) float; 0 is easy, 1 is hard.

    Returns:
        (B,) float32.

    Source: ``difficulty_loss_weight`` and ``length_loss_weight`` of ROLL, which compares within a micro-batch.
    """
    is_response = lengths > 0
    weights = is_response.float()
    if not is_response.any():
        return weights
    if difficulty is not None:
        weights = weights * (0.5 + 1.5 * difficulty.float().clamp(0, 1))
    if by_length:
        own = lengths[is_response].float()
        span = (own.max() - own.min()).clamp(min=1)
        weights = weights * (1.5 - (lengths.float() - own.min()) / span)
    return torch.where(is_response, weights / weights[is_response].mean(), 0)
