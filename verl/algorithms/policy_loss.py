"""How much to change the probability of each sampled token: one function per ``actor.policy_loss.loss_mode``.

A policy loss is called with keywords and takes those it names:

    fn(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights) -> loss, metrics

all tensors (B, R), ``config`` the ``actor`` section, metrics a dict of scalars under the names they are logged with.
Losses written for older releases of verl, which return four scalars, work as they are (see ``loss_and_metrics``).

Letters: A advantage, w = pi(y_t) / pi_old(y_t) importance ratio.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.algorithms import policy_cov, policy_ratio, policy_reinforce  # noqa: F401 - importing them registers theirs
from verl.algorithms.aggregate import agg_rows
from verl.algorithms.objective import (
    POLICY_LOSS_REGISTRY,
    PolicyLossFn,
    Tokens,
    clip_range,
    get_policy_loss_fn,
    loss_and_metrics,
    register_policy_loss,
    section_of,
)
from verl.algorithms.packed_correction import packed_kept, packed_weights
from verl.algorithms.registry import About
from verl.algorithms.valid_tokens import valid_tokens

__all__ = [
    "POLICY_LOSS_REGISTRY",
    "ClippedObjective",
    "PolicyLossFn",
    "clipped_objective",
    "compute_policy_loss",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_reinforce",
    "compute_policy_loss_vanilla",
    "get_policy_loss_fn",
    "loss_and_metrics",
    "register_policy_loss",
]


class ClippedObjective(NamedTuple):
    """Per token, all of one shape: what is minimised, log(pi/pi_old), and where which bound took the gradient away."""

    loss: Tensor
    log_ratio: Tensor
    is_clipped: Tensor
    is_clipped_lower: Tensor


def clipped_objective(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float | None,
) -> ClippedObjective:
    """Follow the advantage, but only while the policy stays near the one that sampled.

        A >= 0:  -min(w A, clip(w, 1 - clip_low, 1 + clip_high) A)
        A <  0:  the same, but never above -clip_ratio_c A

    The first line stops paying for a ratio that already moved far enough in the good direction. The second bounds what
    a bad token can cost once its ratio has exploded; ``clip_ratio_c=None`` leaves it out. log w is cut at +-20.

    The gradient is written down rather than traced: it is -w A, the slope of the unbounded objective, on tokens where
    that is what was chosen, and zero where a bound holds. Differentiable in ``log_prob`` only, once.

    Source: Schulman et al. 2017, equation 7 (arXiv:1707.06347); unequal bounds ("clip-higher"): Yu et al. 2025, DAPO
    (arXiv:2503.14476); dual clip: Ye et al. 2019, equation 5 (arXiv:1912.09729).
    """
    with torch.no_grad():
        log_ratio = (log_prob - old_log_prob).clamp(-20, 20)
        ratio = log_ratio.exp()
        cost = -advantages
        free = cost * ratio
        clipped = cost * ratio.clamp(1 - clip_low, 1 + clip_high)
        pessimistic = torch.maximum(free, clipped)
        most = torch.inf if clip_ratio_c is None else clip_ratio_c
        bound = torch.where(
            cost > 0, most * cost, 0
        )  # a good token's loss is never above zero: for it this bounds nothing
        loss = torch.minimum(pessimistic, bound)
        slope = free * (loss == free)
    loss = loss + slope * (log_prob - log_prob.detach())
    return ClippedObjective(loss, log_ratio, clipped > free, pessimistic > bound)


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float | None = 3.0,
    loss_agg_mode: str = "token-mean",
    *,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The clipped objective of PPO (see ``clipped_objective``), aggregated.

    Args:
        old_log_prob, log_prob, advantages: (B, R) float; differentiable in ``log_prob``.
        response_mask: (B, R); 1 on tokens that count. Masked positions have no influence and get no gradient.
        cliprange: epsilon; used on each side where ``cliprange_low`` or ``cliprange_high`` is None.
        clip_ratio_c: dual-clip bound on the ratio, above 1; None: no such bound.
        loss_agg_mode: see ``agg_loss``.
        rollout_is_weights: (B, R) factors of each token's loss, for sampler and trainer that disagree.

    Returns:
        scalars: loss; share of tokens whose ratio was clipped; KL(pi_old || pi) as mean log-ratio over tokens; share
        of tokens held by the dual-clip bound.

    Raises:
        ValueError: no clip range, or ``clip_ratio_c`` not above 1.
    """
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ValueError(
            f"compute_policy_loss: cliprange={cliprange}, cliprange_low={cliprange_low}, "
            f"cliprange_high={cliprange_high} leave a side without a bound. Give cliprange, or both of the others."
        )
    if clip_ratio_c is not None and clip_ratio_c <= 1:
        raise ValueError(
            f"clip_ratio_c={clip_ratio_c} must exceed 1: at or below, it would cut tokens the policy has not moved. "
            f"Use 3.0 (the default), or null to switch the bound off."
        )
    cells = valid_tokens(response_mask)
    token = clipped_objective(
        cells.pack(old_log_prob), cells.pack(log_prob), cells.pack(advantages), low, high, clip_ratio_c
    )
    losses = token.loss if rollout_is_weights is None else token.loss * cells.pack(rollout_is_weights).detach()
    loss = agg_rows(cells.row_sum(losses), cells.lengths, loss_agg_mode, response_mask.shape[-1])
    return loss, cells.mean(token.is_clipped), cells.mean(-token.log_ratio), cells.mean(token.is_clipped_lower)


