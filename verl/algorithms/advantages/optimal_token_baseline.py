"""Optimal token baseline: the group's returns at each token, weighted by gradient variance."""

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages.common import Groups, builtin_estimator, pack_finite
from verl.algorithms.valid_tokens import BLOCK, ValidTokens


@builtin_estimator(
    "optimal_token_baseline",
    "G_t - (sum_G W_jt G_jt) / (sum_G W_jt), W the squared length of the logit gradients so far",
    "long responses",
    "arXiv:2602.07078",
    "algorithms/advantages/test_optimal_token_baseline.py::test_optimal_token_baseline_by_hand_weighs_the_group_by_its_gradients_so_far",
    options="actor.calculate_sum_pi_squared",
)
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """Judge what follows a token by what follows the same place in its group, large gradients counting more.

    A token's gradient by the logits is onehot(y) - pi, of squared length 1 - 2 pi(y) + sum_v pi(v)^2. Summed from the
    start, W_it = sum_(k <= t) (1 - 2 pi_ik + sum_v pi_ik(v)^2) is how much variance response i carries at its t-th
    token, and the baseline of least variance weighs by it:

        G_it = sum_(k >= t) r_ik,      A_it = G_it - (sum_(j in G) W_jt G_jt) / (sum_(j in G) W_jt)

    over the responses j that have a t-th token. Places count the policy's own tokens: tool output is passed over.
    With ``rollout_is_weights`` rho, each term of W is multiplied by rho^2.

    Where only one response of a group is left it would be its own baseline, and learn nothing: with
    ``handle_zero_tail`` its baseline is zero there. A response alone in its group has none.

    Args:
        token_level_rewards, old_log_probs: (B, R) float.
        sum_pi_squared: (B, R) float in (0, 1]; needs ``actor.calculate_sum_pi_squared``.
        response_mask: (B, R); 1 on tokens the policy sampled; holes allowed.
        index: (B,) prompt ids; equal ids are one group. Order is free.

    Returns:
        advantages, returns: (B, R), zero where masked; returns are G.

    Raises:
        NonFiniteError: a reward, log-prob or sum of an unmasked token is NaN or infinite.

    Source: The Optimal Token Baseline, 2026 (arXiv:2602.07078).
    """
    tokens, groups = ValidTokens(response_mask), Groups(index, response_mask.device)
    returns = tokens.suffix_sum(pack_finite("token_level_rewards", token_level_rewards, tokens), 1.0)
    energy = 1 - 2 * pack_finite("old_log_probs", old_log_probs, tokens).exp()
    energy = energy + pack_finite("sum_pi_squared", sum_pi_squared, tokens)
    if rollout_is_weights is not None:
        energy = energy * pack_finite("rollout_is_weights", rollout_is_weights, tokens).square()

    # the k-th block of every row holds the same places, so a group meets block by block
    block = groups.group[tokens.row] * tokens.blocks_per_row + tokens.block_in_row

    def over_group(flat: Tensor) -> Tensor:
        """Sum at the same place over the group, at each of their tokens."""
        sums = flat.new_zeros(groups.num_groups * tokens.blocks_per_row, BLOCK)
        return sums.index_add_(0, block, flat.view(-1, BLOCK)).index_select(0, block).view(-1)

    # the sum so far stays in float64: it grows along the response, and its terms do not
    # gaps hold 1 - 2 exp(0) = -1 until they are cleared
    weight = tokens.prefix_sum(tokens.clear_gaps(energy))
    # weights are 0 up to the first token whose probability was below 1
    baseline = over_group(weight * returns) / (over_group(weight) + epsilon)
    has_baseline = ~tokens.repeat(groups.is_alone)
    if handle_zero_tail:
        has_baseline &= over_group(tokens.repeat(torch.ones_like(groups.group))) > 1
    advantages = (returns - baseline * has_baseline).to(returns.dtype)
    return tokens.unpack(advantages), tokens.unpack(returns)


@builtin_estimator(
    "tir_optimal_token_baseline",
    "that of `optimal_token_baseline`",
    "the same, with tools: verl's name for passing tool output over, which both do here",
    "arXiv:2602.07078",
    "algorithms/advantages/test_optimal_token_baseline.py::"
    "test_tir_optimal_token_baseline_by_hand_meets_tokens_by_their_number_not_their_column",
    options="actor.calculate_sum_pi_squared",
)
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """The optimal token baseline of responses with tool output: the t-th sampled token is compared with the t-th.

        A_it = G_it - (sum_(j in G) W_jt G_jt) / (sum_(j in G) W_jt),      t counts the ones of ``response_mask``

    These are the numbers of ``optimal_token_baseline``, which passes tool output over as well; verl's function of that
    name counts columns instead, tool output included, and this is the name under which it passes it over.

    Args:
        token_level_rewards, old_log_probs, sum_pi_squared, response_mask, index, rollout_is_weights, handle_zero_tail:
            as of ``compute_optimal_token_baseline_advantage``.

    Returns:
        advantages, returns: (B, R), zero where masked; returns are G.

    Raises:
        NonFiniteError: a reward, log-prob or sum of an unmasked token is NaN or infinite.

    Source: The Optimal Token Baseline, 2026, its experiments with tools (arXiv:2602.07078).
    """
    return compute_optimal_token_baseline_advantage(
        token_level_rewards,
        response_mask,
        index,
        old_log_probs,
        sum_pi_squared,
        rollout_is_weights,
        handle_zero_tail,
        epsilon,
    )
