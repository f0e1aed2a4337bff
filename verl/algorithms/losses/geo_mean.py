"""GMPO: the geometric mean of the clipped ratios of a response."""

import torch

from verl.algorithms.losses.common import LossInputs, TokenLoss, builtin_policy_loss
from verl.algorithms.registry import About


@builtin_policy_loss(
    "geo_mean",
    about=About(
        "-A exp(mean over the response of log w, each bounded to -low ... high on the side its advantage pushes to)",
        "GMPO: single wild ratios; clip ratios near 0.4; `loss_agg_mode=seq-mean-token-mean`",
        "arXiv:2507.20673",
        options="actor.{clip_ratio,clip_ratio_low,clip_ratio_high}",
    ),
    loss_agg_mode="seq-mean-token-mean",
)
def compute_policy_loss_geo_mean(x: LossInputs) -> TokenLoss:
    """Weigh a response by the geometric mean of its clipped ratios, in which one extreme token counts 1 / T_i (GMPO).

    With A_i the response's mean advantage and s = sign(A_it),

        d_it = s min(s log w_it, s clip(log w_it, -clip_low, clip_high)),      l_it = -A_i exp(1/T_i sum_t d_it)

    the same for every token of the response. The gradient of a token whose bound holds is zero. The bounds are on the
    log-ratio; the paper uses 0.4 on both sides.

    Importance weights rho join in the same way, as verl has it: l_it is multiplied by exp(1/T_i sum_t log rho_it), so
    that one extreme weight does not decide for its response either. A weight of 0 (``rollout_is_mode=mask``) counts as
    1e-10.

    Published with ``loss_agg_mode=seq-mean-token-mean``. verl means over rows whatever the option says; here the
    option decides.

    Source: Zhao et al. 2025, equation 4 (arXiv:2507.20673); the weights: verl since v0.6.
    """
    low, high = x.clip_range
    log_ratio, sign = x.difference, x.advantages.sign()
    bounded = torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-low, high))
    ratio = x.row_mean(sign * bounded).clamp(max=20).exp()
    value = x.to_tokens(-x.row_mean(x.advantages) * ratio)
    is_free = bounded == sign * log_ratio
    # T_i equal losses, each with 1 / T_i of the slope: by log pi_t their sum has the slope `value`.
    # A token of A = 0 adds 0 to the mean whatever its ratio, and so gets none
    losses = x.with_gradient(value, dloss_dlogp=value * is_free * (sign != 0))
    weights = x.rollout_is_weights
    if weights is not None:
        # rows are summed over gaps too, where a clamped weight of 0 would count
        weights = x.to_tokens(x.row_mean(weights.clamp(min=1e-10).log() * x.is_valid).exp())
    return TokenLoss(losses, ~is_free, weights=weights)
