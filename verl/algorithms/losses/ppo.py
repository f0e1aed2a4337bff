"""PPO: the clipped objective, with clip-higher (DAPO) and dual clip."""

import torch
from torch import Tensor

from verl.algorithms.losses.common import LossInputs, TokenLoss, builtin_policy_loss
from verl.algorithms.registry import About


def clipped_objective(x: LossInputs, low: float, high: float, clip_ratio_c: float | None) -> TokenLoss:
    """Follow the advantage, but only while the policy stays near the one that sampled.

        A >= 0:  -min(w A, clip(w, 1 - clip_low, 1 + clip_high) A)
        A <  0:  the same, but never above -clip_ratio_c A

    The first line stops paying for a ratio that already moved far enough in the good direction. The second bounds what
    a bad token can cost once its ratio has exploded; ``clip_ratio_c=None`` leaves it out. log w is cut at +-20.

    dloss_dlogp = -w A, the slope of the unbounded objective, on tokens where that was chosen, and zero where a bound
    holds. Differentiable in ``log_prob`` only, once.

    Raises:
        ValueError: ``clip_ratio_c`` is not above 1.

    Source: Schulman et al. 2017, equation 7 (arXiv:1707.06347); unequal bounds ("clip-higher"): Yu et al. 2025, DAPO
    (arXiv:2503.14476); dual clip: Ye et al. 2019, equation 5 (arXiv:1912.09729).
    """
    if clip_ratio_c is not None and clip_ratio_c <= 1:
        raise ValueError(
            f"clip_ratio_c={clip_ratio_c} must exceed 1: at or below, it would cut tokens the policy has not moved. "
            f"Use 3.0 (the default), or null to switch the bound off."
        )
    free = -x.advantages * x.ratio
    bounded = -x.advantages * x.ratio.clamp(1 - low, 1 + high)
    pessimistic = torch.maximum(free, bounded)
    most = torch.inf if clip_ratio_c is None else clip_ratio_c
    # a good token's loss is never above zero: for it the dual clip bounds nothing
    # inf * 0 is NaN where A is 0: `where` leaves it out, and no gradient runs through A
    dual = torch.where(x.advantages < 0, -most * x.advantages, 0)
    value = torch.minimum(pessimistic, dual)
    # by value: inside the bounds all terms are equal, and a tie keeps its slope
    return TokenLoss(x.with_gradient(value, dloss_dlogp=free * (value == free)), bounded > free, pessimistic > dual)


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
    x = LossInputs(
        "vanilla",
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode,
        rollout_is_weights=rollout_is_weights,
    )
    loss, metrics = x.aggregate(clipped_objective(x, low, high, clip_ratio_c))
    return loss, metrics["actor/pg_clipfrac"], metrics["actor/ppo_kl"], metrics["actor/pg_clipfrac_lower"]


@builtin_policy_loss(
    "vanilla",
    about=[
        About(
            "-min(w A, clip(w, 1 - low, 1 + high) A)",
            "PPO; the default",
            "arXiv:1707.06347",
            "algorithms/losses/test_ppo.py::test_loss_and_shares_by_hand_in_every_mode",
            options="actor.{clip_ratio,clip_ratio_low,clip_ratio_high,clip_ratio_c}",
        ),
        About(
            "the same",
            '"clip-higher": leaves room for rare tokens to grow, e.g. 0.28 and 0.2',
            "arXiv:2503.14476",
            "algorithms/losses/test_ppo.py::test_loss_and_shares_by_hand_in_every_mode",
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
def compute_policy_loss_vanilla(x: LossInputs) -> TokenLoss:
    """``compute_policy_loss`` with the bounds of the ``actor`` section."""
    low, high = x.clip_range
    return clipped_objective(x, low, high, x.config.clip_ratio_c)
