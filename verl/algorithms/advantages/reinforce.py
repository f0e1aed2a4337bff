"""REINFORCE without a baseline: discounted returns by token, or by turn.

A turn is a run of ones in ``response_mask``: the policy's own tokens between two tool outputs. A response of one turn
is the ordinary case.
"""

import torch
from torch import Tensor

from verl.algorithms.advantages.common import builtin_estimator, find_turns, pack_finite
from verl.algorithms.valid_tokens import tokens_of


@builtin_estimator(
    "reinforce",
    "sum_k gamma^k r_(t+k)",
    "rewards that are centred already, or one answer to a prompt and nothing to compare it with",
    "[Williams 1992](https://doi.org/10.1007/BF00992696)",
    "algorithms/advantages/test_reinforce.py::test_reinforce_by_hand",
    options="algorithm.gamma",
    ragged=True,
)
def compute_reinforce_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """Judge a token by the discounted reward that follows it, and nothing else.

        A_t = return_t = sum_k gamma^k r_(t+k)

    Masked tokens are skipped as in GAE. Nothing is subtracted or scaled: rewards must be centred by themselves.

    Args:
        token_level_rewards: (B, R) float; only unmasked tokens are read.
        response_mask: (B, R); 1 on tokens the policy sampled; holes allowed.
        gamma: discount per token, in [0, 1].

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a reward of an unmasked token is NaN or infinite.

    Source: Williams 1992, https://doi.org/10.1007/BF00992696
    """
    tokens = tokens_of(response_mask)
    returns = tokens.unpack(tokens.suffix_sum(pack_finite("token_level_rewards", token_level_rewards, tokens), gamma))
    return returns, returns


@builtin_estimator(
    "agentic_reinforce",
    "G_k = sum_(j >= k) gamma^(j-k) r_j for all tokens of turn k",
    "several turns: each turn is one action, time passes with turns",
    "arXiv:2512.24873",
    "algorithms/advantages/test_reinforce.py::test_agentic_reinforce_by_hand_discounts_by_turns_not_by_tokens",
    options="algorithm.gamma",
    ragged=True,
)
def compute_agentic_reinforce_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """Judge a turn as one action by the discounted rewards of it and the turns after; its tokens share the judgement.

    With r_k the sum of the rewards in turn k,

        A_t = G_k = sum_(j >= k) gamma^(j - k) r_j      for every token t of turn k

    So time passes with turns, not with tokens: a long answer is not discounted more than a short one.

    Args:
        token_level_rewards: (B, R) float; only unmasked tokens are read.
        response_mask: (B, R); each run of ones is a turn.
        gamma: discount per turn, in [0, 1].

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a reward of an unmasked token is NaN or infinite.

    Source: the ``agentic_reinforce`` of ROLL; credit by chunks of interaction: arXiv:2512.24873.
    """
    turns = find_turns(token_level_rewards, response_mask)
    # `algorithm.gamma`, as in `reinforce`, but here per turn
    returns = turns.to_tokens(turns.to_go(gamma))
    return returns, returns


@builtin_estimator(
    "step_reinforce",
    "gamma^(tokens to the end of turn k) G_k, step_gamma from turn to turn",
    "several turns with a reward each",
    "arXiv:2505.10978",
    "algorithms/advantages/test_reinforce.py::test_step_reinforce_by_hand_sets_each_turns_return_on_its_last_token",
    options="algorithm.gamma algorithm.step_gamma",
    ragged=True,
)
def compute_step_reinforce_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float, step_gamma: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Judge a turn by the discounted rewards of it and the turns after, and its tokens by how near they are to its end.

    With r_k the sum of the rewards in turn k, T_k its number of tokens, and t = 1 ... T_k counting within it,

        G_k = sum_(j >= k) step_gamma^(j - k) r_j,      A_t = gamma^(T_k - t) G_k

    So each turn is a step with a return of its own, set on its last token.

    Args:
        token_level_rewards: (B, R) float; only unmasked tokens are read.
        response_mask: (B, R); each run of ones is a turn.
        gamma: discount per token within a turn, in [0, 1].
        step_gamma: discount from turn to turn, in [0, 1]; ``algorithm.step_gamma``.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a reward of an unmasked token is NaN or infinite.

    Source: the ``step_reinforce`` of ROLL; the return of a step is that of Feng et al. 2025, GiGPO, equation 6
    (arXiv:2505.10978).
    """
    turns = find_turns(token_level_rewards, response_mask)
    distance = torch.arange(response_mask.shape[-1], device=response_mask.device)
    # a table of powers: one each for R distances, not for every token
    nearness = torch.full_like(distance, gamma, dtype=torch.float64) ** distance
    to_go = turns.to_go(step_gamma)
    returns = turns.tokens.unpack(to_go[turns.number] * nearness.to(to_go.dtype)[turns.tokens_left])
    return returns, returns
