"""How much better a token was than expected: one function per estimator, chosen by ``algorithm.adv_estimator``.

Every estimator takes (B, R) tensors and a mask and gives ``advantages, returns``, both (B, R) and zero where masked.
It is called with those arguments it names; a new one is a function with ``@register_adv_est("name")`` on it.
Nothing here is differentiated, and padding costs nothing (see ``cells``).

Letters: B responses, R response width, s_i = sum_t r_it the score of response i, G_i the responses to its prompt.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from verl.algorithms import (  # noqa: F401 - they register theirs
    advantage_anchors,
    advantage_baselines,
    advantage_groups,
    advantage_turns,
)
from verl.algorithms.advantage_siblings import (
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from verl.algorithms.cells import PackedCells
from verl.algorithms.estimating import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageFn,
    NonFiniteError,
    get_adv_estimator_fn,
    pack_finite,
    register_adv_est,
    require_finite,
    whiten,
)
from verl.algorithms.registry import About

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "AdvantageEstimator",
    "AdvantageFn",
    "NonFiniteError",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "get_adv_estimator_fn",
    "register_adv_est",
]


class AdvantageEstimator(str, Enum):
    """The built-in names. Your own needs no entry here: any registered string will do."""

    GAE = "gae"
    GRPO = "grpo"
    RLOO = "rloo"
    REMAX = "remax"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REINFORCE = "reinforce"
    STEP_REINFORCE = "step_reinforce"
    AGENTIC_REINFORCE = "agentic_reinforce"
    GIGPO = "gigpo"
    GRPO_PASSK = "grpo_passk"
    OPO = "opo"
    GPG = "gpg"
    GDPO = "gdpo"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    GRPO_VECTORIZED = "grpo_vectorized"
    RLOO_VECTORIZED = "rloo_vectorized"


@register_adv_est(
    AdvantageEstimator.GAE,
    about=About(
        "whiten(sum_k (gamma lam)^k delta_(t+k)), delta_t = r_t + gamma V_(t+1) - V_t",
        "PPO proper: dense rewards, long responses; trains a critic beside the policy",
        "arXiv:1506.02438",
        "test_advantage.py::test_gae_of_a_batch_with_a_hole_by_hand",
        options="algorithm.gamma algorithm.lam algorithm.advantage.whiten",
    ),
)
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
    whiten_advantages: bool = True,
) -> tuple[Tensor, Tensor]:
    """Judge a token by the discounted sum of the surprises that follow it.

    With V the critic's value before each token and delta_t = r_t + gamma V_(t+1) - V_t the surprise at token t,

        A_t = sum_k (gamma lam)^k delta_(t+k),      return_t = A_t + V_t,      V = 0 after the last token.

    lam = 0 trusts the critic, lam = 1 only what happened. Masked tokens are skipped, not waited for: the token before
    a tool's output is followed by the token after it. Advantages are then whitened over all tokens of the batch.

    Args:
        token_level_rewards: (B, R) float; only unmasked cells are read.
        values: (B, R) float.
        response_mask: (B, R); 1 on tokens the policy sampled; holes allowed.
        gamma, lam: discount and trace decay, both in [0, 1].
        whiten_advantages: False leaves the advantages as the sum gave them.

    Returns:
        advantages, returns: (B, R), zero where masked. Advantages have mean 0 and variance 1 over the tokens; returns
        are left as they are, since the critic learns them.

    Raises:
        NonFiniteError: a reward or value of an unmasked token is NaN or infinite.

    Source: Schulman et al. 2016, section 3 (arXiv:1506.02438).
    """
    cells = PackedCells(response_mask)
    r = pack_finite("token_level_rewards", token_level_rewards, cells)
    v = pack_finite("values", values, cells)
    delta = r + gamma * cells.next(v) - v
    advantages = cells.suffix_sum(delta, gamma * lam)
    returns = advantages + v
    advantages = whiten(advantages, cells) if whiten_advantages else advantages
    return cells.unpack(advantages), cells.unpack(returns)


@register_adv_est(
    AdvantageEstimator.REMAX,
    about=About(
        "sum_(k>=t) r_k - score of the greedy response",
        "one response to a prompt; costs one greedy response more",
        "arXiv:2310.10505",
        "test_advantage.py::test_remax_by_hand",
    ),
)
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Judge a response by the score of the greedy response to the same prompt.

        return_t = sum_(k >= t) r_k,      A_t = return_t - b_i

    Args:
        token_level_rewards: (B, R) float; only unmasked cells are read.
        reward_baselines: (B,) float; b_i, the score of the greedy response to row i's prompt.
        response_mask: (B, R); 1 on tokens the policy sampled.
        config: unused; estimators of verl take it.

    Returns:
        advantages, returns: (B, R), zero where masked.

    Raises:
        NonFiniteError: a reward or baseline is NaN or infinite.

    Source: Li et al. 2024, section 4 (arXiv:2310.10505).
    """
    cells = PackedCells(response_mask)
    r = pack_finite("token_level_rewards", token_level_rewards, cells)
    require_finite("reward_baselines", reward_baselines)
    returns = cells.suffix_sum(r, 1.0)
    return cells.unpack(returns - cells.repeat(reward_baselines.to(returns))), cells.unpack(returns)


@register_adv_est(
    AdvantageEstimator.REINFORCE_PLUS_PLUS,
    about=About(
        "whiten(sum_k gamma^k r_(t+k)) over the batch",
        "one response to a prompt and no critic; with a KL penalty in the reward",
        "arXiv:2501.03262",
        "test_advantage.py::test_reinforce_plus_plus_by_hand",
        options="algorithm.gamma algorithm.advantage.whiten",
    ),
)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: Any = None,
    gamma: float | None = None,
    whiten_advantages: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Judge a token by the discounted reward that follows it, relative to the whole batch; no critic, no groups.

        return_t = sum_k gamma^k r_(t+k),      A = whiten(return) over all tokens of the batch

    Masked tokens are skipped as in GAE. Meant for rewards that carry a KL penalty on every token
    (``algorithm.use_kl_in_reward``).

    Args:
        token_level_rewards: (B, R) float; only unmasked cells are read.
        response_mask: (B, R); 1 on tokens the policy sampled.
        config: the ``algorithm`` section; read for ``gamma`` where that argument is left out.
        gamma: discount in [0, 1].
        whiten_advantages: False leaves A = return.

    Returns:
        advantages, returns: (B, R), zero where masked.

    Raises:
        NonFiniteError: a reward of an unmasked token is NaN or infinite.
        ValueError: neither ``gamma`` nor ``config`` given.

    Source: Hu et al. 2025, REINFORCE++ (arXiv:2501.03262).
    """
    if gamma is None and config is None:
        raise ValueError("reinforce_plus_plus: gamma is missing. Pass gamma=, or config= with a gamma.")
    cells = PackedCells(response_mask)
    r = pack_finite("token_level_rewards", token_level_rewards, cells)
    returns = cells.suffix_sum(r, config.gamma if gamma is None else gamma)
    return cells.unpack(whiten(returns, cells) if whiten_advantages else returns), cells.unpack(returns)
