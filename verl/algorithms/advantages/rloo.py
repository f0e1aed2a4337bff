"""RLOO: the leave-one-out mean of the group as the baseline."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages.common import (
    Groups,
    builtin_estimator,
    for_each_token,
    outcome_scores,
    register_adv_est,
)
from verl.algorithms.registry import About


@builtin_estimator(
    "rloo",
    "s_i - mean of the other n - 1 scores",
    "as GRPO without std; unbiased also for small n",
    "arXiv:2402.14740",
    "algorithms/advantages/test_rloo.py::test_rloo_by_hand",
    ragged=True,
)
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Judge a response by the mean of the *other* responses to its prompt, an unbiased baseline.

    With n = |G_i|,

        A_i = s_i - (sum_(j in G_i, j != i) s_j) / (n - 1) = (s_i - mean_g s) * n / (n - 1)

    A response alone in its group is compared with zero: A_i = s_i.

    Args:
        token_level_rewards: (B, R) float; zero where ``response_mask`` is.
        response_mask: (B, R); 1 on tokens the policy sampled.
        index: (B,) prompt ids; equal ids are one group. Order is free.
        epsilon, config: unused; estimators of verl take them.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a score is NaN or infinite.

    Source: Ahmadian et al. 2024, section 3.3 (arXiv:2402.14740).
    """
    scores, groups = outcome_scores(token_level_rewards), Groups(index, token_level_rewards.device)
    n = groups.sizes
    # the mean without oneself, from the mean with oneself: no second sum over the group
    advantages = (scores - groups.mean(scores)) * n / (n - 1).clamp(min=1)
    advantages = torch.where(groups.is_alone, scores, advantages)
    return for_each_token(advantages, token_level_rewards, response_mask)


# verl has a second, vectorised implementation; here there is one, and it is vectorised
register_adv_est(
    "rloo_vectorized",
    about=About(
        "that of `rloo`",
        "likewise",
        "arXiv:2402.14740",
        "algorithms/advantages/test_grpo.py::test_vectorized_names_are_the_same_functions",
    ),
)(compute_rloo_outcome_advantage)
