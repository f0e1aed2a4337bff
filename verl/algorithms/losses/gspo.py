"""GSPO: the clipped objective of the ratio of the whole response."""

import torch

from verl.algorithms.losses.common import LossInputs, TokenLoss, builtin_policy_loss
from verl.algorithms.registry import About


@builtin_policy_loss(
    "gspo",
    about=About(
        "-min(s A, clip(s, 1 - low, 1 + high) A), s the geometric mean of w over the response",
        "mixtures of experts, long responses; clip ratios near 3e-4; `loss_agg_mode=seq-mean-token-mean`",
        "arXiv:2507.18071",
        options="actor.{clip_ratio,clip_ratio_low,clip_ratio_high}",
    ),
    loss_agg_mode="seq-mean-token-mean",
)
def compute_policy_loss_gspo(x: LossInputs) -> TokenLoss:
    """Clip the ratio of the whole response, not of each token: rewards are given to responses.

        s_i = exp(1/T_i sum_t log w_it),      l_it = max(-s_i A_it, -clip(s_i, 1 - clip_low, 1 + clip_high) A_it)

    The gradient of token t is -s_i A_it, or zero where the clip decided (the paper's GSPO-token, which equals GSPO
    where all tokens of a response share their advantage). Clip ranges are far smaller than PPO's: the paper uses
    3e-4 and 4e-4. log s is cut at 10.

    Published with ``loss_agg_mode=seq-mean-token-mean``, where each response counts once. verl aggregates so whatever
    the option says; here the option decides.

    Source: Zheng et al. 2025, equations 5, 7 and 13 (arXiv:2507.18071).
    """
    low, high = x.clip_range
    # `difference`, not `log_ratio`: cutting each token at +-20 would change the mean over the response
    ratio = x.to_tokens(x.row_mean(x.difference).clamp(max=10).exp())
    free = -x.advantages * ratio
    bounded = -x.advantages * ratio.clamp(1 - low, 1 + high)
    is_clipped = bounded > free
    return TokenLoss(x.with_gradient(torch.maximum(free, bounded), dloss_dlogp=free * ~is_clipped), is_clipped)
