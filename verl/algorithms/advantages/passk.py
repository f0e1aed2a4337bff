"""Pass@k training: only the best response of a group is rewarded."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages.common import Groups, builtin_estimator, for_each_token, outcome_scores


@builtin_estimator(
    "grpo_passk",
    "for the best of G: (s_i - second best) / (std_G s + 1e-6); for others 0",
    "the best of n counts (pass@k), not the mean; keeps variety",
    "arXiv:2503.19595",
    "algorithms/advantages/test_passk.py::test_grpo_passk_by_hand_pays_only_the_lead_of_the_best",
    options="algorithm.norm_adv_by_std_in_grpo",
    ragged=True,
)
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Reward only the best of a group, by its lead over the second best: the objective is the best of n, not the mean.

        A_i = (s_i - second best of G) / (std_g s + epsilon)   for the best response i of G, and 0 for all others

    Without ``norm_adv_by_std_in_grpo`` the division is left out. A tie for the best gives zero to all. A response
    alone in its group is compared with zero: A_i = s_i / (1 + epsilon).

    Args:
        token_level_rewards: (B, R) float; zero where ``response_mask`` is.
        response_mask: (B, R); 1 on tokens the policy sampled.
        index: (B,) prompt ids; equal ids are one group. Order is free.
        config: unused; estimators of verl take it.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a score is NaN or infinite.

    Source: Tang et al. 2025, Inference time objectives, section 3 (arXiv:2503.19595).
    """
    scores, groups = outcome_scores(token_level_rewards), Groups(index, token_level_rewards.device)
    # sorted by score and then, keeping that order, by group: the best of each group stands first, the next behind it
    ranked = torch.argsort(scores, descending=True, stable=True)
    ranked = ranked[torch.argsort(groups.group[ranked], stable=True)]
    group = groups.group[ranked]
    is_best = torch.ones_like(group, dtype=torch.bool)
    is_best[1:] = group[1:] != group[:-1]
    best = ranked[is_best]
    second = ranked[(is_best.nonzero().squeeze(-1) + 1).clamp(max=len(ranked) - 1)]
    # of a group of one the next row is another group's, or past the end: compared with 0 instead
    runner_up = torch.where(groups.is_alone[best], 0, scores[second])
    advantages = torch.zeros_like(scores)
    advantages[best] = scores[best] - runner_up
    if norm_adv_by_std_in_grpo:
        advantages /= groups.scale(scores) + epsilon
    return for_each_token(advantages, token_level_rewards, response_mask)
