"""Estimators without a baseline: what follows a token, counted by tokens or by turns.

A turn is a run of ones in ``response_mask``: what the policy said between two tool outputs. A response of one turn is
the ordinary case.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.cells import PackedCells, discounted_suffix_sum
from verl.algorithms.estimating import pack_finite, register_adv_est


@register_adv_est("reinforce")
@torch.no_grad()
def compute_reinforce_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    gamma: float,
) -> tuple[Tensor, Tensor]:
    """Judge a token by the discounted reward that follows it, and nothing else.

        A_t = return_t = sum_k gamma^k r_(t+k)

    Masked tokens are skipped as in GAE. Nothing is subtracted or scaled: rewards must be centred by themselves.

    Args:
        token_level_rewards: (B, R) float; only unmasked cells are read.
        response_mask: (B, R); 1 on tokens the policy sampled; holes allowed.
        gamma: discount per token, in [0, 1].

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a reward of an unmasked token is NaN or infinite.

    Source: Williams 1992, https://doi.org/10.1007/BF00992696
    """
    cells = PackedCells(response_mask)
    returns = cells.unpack(cells.suffix_sum(pack_finite("token_level_rewards", token_level_rewards, cells), gamma))
    return returns, returns


@register_adv_est("agentic_reinforce")
@torch.no_grad()
def compute_agentic_reinforce_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    gamma: float,
) -> tuple[Tensor, Tensor]:
    """Judge a turn as one action by the discounted rewards of it and the turns after; its tokens share the judgement.

    With r_k the sum of the rewards in turn k,

        A_t = G_k = sum_(j >= k) gamma^(j - k) r_j      for every token t of turn k

    So time passes with turns, not with tokens: a long answer is not discounted more than a short one.

    Args:
        token_level_rewards: (B, R) float; only unmasked cells are read.
        response_mask: (B, R); each run of ones is a turn.
        gamma: discount per turn, in [0, 1].

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a reward of an unmasked token is NaN or infinite.

    Source: the ``agentic_reinforce`` of ROLL; credit by chunks of interaction: arXiv:2512.24873.
    """
    turns = _turns(token_level_rewards, response_mask)
    returns = discounted_suffix_sum(turns.rewards, gamma).gather(1, turns.number) * turns.is_own
    return returns, returns


@register_adv_est("step_reinforce")
@torch.no_grad()
def compute_step_reinforce_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    gamma: float,
    step_gamma: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Judge a turn by the discounted rewards of it and the turns after, and its tokens by how near they are to its end.

    With r_k the sum of the rewards in turn k, T_k its number of tokens, and t = 1 ... T_k counting within it,

        G_k = sum_(j >= k) step_gamma^(j - k) r_j,      A_t = gamma^(T_k - t) G_k

    So each turn is a step with a return of its own, set on its last token.

    Args:
        token_level_rewards: (B, R) float; only unmasked cells are read.
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
    turns = _turns(token_level_rewards, response_mask)
    to_go = discounted_suffix_sum(turns.rewards, step_gamma).gather(1, turns.number)
    nearness = torch.full_like(to_go, gamma) ** turns.tokens_left
    returns = to_go * nearness * turns.is_own
    return returns, returns


class _Turns(NamedTuple):
    """Where turns stand: ``number`` (B, R) counts them from 1 along a row, ``rewards`` (B, 1 + turns) sums theirs."""

    is_own: Tensor
    number: Tensor
    rewards: Tensor
    tokens_left: Tensor
    """(B, R): tokens of the same turn still to come."""


def _turns(token_level_rewards: Tensor, response_mask: Tensor) -> _Turns:
    cells = PackedCells(response_mask)
    rewards = cells.unpack(pack_finite("token_level_rewards", token_level_rewards, cells))
    is_own = response_mask != 0
    begins = is_own.clone()
    begins[:, 1:] &= ~is_own[:, :-1]
    number = begins.cumsum(-1)
    count = int(number.max()) if number.numel() else 0
    per_turn = rewards.new_zeros(len(rewards), 1 + count)
    tokens = per_turn.scatter_add(1, number, is_own.to(rewards.dtype))
    ends_at = tokens.cumsum(-1).gather(1, number)  # own tokens up to this turn's end
    tokens_left = (ends_at - is_own.cumsum(-1)) * is_own
    return _Turns(is_own, number, per_turn.scatter_add(1, number, rewards), tokens_left)
