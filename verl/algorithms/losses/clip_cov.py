"""Clip-Cov: PPO's clip, and no gradient for a few tokens of high covariance of log pi and A.

Entropy falls where a likely token is reinforced: where log pi and A are both far above their means. So the *covariance*
of a token,

    cov_t = (log pi_t - mean log pi) (A_t - mean A),

says how much it costs in entropy, and a handful of tokens cost most. Means are over all tokens of a mini-batch, so
that choosing needs all of them at once: an engine scores the mini-batch, calls ``choose``, and gives micro-batches
the result as ``selected_tokens``. Without that column the loss chooses among the tokens it is given.

Source: Cui et al. 2025, The Entropy Mechanism (arXiv:2505.22617).
"""

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.losses.common import LossInputs, TokenLoss, builtin_policy_loss, clip_range
from verl.algorithms.registry import About


def choose_clip_cov(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: Any) -> Tensor:
    """Choose the tokens that lose their gradient: (T,) each, in any order, to (T,) bool.

    The random choice comes from the digits of ``old_log_prob``: new with every batch, yet the same for any order of
    the tokens, any split into micro-batches and any number of ranks.
    """
    low, high = clip_range(config)
    options = config.policy_loss
    ratio = (log_prob - old_log_prob).clamp(-20, 20).exp()
    cov = covariance(log_prob, advantages)
    is_clipped = -advantages * ratio.clamp(1 - low, 1 + high) > -advantages * ratio
    is_candidate = (cov > options.clip_cov_lb) & (cov < options.clip_cov_ub) & ~is_clipped
    candidates = is_candidate.nonzero().squeeze(-1)
    # of all tokens, not of the candidates: the share says how much of the batch may lose its gradient
    count = min(max(int(options.clip_cov_ratio * len(log_prob)), 1), len(candidates))
    digits = old_log_prob[candidates].float().contiguous().view(torch.int32).long()
    # a hash of the digits in place of a generator, which would depend on the order of tokens
    # Knuth's multiplier; torch's % has the sign of its divisor, so negative patterns give lots of the same range
    lots = (digits * 2654435761) % (1 << 32)
    return as_mask(candidates[lots.topk(count).indices], log_prob)


@builtin_policy_loss(
    "clip_cov",
    about=About(
        "as `vanilla` without dual clip, and 0 for a random few of high covariance of log pi and A",
        "entropy falls too fast",
        "arXiv:2505.22617",
        options="actor.{clip_ratio,clip_ratio_low,clip_ratio_high} actor.policy_loss.clip_cov_ratio "
        "actor.policy_loss.clip_cov_lb actor.policy_loss.clip_cov_ub",
    ),
    choose=choose_clip_cov,
)
def compute_policy_loss_clip_cov(x: LossInputs) -> TokenLoss:
    """PPO's clip, and no gradient for a few tokens of high covariance.

        l_t = max(-w A, -clip(w, 1 - clip_low, 1 + clip_high) A), or 0 if the token is selected

    Selected are ``clip_cov_ratio`` of all tokens, at least one, at random among those whose covariance is between
    ``clip_cov_lb`` and ``clip_cov_ub`` and that the clip does not hold already (see ``choose_clip_cov``).
    """
    low, high = x.clip_range
    is_selected = x.selected_tokens(choose_clip_cov)
    free = -x.advantages * x.ratio
    bounded = -x.advantages * x.ratio.clamp(1 - low, 1 + high)
    is_held = (bounded > free) | is_selected
    value = torch.maximum(free, bounded) * ~is_selected
    return TokenLoss(x.with_gradient(value, dloss_dlogp=free * ~is_held), is_held, is_selected)


def covariance(log_prob: Tensor, advantages: Tensor) -> Tensor:
    """Return the covariance of each token, (T,) float64, so that the means hardly depend on the order of summation."""
    log_prob, advantages = log_prob.double(), advantages.double()
    return (log_prob - log_prob.mean()) * (advantages - advantages.mean())


def as_mask(positions: Tensor, like: Tensor) -> Tensor:
    """Return bools shaped like ``like``, true at ``positions``."""
    marked = torch.zeros_like(like, dtype=torch.bool)
    marked[positions] = True
    return marked


# -- KL-Cov: the unclipped objective, with a penalty on tokens of highest covariance (see ``clip_cov``) --------------


def choose_kl_cov(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: Any) -> Tensor:
    """Choose the tokens that are penalised: (T,) each, in any order, to (T,) bool."""
    count = min(max(int(config.policy_loss.kl_cov_ratio * len(log_prob)), 1), len(log_prob))
    return as_mask(covariance(log_prob, advantages).topk(count).indices, log_prob)


@builtin_policy_loss(
    "kl_cov",
    about=About(
        "-w A, and + coef |log w| for those of highest covariance",
        "the same, more gently",
        "arXiv:2505.22617",
        options="actor.policy_loss.kl_cov_ratio actor.policy_loss.ppo_kl_coef",
    ),
    choose=choose_kl_cov,
)
def compute_policy_loss_kl_cov(x: LossInputs) -> TokenLoss:
    """The unclipped objective, with a penalty on moving the tokens of highest covariance.

        l_t = -w A + ppo_kl_coef |log w| if the token is selected, -w A otherwise

    Selected are the ``kl_cov_ratio`` of all tokens, at least one, of highest covariance. The penalty holds from the
    second optimizer step on a batch on: at w = 1 it has no slope.
    """
    is_selected = x.selected_tokens(choose_kl_cov)
    free, penalty = -x.advantages * x.ratio, x.config.policy_loss.ppo_kl_coef * is_selected
    dloss_dlogp = free + penalty * x.log_ratio.sign()
    return TokenLoss(x.with_gradient(free + penalty * x.log_ratio.abs(), dloss_dlogp), is_selected)