@register_policy_loss(
    "vanilla",
    about=[
        About(
            "-min(w A, clip(w, 1 - low, 1 + high) A)",
            "PPO; the default",
            "arXiv:1707.06347",
            "test_policy_loss.py::test_loss_and_shares_by_hand_in_every_mode",
            options="actor.{clip_ratio,clip_ratio_low,clip_ratio_high,clip_ratio_c}",
        ),
        About(
            "the same",
            '"clip-higher": leaves room for rare tokens to grow, e.g. 0.28 and 0.2',
            "arXiv:2503.14476",
            "test_policy_loss.py::test_loss_and_shares_by_hand_in_every_mode",
            setting="clip_ratio_high > clip_ratio_low",
        ),
        About(
            "where A < 0, never above -c A",
            '"dual clip", c > 1: bounds what a bad token costs once its ratio exploded; null is off',
            "arXiv:1912.09729",
            "test_roll_values.py::test_dual_clip",
            options="actor.clip_ratio_c",
            setting="clip_ratio_c=c",
        ),
    ],
)
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``compute_policy_loss`` with the bounds of the ``actor`` section.

    Args:
        config: read for ``clip_ratio``, ``clip_ratio_low``, ``clip_ratio_high``, ``clip_ratio_c``.

    Returns:
        loss, and ``actor/pg_clipfrac``, ``actor/ppo_kl``, ``actor/pg_clipfrac_lower``.
    """
    if config is None:
        raise ValueError("policy loss 'vanilla': config is missing. Pass the actor section, which holds clip_ratio.")
    return loss_and_metrics(
        compute_policy_loss(
            old_log_prob,
            log_prob,
            advantages,
            response_mask,
            config.clip_ratio,
            config.clip_ratio_low,
            config.clip_ratio_high,
            config.clip_ratio_c,
            loss_agg_mode,
            rollout_is_weights=rollout_is_weights,
        )
    )


@register_policy_loss(
    "bypass_mode",
    about=About(
        "as `vanilla`, w = pi / mu; with `loss_type=reinforce` -sg[w in bounds] A log pi; 0 where w is rejected",
        "learning straight from what the sampler drew; set beside `algorithm.rollout_correction.bypass_mode=true`",
        "arXiv:2110.00641",
        "test_policy_bypass.py::test_by_hand_in_a_batch_and_alone",
        options="actor.{clip_ratio,clip_ratio_low,clip_ratio_high,clip_ratio_c}",
    ),
)
def compute_policy_loss_bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Learn straight from what the sampler drew: old log-probs are the sampler's, and r = pi / mu is made here.

        ppo_clip     the clipped objective of r (see ``clipped_objective``); ``rollout_is`` adds nothing to it
        reinforce    -sg[w] A log pi, w = r within bounds as ``rollout_is`` says, 1 without it

    each times 0 where ``rollout_rs`` or the veto rejects r. A rejected token still counts in the divisor of
    ``loss_agg_mode``: how many there are changes as the policy moves, and is known of a micro-batch at a time only.

    Args:
        old_log_prob, log_prob, advantages: (B, R) float; log mu, log pi, A; differentiable in ``log_prob``.
        response_mask: (B, R); 1 on tokens that count.
        config: the ``actor`` section, read for ``policy_loss.rollout_correction`` and the clip ratios.
        rollout_is_weights: (B, R) factors of each token's loss.

    Returns:
        loss, the usual metrics, ``rollout_corr/rollout_is_mean`` and ``rollout_corr/rollout_rs_masked_fraction``.

    Source: Liu, Li et al. 2025, https://richardli.xyz/rl-collapse; the ratio to the sampler in PPO: Hilton, Cobbe &
    Schulman 2022, section 2 (arXiv:2110.00641).
    """
    config = section_of(config, "bypass_mode")
    options = config.policy_loss.rollout_correction
    tokens = Tokens(old_log_prob, log_prob, advantages, response_mask)
    cells, factors, weights, keep = tokens.cells, torch.ones_like(tokens.ratio), None, None
    if rollout_is_weights is not None:
        factors = tokens.pack(rollout_is_weights)
    if options.rejects:
        keep = packed_kept(tokens, options.rejections, options.rollout_token_veto_threshold)
        factors = factors * keep
    if options.loss_type == "reinforce":
        if options.rollout_is:
            weights = packed_weights(tokens, options.rollout_is, *options.weighting)
            factors = factors * weights
        slope = -tokens.advantage * factors
        loss, metrics = tokens.loss(slope * tokens.log_prob, slope, loss_agg_mode)
    else:
        low, high = clip_range(config, "bypass_mode")
        token = clipped_objective(tokens.old, tokens.tracked, tokens.advantage, low, high, config.clip_ratio_c)
        losses = token.loss * factors
        loss = agg_rows(cells.row_sum(losses), cells.lengths, loss_agg_mode, tokens.width)
        parts = loss, cells.mean(token.is_clipped), cells.mean(-token.log_ratio), cells.mean(token.is_clipped_lower)
        loss, metrics = loss_and_metrics(parts)
    is_token = cells.repeat(torch.ones_like(cells.lengths)) if keep is not None or weights is not None else None
    if keep is not None:
        metrics["rollout_corr/rollout_rs_masked_fraction"] = cells.mean(is_token * ~keep)
    if weights is not None:
        metrics["rollout_corr/rollout_is_mean"] = cells.mean(is_token * weights)
    return loss, metrics


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient on what another policy drew: -sg[w] A log pi, w = ``rollout_is_weights`` or 1; all (B, R).

    ``rollout_log_prob`` is read for the metrics only, ``config`` not at all. As ``policy_loss.loss_mode=reinforce``.
    """
    tokens = Tokens(rollout_log_prob, log_prob, advantages, response_mask)
    return tokens.loss(-tokens.advantage * tokens.log_prob, -tokens.advantage, loss_agg_mode, rollout_is_weights)
