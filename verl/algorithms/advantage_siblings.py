"""Estimators that judge a response by its score among the other responses to its prompt, all tokens alike.

GRPO and Dr. GRPO, RLOO, and REINFORCE++ with a baseline. Letters as in ``advantage``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.cells import PackedCells
from verl.algorithms.estimating import Groups, outcome_scores, register_adv_est, whiten
from verl.algorithms.registry import About


@register_adv_est(
    "grpo",
    about=[
        About(
            "(s_i - mean_G s) / (std_G s + 1e-6)",
            "the default for verifiable rewards; n >= 4 responses to a prompt, no critic",
            "arXiv:2402.03300",
            "test_advantage.py::test_grpo_by_hand_and_a_response_without_siblings_keeps_its_score",
            options="algorithm.norm_adv_by_std_in_grpo",
        ),
        About(
            "s_i - mean_G s",
            '"Dr. GRPO": does not favour prompts whose responses hardly differ; goes with '
            "`loss_agg_mode=seq-mean-token-sum-norm`",
            "arXiv:2503.20783",
            "test_advantage.py::test_grpo_by_hand_and_a_response_without_siblings_keeps_its_score",
            options="algorithm.norm_adv_by_std_in_grpo",
            setting="algorithm.norm_adv_by_std_in_grpo=False",
        ),
    ],
)
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Judge a response by how far it beats its siblings.

    Response i to prompt g scores s_i = sum_t r_it, and all its tokens share

        A_i = (s_i - mean_g s) / (std_g s + epsilon)

    with the unbiased std. Without ``norm_adv_by_std_in_grpo`` the division is left out (Dr. GRPO, arXiv:2503.20783).
    A response without siblings is compared with zero: A_i = s_i. Equal scores give exactly zero.

    Args:
        token_level_rewards: (B, R) float; zero where ``response_mask`` is.
        response_mask: (B, R); 1 on tokens the policy sampled.
        index: (B,) prompt ids; equal ids are siblings. Order is free.
        config: unused; estimators of verl take it.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a score is NaN or infinite.

    Source: Shao et al. 2024, DeepSeekMath, section 4.1 (arXiv:2402.03300).
    """
    scores, groups = outcome_scores(token_level_rewards), Groups(index, token_level_rewards.device)
    mean = groups.mean(scores)
    advantages = scores - torch.where(groups.is_alone, 0, mean)
    if norm_adv_by_std_in_grpo:
        advantages /= torch.where(groups.is_alone, 1, groups.std(scores, mean)) + epsilon
    advantages = PackedCells(response_mask).spread(advantages.to(token_level_rewards.dtype))
    return advantages, advantages


@register_adv_est(
    "rloo",
    about=About(
        "s_i - mean of the other n - 1 scores",
        "as GRPO without std; unbiased also for small n",
        "arXiv:2402.14740",
        "test_advantage.py::test_rloo_by_hand",
    ),
)
@torch.no_grad()
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

    A response without siblings is compared with zero: A_i = s_i.

    Args:
        token_level_rewards: (B, R) float; zero where ``response_mask`` is.
        response_mask: (B, R); 1 on tokens the policy sampled.
        index: (B,) prompt ids; equal ids are siblings. Order is free.
        epsilon, config: unused; estimators of verl take them.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a score is NaN or infinite.

    Source: Ahmadian et al. 2024, section 3.3 (arXiv:2402.14740).
    """
    scores, groups = outcome_scores(token_level_rewards), Groups(index, token_level_rewards.device)
    n = groups.sizes
    advantages = (scores - groups.mean(scores)) * n / (n - 1).clamp(min=1)
    advantages = torch.where(groups.is_alone, scores, advantages)
    advantages = PackedCells(response_mask).spread(advantages.to(token_level_rewards.dtype))
    return advantages, advantages


@register_adv_est(
    "reinforce_plus_plus_baseline",
    about=About(
        "whiten(s_i - mean_G s) over the batch",
        "groups whose scale differs much; steadier than a per-group std",
        "arXiv:2501.03262",
        "test_advantage.py::test_reinforce_plus_plus_baseline_by_hand",
        options="algorithm.advantage.whiten",
    ),
)
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config: Any = None,
    whiten_advantages: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Judge a response against its siblings' mean, then relative to the whole batch.

        A = whiten(s_i - mean_g s) over all tokens of the batch

    Unlike GRPO a prompt whose responses hardly differ keeps small advantages: the scale is the batch's, not the
    group's. A response without siblings is compared with zero.

    Args:
        token_level_rewards: (B, R) float; zero where ``response_mask`` is.
        response_mask: (B, R); 1 on tokens the policy sampled.
        index: (B,) prompt ids; equal ids are siblings. Order is free.
        epsilon, config: unused; estimators of verl take them.
        whiten_advantages: False leaves A = s_i - mean_g s.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a score is NaN or infinite.

    Source: Hu et al. 2025, REINFORCE++ (arXiv:2501.03262).
    """
    scores, groups = outcome_scores(token_level_rewards), Groups(index, token_level_rewards.device)
    cells = PackedCells(response_mask)
    centred = scores - torch.where(groups.is_alone, 0, groups.mean(scores))
    advantages = cells.repeat(centred.to(token_level_rewards.dtype))
    advantages = cells.unpack(whiten(advantages, cells) if whiten_advantages else advantages)
    return advantages, advantages


# verl has a second, vectorised implementation of these two; here there is one, and it is vectorised
VECTORISED = "test_advantage_anchors.py::test_the_vectorised_names_of_verl_are_the_functions"
register_adv_est(
    "grpo_vectorized",
    about=About(
        "that of `grpo`",
        "never needed: verl's name of a second implementation, and here there is one",
        "arXiv:2402.03300",
        VECTORISED,
    ),
)(compute_grpo_outcome_advantage)
register_adv_est(
    "rloo_vectorized",
    about=About("that of `rloo`", "likewise", "arXiv:2402.14740", VECTORISED),
)(compute_rloo_outcome_advantage)
