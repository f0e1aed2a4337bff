"""Policy losses that keep entropy up by restraining the few tokens that drive it down.

Entropy falls where a likely token is reinforced: where log pi and A are both far above their means. So the *covariance*
of a token,

    cov_t = (log pi_t - mean log pi) (A_t - mean A),

says how much it costs in entropy, and a handful of tokens cost most. Means are over all tokens of a mini-batch, so
that choosing needs all of them at once: an engine scores the mini-batch, calls ``TOKEN_CHOICES``, and gives
micro-batches the result as ``selected_tokens``. Without that column a loss chooses among the tokens it is given.

Source of all: Cui et al. 2025, The Entropy Mechanism (arXiv:2505.22617).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.objective import Tokens, clip_range, register_policy_loss, section_of
from verl.algorithms.registry import About

Result = tuple[Tensor, dict[str, Tensor]]
TokenChoice = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


@register_policy_loss(
    "clip_cov",
    about=About(
        "as `vanilla` without dual clip, and 0 for a random few of high covariance of log pi and A",
        "entropy falls too fast",
        "arXiv:2505.22617",
        "test_policy_losses.py::test_loss_by_hand_in_a_batch_and_alone",
        options="actor.{clip_ratio,clip_ratio_low,clip_ratio_high} actor.policy_loss.clip_cov_ratio "
        "actor.policy_loss.clip_cov_lb actor.policy_loss.clip_cov_ub",
    ),
)
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    selected_tokens: Tensor | None = None,
) -> Result:
    """PPO's clip, and beside it no gradient for a few tokens of high covariance.

        l_t = max(-w A, -clip(w, 1 - clip_low, 1 + clip_high) A), or 0 if the token is selected

    Selected are ``clip_cov_ratio`` of all tokens, at least one, at random among those whose covariance is between
    ``clip_cov_lb`` and ``clip_cov_ub`` and that the clip does not hold already (see ``choose_clip_cov``).

    Args:
        old_log_prob, log_prob, advantages: (B, R) float; differentiable in ``log_prob``, once.
        response_mask: (B, R); 1 on tokens that count.
        config: read for ``clip_ratio``, ``clip_ratio_low``, ``clip_ratio_high``,
            ``policy_loss.{clip_cov_ratio,clip_cov_lb,clip_cov_ub}``.
        rollout_is_weights: (B, R) factors of each token's loss.
        selected_tokens: (B, R), nonzero on selected tokens. Default: chosen among the tokens given.
    """
    low, high = clip_range(config, "clip_cov")
    tokens = Tokens(old_log_prob, log_prob, advantages, response_mask)
    is_selected = _selected(tokens, response_mask, selected_tokens, choose_clip_cov, config)
    free, is_clipped = _clip(tokens.ratio, tokens.advantage, low, high)
    value = torch.maximum(free, -tokens.advantage * tokens.ratio.clamp(1 - low, 1 + high)) * ~is_selected
    return tokens.loss(
        value,
        free * ~(is_clipped | is_selected),
        loss_agg_mode,
        rollout_is_weights,
        is_clipped | is_selected,
        is_selected,
    )


@register_policy_loss(
    "kl_cov",
    about=About(
        "-w A, and + coef |log w| for those of highest covariance",
        "the same, more gently",
        "arXiv:2505.22617",
        "test_policy_losses.py::test_loss_by_hand_in_a_batch_and_alone",
        options="actor.policy_loss.kl_cov_ratio actor.policy_loss.ppo_kl_coef",
    ),
)
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    selected_tokens: Tensor | None = None,
) -> Result:
    """The unclipped objective, with a penalty on moving the tokens of highest covariance.

        l_t = -w A + ppo_kl_coef |log w| if the token is selected, -w A otherwise

    Selected are the ``kl_cov_ratio`` of all tokens, at least one, of highest covariance. The penalty holds from the
    second optimizer step on a batch on: at w = 1 it has no slope.

    Args:
        old_log_prob, log_prob, advantages: (B, R) float; differentiable in ``log_prob``, once.
        response_mask: (B, R); 1 on tokens that count.
        config: read for ``policy_loss.{kl_cov_ratio,ppo_kl_coef}``.
        rollout_is_weights: (B, R) factors of each token's loss.
        selected_tokens: (B, R), nonzero on selected tokens. Default: chosen among the tokens given.
    """
    coefficient = section_of(config, "kl_cov").policy_loss.ppo_kl_coef
    tokens = Tokens(old_log_prob, log_prob, advantages, response_mask)
    is_selected = _selected(tokens, response_mask, selected_tokens, choose_kl_cov, config)
    free, penalty = -tokens.advantage * tokens.ratio, coefficient * is_selected
    return tokens.loss(
        free + penalty * tokens.log_ratio.abs(),
        free + penalty * tokens.log_ratio.sign(),
        loss_agg_mode,
        rollout_is_weights,
        is_selected,
    )


def choose_clip_cov(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: Any) -> Tensor:
    """Which tokens lose their gradient: (T,) each, in any order, to (T,) bool.

    The random choice is drawn from the digits of ``old_log_prob``: new with every batch, yet the same for any order of
    the tokens, any cut into micro-batches and any number of ranks.
    """
    low, high = clip_range(config, "clip_cov")
    options = config.policy_loss
    ratio = (log_prob - old_log_prob).clamp(-20, 20).exp()
    covariance = _covariance(log_prob, advantages)
    _, is_clipped = _clip(ratio, advantages, low, high)
    is_candidate = (covariance > options.clip_cov_lb) & (covariance < options.clip_cov_ub) & ~is_clipped
    candidates = is_candidate.nonzero().squeeze(-1)
    count = min(max(int(options.clip_cov_ratio * len(log_prob)), 1), len(candidates))
    digits = old_log_prob[candidates].float().contiguous().view(torch.int32).long()
    lots = (digits * 2654435761) % (1 << 32)
    return _marked(candidates[lots.topk(count).indices], log_prob)


def choose_kl_cov(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: Any) -> Tensor:
    """Which tokens are penalised: (T,) each, in any order, to (T,) bool."""
    count = min(max(int(config.policy_loss.kl_cov_ratio * len(log_prob)), 1), len(log_prob))
    return _marked(_covariance(log_prob, advantages).topk(count).indices, log_prob)


TOKEN_CHOICES: dict[str, TokenChoice] = {"clip_cov": choose_clip_cov, "kl_cov": choose_kl_cov}
"""loss_mode -> how it singles out tokens of a mini-batch."""


def _covariance(log_prob: Tensor, advantages: Tensor) -> Tensor:
    """In float64, so that the means hardly depend on the order of summation."""
    log_prob, advantages = log_prob.double(), advantages.double()
    return (log_prob - log_prob.mean()) * (advantages - advantages.mean())


def _clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-w A, and where the clipped term is greater."""
    free = -advantages * ratio
    return free, -advantages * ratio.clamp(1 - low, 1 + high) > free


def _marked(places: Tensor, like: Tensor) -> Tensor:
    marked = torch.zeros_like(like, dtype=torch.bool)
    marked[places] = True
    return marked


def _selected(
    tokens: Tokens, response_mask: Tensor, selected_tokens: Tensor | None, choose: TokenChoice, config: Any
) -> Tensor:
    """The packed bools of ``selected_tokens``, or of a choice among these tokens."""
    if selected_tokens is not None:
        return tokens.pack(selected_tokens) != 0
    is_real = tokens.pack(response_mask) != 0
    is_selected = torch.zeros_like(is_real)
    is_selected[is_real] = choose(tokens.old[is_real], tokens.log_prob[is_real], tokens.advantage[is_real], config)
    return is_selected
