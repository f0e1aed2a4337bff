"""SAPO: a sigmoid gate of the ratio in place of a clip."""

import torch

from verl.algorithms.losses.common import LossInputs, TokenLoss, builtin_policy_loss
from verl.algorithms.registry import About


@builtin_policy_loss(
    "sapo",
    about=About(
        "-A 4 / tau sigmoid(tau (w - 1)), tau by the sign of A",
        "a soft bound instead of a clip; `loss_agg_mode=seq-mean-token-mean`",
        "arXiv:2511.20347",
        options="actor.tau_pos actor.tau_neg",
    ),
    loss_agg_mode="seq-mean-token-mean",
)
def compute_policy_loss_sapo(x: LossInputs) -> TokenLoss:
    """Reduce the gradient of a token smoothly as its ratio leaves 1, instead of clipping it.

        l_t = -f(w) A,      f(w) = 4 / tau sigmoid(tau (w - 1)),      tau = tau_pos if A > 0 else tau_neg

    f'(1) = 1, as without a bound; far from 1 the slope vanishes. A larger tau fades faster; the paper has tau_neg above
    tau_pos, since a falling token raises all others.

    Published with ``loss_agg_mode=seq-mean-token-mean``. verl aggregates so whatever the option says; here the option
    decides.

    Source: Gao et al. 2025, equations 5 to 7 (arXiv:2511.20347).
    """
    config = x.config
    tau = torch.full_like(x.ratio, config.tau_neg).masked_fill_(x.advantages > 0, config.tau_pos)
    gate = torch.sigmoid(tau * (x.ratio - 1))
    # d sigmoid = gate (1 - gate), times d w / d log pi = w; tau cancels against 4 / tau
    dloss_dlogp = -4 * gate * (1 - gate) * x.ratio * x.advantages
    return TokenLoss(x.with_gradient(-4 / tau * gate * x.advantages, dloss_dlogp))
