"""TOPR: tapered off-policy REINFORCE."""

import torch

from verl.algorithms.losses.common import LossInputs, TokenLoss, builtin_policy_loss
from verl.algorithms.registry import About


@builtin_policy_loss(
    "topr",
    about=About(
        "-a A log pi if the score is positive, else -b sg[min(rho, 1)] A log pi, rho the product of w",
        "off-policy batches with many failures",
        "arXiv:2503.14286",
        options="actor.policy_loss.topr_pos_weight actor.policy_loss.topr_neg_weight actor.policy_loss.topr_ratio",
    ),
    columns=("token_level_scores",),
)
def compute_policy_loss_topr(x: LossInputs) -> TokenLoss:
    """Weigh successes fully, and failures by how likely the policy still is to sample them.

        score_i > 0:   l_t = -topr_pos_weight A log pi
        score_i <= 0:  l_t = -topr_neg_weight sg[clip(rho, 0, 1)] A log pi

    rho is the ratio of the whole response, prod_t w_it, as published; with ``policy_loss.topr_ratio=token`` that of
    the token, w_it, which is ROLL's. Pushing a failure down without bound is what makes off-policy REINFORCE collapse.

    Source: Le Roux et al. 2025, Tapered Off-Policy REINFORCE, equation 5 (arXiv:2503.14286).
    """
    options = x.config.policy_loss
    if options.topr_ratio == "sequence":
        log_ratio = x.to_tokens(x.row_sum(x.difference))
    else:
        log_ratio = x.log_ratio
    # per response, then spread: a response's tokens succeed or fail together
    is_success = x.to_tokens((x.row_sum(x.columns["token_level_scores"]) > 0).to(log_ratio)) > 0
    taper = options.topr_neg_weight * log_ratio.clamp(max=0).exp()
    weight = torch.where(is_success, options.topr_pos_weight, taper)
    return TokenLoss(-weight * x.advantages * x.log_prob, ~is_success & (log_ratio > 0))
