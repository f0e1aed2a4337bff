"""DPPO: no gradient for tokens whose probability moved far, by total variation or KL divergence."""

import torch
from torch import Tensor

from verl.algorithms.losses.common import LossInputs, TokenLoss, builtin_policy_loss
from verl.algorithms.registry import About


@builtin_policy_loss(
    "dppo_tv",
    about=About(
        "-sg[min(w, c)] A log pi, or 0 once pi moved by more than low or high",
        "off-policy steps with rare tokens; clip ratios bound pi - pi_old",
        "arXiv:2602.04879",
        options="actor.{clip_ratio,clip_ratio_low,clip_ratio_high,clip_ratio_c}",
    ),
)
def compute_policy_loss_dppo_tv(x: LossInputs) -> TokenLoss:
    """Drop the gradient of a token once its *probability* moved far, not its ratio: rare tokens double at small moves.

        l_t = -sg[M min(w, clip_ratio_c)] A log pi
        M = 0 where A > 0 and pi - pi_old > clip_high, or A <= 0 and pi_old - pi > clip_low; else 1

    |pi - pi_old| is the total variation between the two policies seen as "this token or another".

    Source: Qi et al. 2026, equation 12 (arXiv:2602.04879).
    """
    low, high = x.clip_range
    moved = x.log_prob.detach().exp() - x.old_log_prob.exp()
    # one side only: a token that moved against its advantage is free to come back
    is_held = torch.where(x.advantages > 0, moved > high, -moved > low)
    return _policy_gradient_unless(is_held, x)


@builtin_policy_loss(
    "dppo_kl",
    about=About(
        'the same, once KL(pi_old, pi) of "this token or another" exceeds low or high',
        "the same; clip ratios in nats",
        "arXiv:2602.04879",
        options="actor.{clip_ratio,clip_ratio_low,clip_ratio_high,clip_ratio_c}",
    ),
)
def compute_policy_loss_dppo_kl(x: LossInputs) -> TokenLoss:
    """Drop the gradient of a token once the KL of "this token or another" moved far in the direction it is pushed.

        D = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))
        l_t = -sg[M min(w, clip_ratio_c)] A log pi
        M = 0 where A > 0, pi > pi_old and D > clip_high, or A <= 0, pi < pi_old and D > clip_low; else 1

    Source: Qi et al. 2026, equation 13 (arXiv:2602.04879).
    """
    low, high = x.clip_range
    old, new = x.old_log_prob.exp(), x.log_prob.detach().exp()
    # 1e-8: a token of probability 1 leaves nothing to the others
    rest = (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    divergence = old * (x.old_log_prob - x.log_prob.detach()) + rest
    is_held = torch.where(x.advantages > 0, (divergence > high) & (new > old), (divergence > low) & (new < old))
    return _policy_gradient_unless(is_held, x)


def _policy_gradient_unless(is_held: Tensor, x: LossInputs) -> TokenLoss:
    """-sg[min(w, clip_ratio_c)] A log pi on tokens that are not held."""
    most = torch.inf if x.config.clip_ratio_c is None else x.config.clip_ratio_c
    weight = x.ratio.clamp(max=most) * ~is_held
    is_capped = (x.ratio > most) & ~is_held
    return TokenLoss(-weight * x.advantages * x.log_prob, is_held, is_capped)
