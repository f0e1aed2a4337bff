"""GPG: the group's mean as the baseline, scaled by the share of responses with a gradient."""

from typing import Any

import numpy as np
from torch import Tensor

from verl.algorithms.advantages.common import Groups, builtin_estimator, for_each_token, outcome_scores
from verl.algorithms.valid_tokens import token_counts


@builtin_estimator(
    "gpg",
    "(s_i - mean_G s) B / (responses where that is not 0)",
    "many groups all right or all wrong; goes with `loss_mode=gpg`",
    "arXiv:2504.02546",
    "algorithms/advantages/test_gpg.py::test_gpg_by_hand_scales_by_the_share_of_responses_that_teach",
    ragged=True,
)
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Judge a response against its group's mean, scaled up by how few responses of the batch teach anything.

        A_i = alpha (s_i - mean_g s) / f_norm,      alpha = B / (responses whose s_i - mean_g s is not 0)

    Groups all right or all wrong have no gradient; alpha keeps the size of the step as if they had been left out.
    A response alone in its group is compared with zero. Goes with ``policy_loss.loss_mode=gpg``.

    verl counts non-zero *scores* instead, so that its alpha depends on where zero lies on the reward's scale.

    Args:
        token_level_rewards: (B, R) float; zero where ``response_mask`` is.
        response_mask: (B, R); 1 on tokens the policy sampled.
        index: (B,) prompt ids; equal ids are one group. Order is free.
        f_norm: a constant divisor.
        epsilon, config: unused; estimators of verl take them.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a score is NaN or infinite.

    Source: Chu et al. 2025, Group Policy Gradient, equation 7 (arXiv:2504.02546).
    """
    scores, groups = outcome_scores(token_level_rewards), Groups(index, token_level_rewards.device)
    centred = groups.centred(scores)
    has_tokens = token_counts(response_mask) != 0
    # of centred scores: counting scores that are not 0 would make alpha depend on where a reward's scale has its zero
    alpha = has_tokens.sum() / (has_tokens & (centred != 0)).sum().clamp(min=1)
    return for_each_token(alpha * centred / f_norm, token_level_rewards, response_mask)
