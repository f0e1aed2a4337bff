"""SPPO: how often a response is preferred to the others of its group."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages.common import Groups, builtin_estimator, for_each_token, outcome_scores


@builtin_estimator(
    "sppo",
    "share of the other n - 1 responses that score less, ties by half, less 1/2",
    "with `loss_mode=sppo`; rewards that tell which is better, not by how much",
    "arXiv:2405.00675",
    "algorithms/advantages/test_every_estimator.py::test_by_hand_in_a_batch_and_alone",
    ragged=True,
)
def compute_sppo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Estimate the probability that a response is preferred to another of the policy's, less one half.

    With s_i the scores of a group of n responses,

        A_i = (number of j with s_j < s_i + 1/2 number of j != i with s_j = s_i) / (n - 1) - 1/2,    in [-1/2, 1/2]

    A response alone in its group is compared with none: A_i = 0. A monotone change of the rewards changes nothing.

    Args:
        token_level_rewards: (B, R) float; zero where ``response_mask`` is.
        response_mask: (B, R); 1 on tokens the policy sampled.
        index: (B,) prompt ids; equal ids are one group. Order is free.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a score is NaN or infinite.

    Source: Wu et al. 2024, section 4.2 (arXiv:2405.00675), whose preferences come from a model of pairs.
    """
    scores, groups = outcome_scores(token_level_rewards), Groups(index, token_level_rewards.device)
    # group and rank of the score in one number: its place among the sorted ones counts the worse of the group
    _, ranks = scores.unique(return_inverse=True)
    keys = groups.group * (len(scores) + 1) + ranks
    ordered = keys.sort().values
    start = torch.searchsorted(ordered, groups.group * (len(scores) + 1))
    worse = torch.searchsorted(ordered, keys) - start
    better = groups.sizes - (torch.searchsorted(ordered, keys, right=True) - start)
    advantages = (worse - better).double() / (2 * (groups.sizes - 1).clamp(min=1))
    return for_each_token(advantages, token_level_rewards, response_mask)
