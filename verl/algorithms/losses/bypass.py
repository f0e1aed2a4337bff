"""The losses of ``bypass_mode``: PPO's clip or a policy gradient, with the ratio to the rollout engine's policy.

The corrections of ``correction`` on flat tokens, since this loss computes them in every micro-batch. r = pi / pi_old,
pi_old the policy that sampled. Results are constants.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.algorithms.correction import DIVERGENCES, LEVELS
from verl.algorithms.losses.common import LossInputs, TokenLoss, builtin_policy_loss
from verl.algorithms.losses.ppo import clipped_objective
from verl.algorithms.registry import About


@builtin_policy_loss(
    "bypass_mode",
    about=About(
        "as `vanilla`, w = pi / mu; with `loss_type=reinforce` -sg[w in bounds] A log pi; 0 where w is rejected",
        "learning straight from what the sampler generated; goes with `algorithm.rollout_correction.bypass_mode=true`",
        "arXiv:2110.00641",
        "algorithms/losses/test_bypass.py::test_by_hand_in_a_batch_and_alone",
        options="actor.{clip_ratio,clip_ratio_low,clip_ratio_high,clip_ratio_c}",
    ),
)
def compute_policy_loss_bypass_mode(x: LossInputs) -> TokenLoss:
    """Learn from the rollout engine's own probabilities: old log-probs are the engine's, and r = pi / mu is made here.

        ppo_clip     the clipped objective of r (see ``clipped_objective``); ``rollout_is`` adds nothing to it
        reinforce    -sg[w] A log pi, w = r within bounds as ``rollout_is`` says, 1 without it

    each times 0 where ``rollout_rs`` or the veto rejects r. A rejected token still counts in the divisor of
    ``loss_agg_mode``: how many there are changes as the policy moves, and is known of a micro-batch at a time only.

    Source: Liu, Li et al. 2025, https://richardli.xyz/rl-collapse; the ratio to the sampler in PPO: Hilton, Cobbe &
    Schulman 2022, section 2 (arXiv:2110.00641).
    """
    options, factors, metrics = x.config.policy_loss.rollout_correction, None, {}
    if options.rejects:
        factors = packed_kept(x, options.rejections, options.rollout_token_veto_threshold)
        # gaps hold anything: only `is_valid` keeps them out of the share
        metrics["rollout_corr/rollout_rs_masked_fraction"] = x.valid_tokens.mean(x.is_valid * ~factors)
    if options.loss_type == "reinforce":
        losses, clipped, clipped_lower, _, _ = TokenLoss(-x.advantages * x.log_prob)
        if options.rollout_is:
            weights = packed_weights(x, options.rollout_is, *options.weighting)
            metrics["rollout_corr/rollout_is_mean"] = x.valid_tokens.mean(x.is_valid * weights)
            factors = weights if factors is None else factors * weights
    else:
        low, high = x.clip_range
        losses, clipped, clipped_lower, _, _ = clipped_objective(x, low, high, x.config.clip_ratio_c)
    losses = losses if factors is None else losses * factors
    return TokenLoss(losses, clipped, clipped_lower, metrics=metrics)


@torch.no_grad()
def packed_ratio(x: LossInputs, level: str) -> Tensor:
    """`importance_ratio` of each token, packed."""
    if level == "token":
        return x.ratio
    # cut after the sum over the response, as `importance_ratio` does; `ratio` cuts each token
    d = x.difference
    per_row = x.row_sum(d) if level == "sequence" else x.row_mean(d)
    return x.to_tokens(per_row.clamp(-20, 20).exp())


@torch.no_grad()
def packed_divergence(x: LossInputs, kind: str) -> Tensor:
    """`divergence` of each token, packed."""
    d, over = x.log_ratio, kind.rpartition("_")[0]
    value = 0.5 * d.square() if kind.endswith("k2") else torch.expm1(d) - d
    if over == "token":
        return value
    if over == "seq_max":
        return x.to_tokens(x.valid_tokens.row_max(value))
    return x.to_tokens(x.row_sum(value) if over == "seq_sum" else x.row_mean(value))


@torch.no_grad()
def packed_weights(x: LossInputs, level: str, upper: float, lower: float | None, mode: str) -> Tensor:
    """`importance_weights` of each token, packed; gaps hold anything."""
    ratio = packed_ratio(x, level)
    if mode == "mask":
        lower = 1 / upper if lower is None else lower
        return ratio * ((ratio >= lower) & (ratio <= upper))
    return ratio.clamp(min=lower, max=upper)


@torch.no_grad()
def packed_kept(x: LossInputs, rejections: Sequence[tuple[str, float, float | None]], veto: float | None) -> Tensor:
    """Return the tokens that ``rejections`` (kind, upper, lower) and the veto keep, packed bool; gaps hold anything."""
    keeps = torch.ones_like(x.ratio, dtype=torch.bool)
    for kind, upper, lower in rejections:
        if kind in LEVELS:
            ratio = packed_ratio(x, kind)
            # NaN fails both, and is rejected as in `kept_tokens`
            keeps &= (ratio >= lower) & (ratio <= upper)
        else:
            assert kind in DIVERGENCES, kind
            keeps &= packed_divergence(x, kind) <= upper
    if veto is not None:
        is_low = (x.difference.exp() < veto).to(x.ratio.dtype)  # a gap's ratio is 1
        keeps &= x.to_tokens(x.valid_tokens.row_max(is_low)) == 0
    return keeps
