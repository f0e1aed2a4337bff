"""Policy losses that bound the importance ratio in other ways than PPO: per response, softly, or by a divergence.

Letters as in ``policy_loss``: A advantage, w = pi(y_t) / pi_old(y_t), T_i tokens of response i, sg[] a constant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.objective import Tokens, clip_range, register_policy_loss, section_of
from verl.algorithms.registry import About

Result = tuple[Tensor, dict[str, Tensor]]


@register_policy_loss(
    "gspo",
    about=About(
        "-min(s A, clip(s, 1 - low, 1 + high) A), s the geometric mean of w over the response",
        "mixtures of experts, long responses; clip ratios near 3e-4; `loss_agg_mode=seq-mean-token-mean`",
        "arXiv:2507.18071",
        "test_policy_losses.py::test_loss_by_hand_in_a_batch_and_alone",
        options="actor.{clip_ratio,clip_ratio_low,clip_ratio_high}",
    ),
)
def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """Clip the ratio of the whole response, not of each token: rewards are given to responses.

        s_i = exp(1/T_i sum_t log w_it),      l_it = max(-s_i A_it, -clip(s_i, 1 - clip_low, 1 + clip_high) A_it)

    The gradient of token t is -s_i A_it, or zero where the clip decided (the paper's GSPO-token, which equals GSPO
    where all tokens of a response share their advantage). Clip ranges are far smaller than PPO's: the paper uses
    3e-4 and 4e-4. log s is cut at 10.

    Published with ``loss_agg_mode=seq-mean-token-mean``, where each response counts once. verl aggregates so whatever
    the option says; here the option decides.

    Args:
        old_log_prob, log_prob, advantages: (B, R) float; differentiable in ``log_prob``, once.
        response_mask: (B, R); 1 on tokens that count.
        config: read for ``clip_ratio``, ``clip_ratio_low``, ``clip_ratio_high``.
        rollout_is_weights: (B, R) factors of each token's loss.

    Source: Zheng et al. 2025, equations 5, 7 and 13 (arXiv:2507.18071).
    """
    low, high = clip_range(config, "gspo")
    tokens = Tokens(old_log_prob, log_prob, advantages, response_mask)
    ratio = tokens.to_tokens(tokens.row_mean(tokens.log_prob - tokens.old).clamp(max=10).exp())
    free = -tokens.advantage * ratio
    clipped = -tokens.advantage * ratio.clamp(1 - low, 1 + high)
    is_clipped = clipped > free
    return tokens.loss(torch.maximum(free, clipped), free * ~is_clipped, loss_agg_mode, rollout_is_weights, is_clipped)


@register_policy_loss(
    "geo_mean",
    about=About(
        "-A exp(mean over the response of log w, each bounded to -low ... high on the side its advantage pushes to)",
        "GMPO: single wild ratios; clip ratios near 0.4; `loss_agg_mode=seq-mean-token-mean`",
        "arXiv:2507.20673",
        "test_policy_losses.py::test_loss_by_hand_in_a_batch_and_alone",
        options="actor.{clip_ratio,clip_ratio_low,clip_ratio_high}",
    ),
)
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """Weigh a response by the geometric mean of its clipped ratios, which one wild token cannot carry away (GMPO).

    With A_i the response's mean advantage and s = sign(A_it),

        d_it = s min(s log w_it, s clip(log w_it, -clip_low, clip_high)),      l_it = -A_i exp(1/T_i sum_t d_it)

    the same for every token of the response. The gradient of a token whose bound holds is zero. The bounds are on the
    log-ratio; the paper uses 0.4 on both sides.

    Importance weights rho join in the same way, as verl has it: l_it is multiplied by exp(1/T_i sum_t log rho_it), so
    that one wild weight cannot carry a response away either. A weight of 0 (``rollout_is_mode=mask``) counts as 1e-10.

    Published with ``loss_agg_mode=seq-mean-token-mean``. verl means over rows whatever the option says; here the
    option decides.

    Args:
        old_log_prob, log_prob, advantages: (B, R) float; differentiable in ``log_prob``, once.
        response_mask: (B, R); 1 on tokens that count.
        config: read for ``clip_ratio``, ``clip_ratio_low``, ``clip_ratio_high``.
        rollout_is_weights: (B, R), not negative; their geometric mean over a response is the factor of its loss.

    Source: Zhao et al. 2025, equation 4 (arXiv:2507.20673); the weights: verl since v0.6.
    """
    low, high = clip_range(config, "geo_mean")
    tokens = Tokens(old_log_prob, log_prob, advantages, response_mask)
    log_ratio, sign = tokens.log_prob - tokens.old, tokens.advantage.sign()
    bounded = torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-low, high))
    ratio = tokens.row_mean(sign * bounded).clamp(max=20).exp()
    value = tokens.to_tokens(-tokens.row_mean(tokens.advantage) * ratio)
    is_free = bounded == sign * log_ratio
    slope = value * is_free * (sign != 0)
    if rollout_is_weights is not None:
        of_response = tokens.row_mean(tokens.pack(rollout_is_weights.clamp(min=1e-10).log())).exp()
        rollout_is_weights = of_response.unsqueeze(-1).expand(response_mask.shape)
    return tokens.loss(value, slope, loss_agg_mode, rollout_is_weights, ~is_free)


@register_policy_loss(
    "cispo",
    about=About(
        "-sg[clip(w, 1 - low, 1 + high)] A log pi",
        "rare tokens must go on teaching; `clip_ratio_low=1`: no lower bound, as published",
        "arXiv:2506.13585",
        "test_policy_losses.py::test_loss_by_hand_in_a_batch_and_alone",
        options="actor.{clip_ratio,clip_ratio_low,clip_ratio_high}",
    ),
)
def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """Cap the importance weight, but let every token teach: PPO's clip silences rare tokens that matter.

        l_t = -sg[clip(w, 1 - clip_low, 1 + clip_high)] A log pi

    The paper bounds only above: ``clip_ratio_low=1`` does that.

    Args:
        old_log_prob, log_prob, advantages: (B, R) float; differentiable in ``log_prob``, once.
        response_mask: (B, R); 1 on tokens that count.
        config: read for ``clip_ratio``, ``clip_ratio_low``, ``clip_ratio_high``.
        rollout_is_weights: (B, R) factors of each token's loss.

    Source: MiniMax-M1, 2025, equations 4 and 5 (arXiv:2506.13585).
    """
    low, high = clip_range(config, "cispo")
    tokens = Tokens(old_log_prob, log_prob, advantages, response_mask)
    weight = tokens.ratio.clamp(1 - low, 1 + high)
    slope = -weight * tokens.advantage
    return tokens.loss(
        slope * tokens.log_prob,
        slope,
        loss_agg_mode,
        rollout_is_weights,
        tokens.ratio > 1 + high,
        tokens.ratio < 1 - low,
    )


@register_policy_loss(
    "sapo",
    about=About(
        "-A 4 / tau sigmoid(tau (w - 1)), tau by the sign of A",
        "a soft bound instead of a clip; `loss_agg_mode=seq-mean-token-mean`",
        "arXiv:2511.20347",
        "test_policy_losses.py::test_loss_by_hand_in_a_batch_and_alone",
        options="actor.tau_pos actor.tau_neg",
    ),
)
def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """Fade a token out as its ratio leaves 1, instead of cutting it off.

        l_t = -f(w) A,      f(w) = 4 / tau sigmoid(tau (w - 1)),      tau = tau_pos if A > 0 else tau_neg

    f'(1) = 1, as without a bound; far from 1 the slope vanishes. A larger tau fades faster; the paper has tau_neg above
    tau_pos, since a falling token raises all others.

    Published with ``loss_agg_mode=seq-mean-token-mean``. verl aggregates so whatever the option says; here the option
    decides.

    Args:
        old_log_prob, log_prob, advantages: (B, R) float; differentiable in ``log_prob``, once.
        response_mask: (B, R); 1 on tokens that count.
        config: read for ``tau_pos``, ``tau_neg``.
        rollout_is_weights: (B, R) factors of each token's loss.

    Source: Gao et al. 2025, equations 5 to 7 (arXiv:2511.20347).
    """
    config = section_of(config, "sapo")
    tokens = Tokens(old_log_prob, log_prob, advantages, response_mask)
    tau = torch.full_like(tokens.ratio, config.tau_neg).masked_fill_(tokens.advantage > 0, config.tau_pos)
    gate = torch.sigmoid(tau * (tokens.ratio - 1))
    slope = -4 * gate * (1 - gate) * tokens.ratio * tokens.advantage
    return tokens.loss(-4 / tau * gate * tokens.advantage, slope, loss_agg_mode, rollout_is_weights)


@register_policy_loss(
    "dppo_tv",
    about=About(
        "-sg[min(w, c)] A log pi, or 0 once pi moved by more than low or high",
        "off-policy steps with rare tokens; clip ratios bound pi - pi_old",
        "arXiv:2602.04879",
        "test_policy_losses.py::test_loss_by_hand_in_a_batch_and_alone",
        options="actor.{clip_ratio,clip_ratio_low,clip_ratio_high,clip_ratio_c}",
    ),
)
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """Stop a token once its *probability* moved far, not its ratio: a rare token doubles for nothing.

        l_t = -sg[M min(w, clip_ratio_c)] A log pi
        M = 0 where A > 0 and pi - pi_old > clip_high, or A <= 0 and pi_old - pi > clip_low; else 1

    |pi - pi_old| is the total variation between the two policies seen as "this token or another".

    Args:
        old_log_prob, log_prob, advantages: (B, R) float; differentiable in ``log_prob``, once.
        response_mask: (B, R); 1 on tokens that count.
        config: read for ``clip_ratio``, ``clip_ratio_low``, ``clip_ratio_high``, here bounds on a difference of
            probabilities, and ``clip_ratio_c`` (null: no cap; the paper advises a large one).
        rollout_is_weights: (B, R) factors of each token's loss.

    Source: Qi et al. 2026, equation 12 (arXiv:2602.04879).
    """
    low, high = clip_range(config, "dppo_tv")
    tokens = Tokens(old_log_prob, log_prob, advantages, response_mask)
    moved = tokens.log_prob.exp() - tokens.old.exp()
    is_held = torch.where(tokens.advantage > 0, moved > high, -moved > low)
    return _held_policy_gradient(tokens, is_held, config, loss_agg_mode, rollout_is_weights)


@register_policy_loss(
    "dppo_kl",
    about=About(
        'the same, once KL(pi_old, pi) of "this token or another" exceeds low or high',
        "the same; clip ratios in nats",
        "arXiv:2602.04879",
        "test_policy_losses.py::test_loss_by_hand_in_a_batch_and_alone",
        options="actor.{clip_ratio,clip_ratio_low,clip_ratio_high,clip_ratio_c}",
    ),
)
def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """Stop a token once the KL divergence of "this token or another" moved far, and in the direction it is pushed.

        D = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))
        l_t = -sg[M min(w, clip_ratio_c)] A log pi
        M = 0 where A > 0, pi > pi_old and D > clip_high, or A <= 0, pi < pi_old and D > clip_low; else 1

    Args:
        old_log_prob, log_prob, advantages: (B, R) float; differentiable in ``log_prob``, once.
        response_mask: (B, R); 1 on tokens that count.
        config: read for ``clip_ratio``, ``clip_ratio_low``, ``clip_ratio_high``, here bounds on D in nats, and
            ``clip_ratio_c`` (null: no cap).
        rollout_is_weights: (B, R) factors of each token's loss.

    Source: Qi et al. 2026, equation 13 (arXiv:2602.04879).
    """
    low, high = clip_range(config, "dppo_kl")
    tokens = Tokens(old_log_prob, log_prob, advantages, response_mask)
    old, new = tokens.old.exp(), tokens.log_prob.exp()
    rest = (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    divergence = old * (tokens.old - tokens.log_prob) + rest
    is_held = torch.where(tokens.advantage > 0, (divergence > high) & (new > old), (divergence > low) & (new < old))
    return _held_policy_gradient(tokens, is_held, config, loss_agg_mode, rollout_is_weights)


def _held_policy_gradient(
    tokens: Tokens, is_held: Tensor, config: Any, loss_agg_mode: str, rollout_is_weights: Tensor | None
) -> Result:
    """-sg[min(w, clip_ratio_c)] A log pi on tokens that are not held."""
    most = torch.inf if config.clip_ratio_c is None else config.clip_ratio_c
    slope = -tokens.ratio.clamp(max=most) * tokens.advantage * ~is_held
    is_capped = (tokens.ratio > most) & ~is_held
    return tokens.loss(slope * tokens.log_prob, slope, loss_agg_mode, rollout_is_weights, is_held, is_capped)
