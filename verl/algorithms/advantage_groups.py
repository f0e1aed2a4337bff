"""Estimators that compare siblings: the best of a group, a baseline weighted by length, many rewards.

The plainer ones, grpo and rloo, stand in ``advantage_siblings``, baselines token by token in ``advantage_baselines``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.cells import PackedCells
from verl.algorithms.estimating import (
    Groups,
    outcome_scores,
    register_adv_est,
    require_finite,
    whiten,
)
from verl.algorithms.registry import About


@register_adv_est(
    "grpo_passk",
    about=About(
        "for the best of G: (s_i - second best) / (std_G s + 1e-6); for others 0",
        "the best of n counts (pass@k), not the mean; keeps variety",
        "arXiv:2503.19595",
        "test_advantage_groups.py::test_grpo_passk_by_hand_pays_only_the_lead_of_the_best",
        options="algorithm.norm_adv_by_std_in_grpo",
    ),
)
@torch.no_grad()
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
    without siblings is compared with zero: A_i = s_i / (1 + epsilon).

    Args:
        token_level_rewards: (B, R) float; zero where ``response_mask`` is.
        response_mask: (B, R); 1 on tokens the policy sampled.
        index: (B,) prompt ids; equal ids are siblings. Order is free.
        config: unused; estimators of verl take it.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a score is NaN or infinite.

    Source: Tang et al. 2025, Inference time objectives, section 3 (arXiv:2503.19595).
    """
    scores, groups = outcome_scores(token_level_rewards), Groups(index, token_level_rewards.device)
    ranked = torch.argsort(scores, descending=True, stable=True)
    ranked = ranked[torch.argsort(groups.group[ranked], stable=True)]
    group = groups.group[ranked]
    is_best = torch.ones_like(group, dtype=torch.bool)
    is_best[1:] = group[1:] != group[:-1]
    best = ranked[is_best]
    second = ranked[(is_best.nonzero().squeeze(-1) + 1).clamp(max=len(ranked) - 1)]
    runner_up = torch.where(groups.is_alone[best], 0, scores[second])
    advantages = torch.zeros_like(scores)
    advantages[best] = scores[best] - runner_up
    if norm_adv_by_std_in_grpo:
        advantages /= torch.where(groups.is_alone, 1, groups.std(scores, groups.mean(scores))) + epsilon
    advantages = PackedCells(response_mask).spread(advantages.to(token_level_rewards.dtype))
    return advantages, advantages


@register_adv_est(
    "opo",
    about=About(
        "s_i - (sum_G |y_j| s_j) / (sum_G |y_j|)",
        "lengths differ much; one exactly on-policy step a batch",
        "arXiv:2505.23585",
        "test_advantage_groups.py::test_opo_by_hand_weighs_the_baseline_by_length",
    ),
)
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Judge a response against its siblings' mean weighted by length, the baseline of least variance on-policy.

    A longer response has a larger gradient (about |y_j| times that of a token), and so more say in the baseline:

        A_i = s_i - (sum_(j in G_i) |y_j| s_j) / (sum_(j in G_i) |y_j|)

    A response without siblings is compared with zero: A_i = s_i. Assumes one exactly on-policy step per batch.

    Args:
        token_level_rewards: (B, R) float; zero where ``response_mask`` is.
        response_mask: (B, R); 1 on tokens the policy sampled; |y_j| counts them.
        index: (B,) prompt ids; equal ids are siblings. Order is free.
        epsilon, config: unused; estimators of verl take them.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a score is NaN or infinite.

    Source: Hao et al. 2025, On-Policy RL with Optimal reward baseline, equation 8 (arXiv:2505.23585).
    """
    scores, groups = outcome_scores(token_level_rewards), Groups(index, token_level_rewards.device)
    cells = PackedCells(response_mask)
    lengths = cells.lengths.to(scores)
    baseline = groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1)
    advantages = scores - torch.where(groups.is_alone, 0, baseline)
    advantages = cells.spread(advantages.to(token_level_rewards.dtype))
    return advantages, advantages


@register_adv_est(
    "gpg",
    about=About(
        "(s_i - mean_G s) B / (responses where that is not 0)",
        "many groups all right or all wrong; goes with `loss_mode=gpg`",
        "arXiv:2504.02546",
        "test_advantage_groups.py::test_gpg_by_hand_scales_by_the_share_of_responses_that_teach",
    ),
)
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Judge a response against its siblings' mean, scaled up by how few responses of the batch teach anything.

        A_i = alpha (s_i - mean_g s) / f_norm,      alpha = B / (responses whose s_i - mean_g s is not 0)

    Groups all right or all wrong have no gradient; alpha keeps the size of the step as if they had been left out.
    A response without siblings is compared with zero. Goes with ``policy_loss.loss_mode=gpg``.

    verl counts non-zero *scores* instead, so that its alpha depends on where zero lies on the reward's scale.

    Args:
        token_level_rewards: (B, R) float; zero where ``response_mask`` is.
        response_mask: (B, R); 1 on tokens the policy sampled.
        index: (B,) prompt ids; equal ids are siblings. Order is free.
        f_norm: a constant divisor.
        epsilon, config: unused; estimators of verl take them.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a score is NaN or infinite.

    Source: Chu et al. 2025, Group Policy Gradient, equation 7 (arXiv:2504.02546).
    """
    scores, groups = outcome_scores(token_level_rewards), Groups(index, token_level_rewards.device)
    cells = PackedCells(response_mask)
    centred = scores - torch.where(groups.is_alone, 0, groups.mean(scores))
    has_tokens = cells.lengths > 0
    alpha = has_tokens.sum() / (has_tokens & (centred != 0)).sum().clamp(min=1)
    advantages = cells.spread((alpha * centred / f_norm).to(token_level_rewards.dtype))
    return advantages, advantages


