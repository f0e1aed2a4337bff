"""Policy losses that are a weighted log-likelihood: the plain policy gradient, and ways to make old samples count less.

Letters as in ``policy_loss``: A advantage, pi the policy, pi_old the one the batch was scored with, mu the one that
sampled, sg[] a constant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.objective import Tokens, register_policy_loss, section_of
from verl.algorithms.registry import About

Result = tuple[Tensor, dict[str, Tensor]]


@register_policy_loss(
    "gpg",
    "reinforce",
    about=About(
        "-A log pi",
        "one step on fresh samples",
        "arXiv:2504.02546",
        "test_policy_losses.py::test_loss_by_hand_in_a_batch_and_alone",
    ),
)
def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """Raise the probability of what was good: the policy gradient, with no ratio and no bound.

        l_t = -A log pi

    Right for one step on fresh samples. ``gpg`` and ``reinforce`` are the same; GPG's scale is in its advantage.

    Args:
        old_log_prob, log_prob, advantages: (B, R) float; differentiable in ``log_prob``; ``old_log_prob`` is read for
            the metrics only.
        response_mask: (B, R); 1 on tokens that count.
        config: unused.
        rollout_is_weights: (B, R) factors of each token's loss.

    Source: Williams 1992, https://doi.org/10.1007/BF00992696; Chu et al. 2025, equation 4 (arXiv:2504.02546).
    """
    tokens = Tokens(old_log_prob, log_prob, advantages, response_mask)
    return tokens.loss(-tokens.advantage * tokens.log_prob, -tokens.advantage, loss_agg_mode, rollout_is_weights)


@register_policy_loss(
    "tis",
    about=About(
        "-sg[clip(pi / mu, lower, upper)] A log pi, mu as the sampler saw it",
        "old samples, or an engine with other numerics; needs `rollout.calculate_log_probs=true`",
        "arXiv:1802.01561",
        "test_policy_losses.py::test_loss_by_hand_in_a_batch_and_alone",
        options="actor.policy_loss.tis_lower_bound actor.policy_loss.tis_upper_bound",
    ),
)
def compute_policy_loss_tis(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    rollout_log_probs: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """The policy gradient on samples of another policy, by importance weights that are cut where they would explode.

        l_t = -sg[clip(pi / mu, tis_lower_bound, tis_upper_bound)] A log pi

    mu is what the rollout engine says it sampled with, so the weight repairs both stale samples and an engine whose
    numbers differ from the trainer's. ROLL takes pi_old for mu; the two agree where engine and trainer do.

    Args:
        old_log_prob, log_prob, advantages: (B, R) float; differentiable in ``log_prob``; ``old_log_prob`` is read for
            the metrics only.
        response_mask: (B, R); 1 on tokens that count.
        rollout_log_probs: (B, R) float; log mu; ``rollout.calculate_log_probs`` makes it.
        config: read for ``policy_loss.tis_lower_bound`` and ``tis_upper_bound``.
        rollout_is_weights: (B, R) factors of each token's loss.

    Source: Espeholt et al. 2018, IMPALA, section 4.1 (arXiv:1802.01561).
    """
    options = section_of(config, "tis").policy_loss
    tokens = Tokens(old_log_prob, log_prob, advantages, response_mask)
    ratio = (tokens.log_prob - tokens.pack(rollout_log_probs)).clamp(-20, 20).exp()
    slope = -ratio.clamp(options.tis_lower_bound, options.tis_upper_bound) * tokens.advantage
    is_real = tokens.pack(response_mask) != 0
    is_cut, is_raised = is_real & (ratio > options.tis_upper_bound), is_real & (ratio < options.tis_lower_bound)
    return tokens.loss(slope * tokens.log_prob, slope, loss_agg_mode, rollout_is_weights, is_cut, is_raised)


@register_policy_loss(
    "topr",
    about=About(
        "-a A log pi if the score is positive, else -b sg[min(rho, 1)] A log pi, rho the product of w",
        "off-policy batches with many failures",
        "arXiv:2503.14286",
        "test_policy_losses.py::test_loss_by_hand_in_a_batch_and_alone",
        options="actor.policy_loss.topr_pos_weight actor.policy_loss.topr_neg_weight actor.policy_loss.topr_ratio",
    ),
)
def compute_policy_loss_topr(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    token_level_scores: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """Learn from successes as they are, and from failures only as far as the policy would still commit them.

        score_i > 0:   l_t = -topr_pos_weight A log pi
        score_i <= 0:  l_t = -topr_neg_weight sg[clip(rho, 0, 1)] A log pi

    rho is the ratio of the whole response, prod_t w_it, as published; with ``policy_loss.topr_ratio=token`` that of
    the token, w_it, which is ROLL's. Pushing a failure down without bound is what makes off-policy REINFORCE collapse.

    Args:
        old_log_prob, log_prob, advantages: (B, R) float; differentiable in ``log_prob``, once.
        response_mask: (B, R); 1 on tokens that count.
        token_level_scores: (B, R) float; the response's score is the sum over its tokens.
        config: read for ``policy_loss.topr_pos_weight``, ``topr_neg_weight``, ``topr_ratio``.
        rollout_is_weights: (B, R) factors of each token's loss.

    Source: Le Roux et al. 2025, Tapered Off-Policy REINFORCE, equation 5 (arXiv:2503.14286).
    """
    options = section_of(config, "topr").policy_loss
    tokens = Tokens(old_log_prob, log_prob, advantages, response_mask)
    if options.topr_ratio == "sequence":
        log_ratio = tokens.to_tokens(tokens.cells.row_sum(tokens.log_prob - tokens.old))
    else:
        log_ratio = tokens.log_ratio
    is_success = tokens.to_tokens((tokens.cells.row_sum(tokens.pack(token_level_scores)) > 0).to(log_ratio)) > 0
    taper = options.topr_neg_weight * log_ratio.clamp(max=0).exp()
    slope = -torch.where(is_success, options.topr_pos_weight, taper) * tokens.advantage
    is_cut = ~is_success & (log_ratio > 0)
    return tokens.loss(slope * tokens.log_prob, slope, loss_agg_mode, rollout_is_weights, is_cut)


@register_policy_loss(
    "kimi15",
    about=About(
        "-A log pi + tau/2 D log w, D the sum of log w over the response",
        "mirror descent, several steps a batch; `loss_agg_mode=seq-mean-token-sum`",
        "arXiv:2501.12599",
        "test_policy_losses.py::test_loss_by_hand_in_a_batch_and_alone",
        options="actor.policy_loss.kimi15_tau",
    ),
)
def compute_policy_loss_kimi15(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """The policy gradient, held back by the squared log-ratio of the response: policy mirror descent.

    With D_i = sum_t log w_it,

        sum_t l_it = -A_i log pi(y_i) + tau/2 D_i^2,      l_it = -A_it log pi_it + tau/2 D_i log w_it

    Published as a mean over responses of this sum, ``loss_agg_mode=seq-mean-token-sum``, with A the score above the
    group's mean (``grpo`` with ``norm_adv_by_std_in_grpo=False``). D grows with the length: tau is small.

    Args:
        old_log_prob, log_prob, advantages: (B, R) float; differentiable in ``log_prob``, once.
        response_mask: (B, R); 1 on tokens that count.
        config: read for ``policy_loss.kimi15_tau``.
        rollout_is_weights: (B, R) factors of each token's loss.

    Source: Kimi k1.5, 2025, equation 3 (arXiv:2501.12599).
    """
    tau = section_of(config, "kimi15").policy_loss.kimi15_tau
    tokens = Tokens(old_log_prob, log_prob, advantages, response_mask)
    pull = tau * tokens.to_tokens(tokens.cells.row_sum(tokens.log_prob - tokens.old))
    value = -tokens.advantage * tokens.log_prob + pull / 2 * (tokens.log_prob - tokens.old)
    return tokens.loss(value, pull - tokens.advantage, loss_agg_mode, rollout_is_weights)


@register_policy_loss(
    "dro",
    about=About(
        "-A log pi + beta/2 (log w)^2",
        "the same, token by token",
        "arXiv:2405.19107",
        "test_policy_losses.py::test_loss_by_hand_in_a_batch_and_alone",
        options="actor.policy_loss.dro_beta",
    ),
)
def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """The policy gradient, held back by the squared log-ratio of each token: direct reward optimization.

        l_t = -A log pi + beta/2 (log w)^2

    Its minimum over log pi is at log w = A / beta: how far a token may move is in proportion to its advantage, with no
    bound beyond which it is not pulled back. In the paper one log-ratio of the response stands for the tokens' and the
    advantage is the score above a learned value; tokens are verl's form.

    Args:
        old_log_prob, log_prob, advantages: (B, R) float; differentiable in ``log_prob``, once.
        response_mask: (B, R); 1 on tokens that count.
        config: read for ``policy_loss.dro_beta``.
        rollout_is_weights: (B, R) factors of each token's loss.

    Source: Richemond et al. 2024 (arXiv:2405.19107).
    """
    beta = section_of(config, "dro").policy_loss.dro_beta
    tokens = Tokens(old_log_prob, log_prob, advantages, response_mask)
    distance = tokens.log_prob - tokens.old
    value = -tokens.advantage * tokens.log_prob + beta / 2 * distance.square()
    return tokens.loss(value, beta * distance - tokens.advantage, loss_agg_mode, rollout_is_weights)
