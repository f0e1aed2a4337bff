"""ReMax: the score of the greedy response as the baseline."""

from typing import Any

from torch import Tensor

from verl.algorithms.advantages.common import builtin_estimator, pack_finite, require_finite
from verl.algorithms.valid_tokens import tokens_of


@builtin_estimator(
    "remax",
    "sum_(k>=t) r_k - score of the greedy response",
    "one response to a prompt; costs one greedy response more",
    "arXiv:2310.10505",
    "algorithms/advantages/test_remax.py::test_remax_by_hand",
    ragged=True,
)
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Judge a response by the score of the greedy response to the same prompt.

        return_t = sum_(k >= t) r_k,      A_t = return_t - b_i

    Args:
        token_level_rewards: (B, R) float; only unmasked tokens are read.
        reward_baselines: (B,) float; b_i, the score of the greedy response to row i's prompt.
        response_mask: (B, R); 1 on tokens the policy sampled.
        config: unused; estimators of verl take it.

    Returns:
        advantages, returns: (B, R), zero where masked.

    Raises:
        NonFiniteError: a reward or baseline is NaN or infinite.

    Source: Li et al. 2024, section 4 (arXiv:2310.10505).
    """
    tokens = tokens_of(response_mask)
    r = pack_finite("token_level_rewards", token_level_rewards, tokens)
    # one number a row: not masked, so not checked by packing
    require_finite("reward_baselines", reward_baselines)
    returns = tokens.suffix_sum(r, 1.0)
    return tokens.unpack(returns - tokens.repeat(reward_baselines.to(returns))), tokens.unpack(returns)