@register_adv_est(
    "gdpo",
    about=About(
        "whiten(sum_k w_k (s_ik - mean_G s_k) / (std_G s_k + 1e-6))",
        "several rewards of different scale",
        "arXiv:2601.05242",
        "test_advantage_groups.py::test_gdpo_by_hand_normalises_each_reward_before_the_sum",
        options="algorithm.gdpo_reward_keys algorithm.gdpo_reward_weights algorithm.advantage.whiten",
    ),
)
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    non_tensor_batch: Mapping[str, Any],
    epsilon: float = 1e-6,
    config: Any = None,
    whiten_advantages: bool = True,
) -> tuple[Tensor, Tensor]:
    """Judge a response by each of several rewards against its siblings, then add up: no reward drowns the others.

    With rewards k of weight w_k, each normalised within its group before the sum,

        A = whiten( sum_k w_k (s_ik - mean_g s_k) / (std_g s_k + epsilon) ) over all tokens of the batch

    A response without siblings is compared with zero, at a std of 1.

    Args:
        token_level_rewards: (B, R) float; not read beyond its dtype and that it is finite: the rewards are the columns
            named below, so a KL penalty in the reward has no effect here.
        response_mask: (B, R); 1 on tokens the policy sampled.
        index: (B,) prompt ids; equal ids are siblings. Order is free.
        non_tensor_batch: holds (B,) numbers under each of the keys, as a reward function's dict of extras leaves them.
        config: the ``algorithm`` section, read for ``gdpo_reward_keys`` and ``gdpo_reward_weights`` (null: all 1).
        whiten_advantages: False leaves the sum as it is.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a reward is NaN or infinite.
        ValueError: no keys, a key without column, or not one weight a key.

    Source: Liu et al. 2026, GDPO (arXiv:2601.05242).
    """
    outcome_scores(token_level_rewards)
    keys, weights = _rewards_to_combine(config)
    groups, cells = Groups(index, token_level_rewards.device), PackedCells(response_mask)
    combined = torch.zeros(len(response_mask), dtype=torch.float64, device=token_level_rewards.device)
    for key, weight in zip(keys, weights, strict=True):
        if key not in non_tensor_batch:
            raise ValueError(
                f"algorithm.gdpo_reward_keys names {key!r}, which this batch does not have; it has "
                f"{', '.join(sorted(non_tensor_batch)) or 'nothing'}. Return it from the reward function, "
                f"beside the score: {{'score': ..., {key!r}: ...}}."
            )
        scores = torch.tensor([float(x) for x in non_tensor_batch[key]], dtype=torch.float64, device=combined.device)
        require_finite(f"reward {key!r}", scores)
        mean = groups.mean(scores)
        std = torch.where(groups.is_alone, 1, groups.std(scores, mean))
        combined += weight * (scores - torch.where(groups.is_alone, 0, mean)) / (std + epsilon)
    advantages = cells.repeat(combined.to(token_level_rewards.dtype))
    advantages = cells.unpack(whiten(advantages, cells) if whiten_advantages else advantages)
    return advantages, advantages


def _rewards_to_combine(config: Any) -> tuple[list[str], list[float]]:
    read = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
    keys = list(read("gdpo_reward_keys") or ())
    weights = [float(x) for x in read("gdpo_reward_weights") or [1.0] * len(keys)]
    if not keys:
        raise ValueError(
            "algorithm.gdpo_reward_keys is empty: gdpo combines rewards it finds by name. "
            "List the names your reward function returns beside 'score', for example [accuracy,format]."
        )
    if len(weights) != len(keys):
        raise ValueError(
            f"algorithm.gdpo_reward_weights={weights} has {len(weights)} numbers for {len(keys)} "
            f"algorithm.gdpo_reward_keys={keys}. Give one weight a key, or null for equal ones."
        )
    return keys, weights
