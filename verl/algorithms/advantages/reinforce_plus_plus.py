"""REINFORCE++ and REINFORCE++-baseline: whitened over the whole batch, no critic."""

from typing import Any

import numpy as np
from torch import Tensor

from verl.algorithms.advantages.common import Groups, builtin_estimator, outcome_scores, pack_finite, whiten
from verl.algorithms.valid_tokens import tokens_of


@builtin_estimator(
    "reinforce_plus_plus",
    "whiten(sum_k gamma^k r_(t+k)) over the batch",
    "one response to a prompt and no critic; with a KL penalty in the reward",
    "arXiv:2501.03262",
    "algorithms/advantages/test_reinforce_plus_plus.py::test_reinforce_plus_plus_by_hand",
    options="algorithm.gamma algorithm.advantage.whiten",
    ragged=True,
)
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
        token_level_rewards: (B, R) float; only unmasked tokens are read.
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
    tokens = tokens_of(response_mask)
    r = pack_finite("token_level_rewards", token_level_rewards, tokens)
    returns = tokens.suffix_sum(r, config.gamma if gamma is None else gamma)
    # returns stay on the scale of the rewards: only advantages are whitened
    return tokens.unpack(whiten(returns, tokens) if whiten_advantages else returns), tokens.unpack(returns)


@builtin_estimator(
    "reinforce_plus_plus_baseline",
    "whiten(s_i - mean_G s) over the batch",
    "groups whose scale differs much; steadier than a per-group std",
    "arXiv:2501.03262",
    "algorithms/advantages/test_reinforce_plus_plus.py::test_reinforce_plus_plus_baseline_by_hand",
    options="algorithm.advantage.whiten",
    ragged=True,
)
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    config: Any = None,
    whiten_advantages: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Judge a response against its group's mean, then relative to the whole batch.

        A = whiten(s_i - mean_g s) over all tokens of the batch

    Unlike GRPO a prompt whose responses hardly differ keeps small advantages: the scale is the batch's, not the
    group's. A response alone in its group is compared with zero.

    Args:
        token_level_rewards: (B, R) float; zero where ``response_mask`` is.
        response_mask: (B, R); 1 on tokens the policy sampled.
        index: (B,) prompt ids; equal ids are one group. Order is free.
        epsilon, config: unused; estimators of verl take them.
        whiten_advantages: False leaves A = s_i - mean_g s.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a score is NaN or infinite.

    Source: Hu et al. 2025, REINFORCE++ (arXiv:2501.03262).
    """
    scores, groups = outcome_scores(token_level_rewards), Groups(index, token_level_rewards.device)
    tokens = tokens_of(response_mask)
    # spread before whitening: its mean and variance are over tokens, so long responses count more
    advantages = tokens.repeat(groups.centred(scores).to(token_level_rewards.dtype))
    advantages = tokens.unpack(whiten(advantages, tokens) if whiten_advantages else advantages)
    return advantages, advantages
