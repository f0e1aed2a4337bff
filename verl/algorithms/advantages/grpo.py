"""GRPO and Dr. GRPO: the score relative to the group of responses to the same prompt."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages.common import Groups, for_each_token, outcome_scores, register_adv_est
from verl.algorithms.registry import About, takes_ragged


@register_adv_est(
    "grpo",
    about=[
        About(
            "(s_i - mean_G s) / (std_G s + 1e-6)",
            "the default for verifiable rewards; n >= 4 responses to a prompt, no critic",
            "arXiv:2402.03300",
            "algorithms/advantages/test_grpo.py::test_grpo_by_hand_and_a_response_alone_keeps_its_score",
            options="algorithm.norm_adv_by_std_in_grpo",
        ),
        About(
            "s_i - mean_G s",
            '"Dr. GRPO": does not favour prompts whose responses hardly differ; goes with '
            "`loss_agg_mode=seq-mean-token-sum-norm`",
            "arXiv:2503.20783",
            "algorithms/advantages/test_grpo.py::test_grpo_by_hand_and_a_response_alone_keeps_its_score",
            options="algorithm.norm_adv_by_std_in_grpo",
            setting="algorithm.norm_adv_by_std_in_grpo=False",
        ),
    ],
)
@takes_ragged
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Judge a response by how far it beats the mean of its group.

    Response i to prompt g scores s_i = sum_t r_it, and all its tokens share

        A_i = (s_i - mean_g s) / (std_g s + epsilon)

    with the unbiased std. Without ``norm_adv_by_std_in_grpo`` the division is left out (Dr. GRPO, arXiv:2503.20783).
    A response alone in its group is compared with zero: A_i = s_i. Equal scores give exactly zero.

    Args:
        token_level_rewards: (B, R) float; zero where ``response_mask`` is.
        response_mask: (B, R); 1 on tokens the policy sampled.
        index: (B,) prompt ids; equal ids are one group. Order is free.
        config: unused; estimators of verl take it.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a score is NaN or infinite.

    Source: Shao et al. 2024, DeepSeekMath, section 4.1 (arXiv:2402.03300).
    """
    scores, groups = outcome_scores(token_level_rewards), Groups(index, token_level_rewards.device)
    advantages = groups.centred(scores)
    if norm_adv_by_std_in_grpo:
        # in place: `centred` returned a tensor of its own
        advantages /= groups.scale(scores) + epsilon
    return for_each_token(advantages, token_level_rewards, response_mask)


# verl has a second, vectorised implementation; here there is one, and it is vectorised
register_adv_est(
    "grpo_vectorized",
    about=About(
        "that of `grpo`",
        "never needed: verl's name of a second implementation, and here there is one",
        "arXiv:2402.03300",
        "algorithms/advantages/test_grpo.py::test_vectorized_names_are_the_same_functions",
    ),
)(compute_grpo_outcome_advantage)
