"""OPO: the group's mean weighted by response length as the baseline."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages.common import Groups, builtin_estimator, for_each_token, outcome_scores
from verl.algorithms.valid_tokens import token_counts


@builtin_estimator(
    "opo",
    "s_i - (sum_G |y_j| s_j) / (sum_G |y_j|)",
    "lengths differ much; one exactly on-policy step a batch",
    "arXiv:2505.23585",
    "algorithms/advantages/test_opo.py::test_opo_by_hand_weighs_the_baseline_by_length",
    ragged=True,
)
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Judge a response against its group's mean weighted by length, the baseline of least variance on-policy.

    A longer response has a larger gradient (about |y_j| times that of a token), and so more say in the baseline:

        A_i = s_i - (sum_(j in G_i) |y_j| s_j) / (sum_(j in G_i) |y_j|)

    A response alone in its group is compared with zero: A_i = s_i. Assumes one exactly on-policy step per batch.

    Args:
        token_level_rewards: (B, R) float; zero where ``response_mask`` is.
        response_mask: (B, R); 1 on tokens the policy sampled; |y_j| counts them.
        index: (B,) prompt ids; equal ids are one group. Order is free.
        epsilon, config: unused; estimators of verl take them.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a score is NaN or infinite.

    Source: Hao et al. 2025, On-Policy RL with Optimal reward baseline, equation 8 (arXiv:2505.23585).
    """
    scores, groups = outcome_scores(token_level_rewards), Groups(index, token_level_rewards.device)
    lengths = token_counts(response_mask).to(scores)
    # a group may have no token at all, where every response was masked
    baseline = groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1)
    advantages = scores - torch.where(groups.is_alone, 0, baseline)
    return for_each_token(advantages, token_level_rewards, response_mask)
