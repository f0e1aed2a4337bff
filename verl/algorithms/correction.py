"""Rollout correction: mismatch of rollout engine and trainer, importance weights, rejection of tokens.

A sampler's mu and the trainer's pi_old are meant to be one policy. Other kernels, fewer bits or older weights make them
two. Pure functions on (B, R) tensors, independent of config and loss. Results are constants: no gradient runs through.

Letters: d_it = log pi_old(y_it) - log mu(y_it), T_i unmasked tokens of response i.
"""

import torch
from torch import Tensor

from verl.algorithms.kl import kl_penalty
from verl.algorithms.registry import control

LEVELS = ("token", "sequence", "geometric")
"""Levels of a ratio: each token, the product over the response, or its geometric mean."""

DIVERGENCES = tuple(f"{over}_{kind}" for over in ("token", "seq_sum", "seq_mean", "seq_max") for kind in ("k2", "k3"))
"""Estimates of a divergence, ``<level>_<estimator>``."""


@torch.no_grad()
def importance_ratio(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, level: str) -> Tensor:
    """Importance ratio: how many times likelier a token is under the trainer's policy than under the rollout engine's.

        token      r_it = exp(d_it)
        sequence   r_it = exp(sum_t d_it)               the same for all tokens of response i: unbiased, high variance
        geometric  r_it = exp(1 / T_i sum_t d_it)       likewise: their geometric mean, of one size at any length

    The exponent is cut at +-20. Masked tokens are in no sum.

    Args:
        old_log_prob, rollout_log_prob: (B, R) float; log pi_old and log mu.
        response_mask: (B, R); 1 on tokens the policy sampled.
        level: one of ``LEVELS``.

    Returns:
        (B, R) float64; zero where masked.

    Raises:
        ValueError: unknown level.

    Source: token: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; sequence and geometric: Liu, Li et al.
    2025, https://richardli.xyz/rl-collapse.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level!r} is no level of an importance ratio: use one of {', '.join(LEVELS)}.")
    is_valid = response_mask.bool()
    # `where`, not a product with the mask: log-probs of masked tokens may be NaN or -inf
    exponent = torch.where(is_valid, old_log_prob.double() - rollout_log_prob.double(), 0)
    # cut after the sum: the bound is that of the ratio, not of each token's part in it
    exponent = _over_response(exponent, is_valid, level).clamp(-20, 20)
    return torch.where(is_valid, exponent.exp(), 0)


@torch.no_grad()
def divergence(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, kind: str) -> Tensor:
    """Divergence of the two policies, never negative:

        k2  d_it^2 / 2          k3  exp(d_it) - 1 - d_it

    of each token (``token_k3``), or the sum, mean or largest over the response (``seq_sum_k3``, ``seq_mean_k3``,
    ``seq_max_k3``), the same for all its tokens. d is cut at +-20.

    Args:
        old_log_prob, rollout_log_prob, response_mask: as of ``importance_ratio``.
        kind: one of ``DIVERGENCES``.

    Returns:
        (B, R) float64; zero where masked.

    Raises:
        ValueError: unknown kind.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; rejection by them: Li et al. 2025 (arXiv:2512.23075).
    """
    if kind not in DIVERGENCES:
        raise ValueError(f"kind={kind!r} is no estimate of a divergence: use one of {', '.join(DIVERGENCES)}.")
    is_valid = response_mask.bool()
    d = torch.where(is_valid, old_log_prob.double() - rollout_log_prob.double(), 0).clamp(-20, 20)
    # expm1: exp(d) - 1 - d would cancel where the two policies nearly agree
    value = 0.5 * d.square() if kind.endswith("k2") else torch.expm1(d) - d
    return torch.where(is_valid, _over_response(value, is_valid, kind.rpartition("_")[0]), 0)


@control(
    "algorithm.rollout_correction.rollout_is",
    "the policy loss of a token times min(r, upper), r = pi_old / mu (`truncate`), or times r "
    "within the bounds and 0 beyond (`mask`)",
    "kernels, number formats and older weights that make sampler and trainer differ",
    "[Yao et al. 2025](https://fengyao.notion.site/off-policy-rl)",
    "test_correction.py::test_weights_by_hand",
    options="algorithm.rollout_correction.{rollout_is,rollout_is_threshold,rollout_is_threshold_lower,"
    "rollout_is_mode,rollout_is_batch_normalize}",
)
@torch.no_grad()
def importance_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    level: str = "token",
    upper: float = 2.0,
    lower: float | None = None,
    mode: str = "truncate",
    normalise: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Factors of the policy loss that make tokens of mu count as if sampled from pi_old, within bounds.

    With r of ``importance_ratio``:

        truncate  w = min(max(r, lower), upper)             lower null: no lower bound
        mask      w = r if lower <= r <= upper, else 0      lower null: 1 / upper

    Truncation trades a bias for bounded variance (Ionides 2008); ``mask`` (IcePop) takes the gradient of
    tokens the two disagree about. A token of weight 0 is still counted where losses are averaged; ``kept_tokens`` does
    not count it.

    ``normalise`` divides by the mean weight, of tokens or, at the other levels, of responses: bounds first. A batch
    whose weights are all 0 stays so.

    Args:
        old_log_prob, rollout_log_prob, response_mask, level: as of ``importance_ratio``.
        upper, lower: bounds of the ratio.

    Returns:
        weights (B, R) like ``old_log_prob``, zero where masked; metrics below ``rollout_corr/``, over tokens or, at the
        other levels, responses: ``rollout_is_{mean,std,min,max}`` of the weights, ``rollout_is_eff_sample_size`` =
        (sum w)^2 / (n sum w^2), ``rollout_is_ratio_fraction_{high,low}``, the shares beyond a bound. No metrics of a
        batch without tokens.

    Raises:
        ValueError: unknown level or mode.

    Source: truncation: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; IcePop: Ling team 2025
    (arXiv:2510.18855); normalisation: Owen 2013, Monte Carlo theory, section 9.2.
    """
    is_valid = response_mask.bool()
    ratio = importance_ratio(old_log_prob, rollout_log_prob, is_valid, level)
    if mode == "mask":
        lower = 1 / upper if lower is None else lower
        weights = ratio * ((ratio >= lower) & (ratio <= upper))
    elif mode == "truncate":
        # clamp lifts the zeros of masked tokens to `lower`
        weights = torch.where(is_valid, ratio.clamp(min=lower, max=upper), 0)
    else:
        raise ValueError(f"mode={mode!r} is no way to bound importance weights: use truncate or mask.")
    # at the level of responses one number each: a long response must not count once a token
    ratios, units = (_units(x, is_valid, level) for x in (ratio, weights))
    if not len(units):
        return weights.to(old_log_prob.dtype), {}
    if normalise and (mean := units.mean()) > 0:
        weights, units = weights / mean, units / mean
    metrics = {
        "rollout_is_mean": units.mean(),
        "rollout_is_std": units.std(unbiased=False),
        "rollout_is_min": units.min(),
        "rollout_is_max": units.max(),
        # the floor makes it 0, not NaN, where every weight is 0; float64 holds it
        "rollout_is_eff_sample_size": units.sum() ** 2 / (len(units) * (units**2).sum()).clamp(min=1e-300),
        "rollout_is_ratio_fraction_high": (ratios > upper).double().mean(),
    }
    if lower is not None:
        metrics["rollout_is_ratio_fraction_low"] = (ratios < lower).double().mean()
    return weights.to(old_log_prob.dtype), _named(metrics)


@control(
    "algorithm.rollout_correction.rollout_rs",
    "tokens, or responses, with r beyond lower ... upper leave the loss; with a token below the veto, "
    "the whole response",
    "the few on which sampler and trainer disagree wildly",
    "[Liu, Li et al. 2025](https://richardli.xyz/rl-collapse)",
    "test_correction.py::test_what_is_kept_by_hand",
    options="algorithm.rollout_correction.{rollout_rs,rollout_rs_threshold,rollout_rs_threshold_lower,"
    "rollout_token_veto_threshold}",
)
@torch.no_grad()
def kept_tokens(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    level: str | None = None,
    upper: float = 2.0,
    lower: float | None = None,
    veto: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return the mask without tokens too far from the trainer's policy, as if they had never been sampled.

    Kept are tokens with lower <= r <= upper, r of ``importance_ratio`` at ``level`` (at the levels of responses that
    is all of one or nothing); or, where ``level`` names a ``divergence``, with that up to ``upper``. Of a response with
    a single token of exp(d_it) < ``veto`` nothing is kept. A ratio that is NaN is rejected.

    Args:
        old_log_prob, rollout_log_prob, response_mask: as of ``importance_ratio``.
        level: one of ``LEVELS`` or ``DIVERGENCES``. None: only ``veto`` rejects.
        upper, lower: bounds; ``lower`` None: 1 / upper of a ratio, none of a divergence.
        veto: None: no such bound.

    Returns:
        (B, R), of the dtype of ``response_mask``, nowhere above it; metrics below ``rollout_corr/``:
        ``rollout_rs_masked_fraction``, the share of tokens that were rejected; ``rollout_rs_seq_masked_fraction``, of
        responses that lost a token; ``rollout_rs_ratio_fraction_{high,low}``, the shares beyond each bound;
        ``rollout_is_veto_fraction``, of responses with a veto. No metrics of a batch without tokens.

    Raises:
        ValueError: unknown level.

    Source: Liu, Li et al. 2025, https://richardli.xyz/rl-collapse.
    """
    is_valid = response_mask.bool()
    keeps, metrics = is_valid, {}
    if not is_valid.any():
        return response_mask, {}
    if level is not None:
        if level in LEVELS:
            lower = 1 / upper if lower is None else lower
            ratio = importance_ratio(old_log_prob, rollout_log_prob, is_valid, level)
        else:
            lower, ratio = 0.0, divergence(old_log_prob, rollout_log_prob, is_valid, level)
        keeps = keeps & (ratio >= lower) & (ratio <= upper)  # NaN fails both comparisons: it is rejected
        ratios = _units(ratio, is_valid, level)
        metrics["rollout_rs_ratio_fraction_high"] = (ratios > upper).double().mean()
        metrics["rollout_rs_ratio_fraction_low"] = (ratios < lower).double().mean()
    has_tokens = is_valid.any(-1)  # rows without a token are no responses, and in no share
    if veto is not None:
        # by token whatever `level` is, and not cut at +-20: a veto may lie below exp(-20)
        catastrophic = (old_log_prob.double() - rollout_log_prob.double()).exp() < veto
        is_vetoed = (catastrophic & is_valid).any(-1)
        keeps = keeps & ~is_vetoed.unsqueeze(-1)
        metrics["rollout_is_veto_fraction"] = is_vetoed[has_tokens].double().mean()
    is_rejected = is_valid & ~keeps
    metrics["rollout_rs_masked_fraction"] = is_rejected[is_valid].double().mean()
    metrics["rollout_rs_seq_masked_fraction"] = is_rejected.any(-1)[has_tokens].double().mean()
    return response_mask * keeps, _named(metrics)


def _over_response(x: Tensor, is_valid: Tensor, level: str) -> Tensor:
    """x, zero where masked, of each token; or its sum, mean or largest over the response, for all of its tokens."""
    if level == "token":
        return x
    if level == "seq_max":
        # divergences are not negative, so that the zeros of masked tokens are never the largest
        return x.amax(-1, keepdim=True).expand_as(x)
    total = x.sum(-1, keepdim=True)
    is_sum = level in ("sequence", "seq_sum")
    return (total if is_sum else total / is_valid.sum(-1, keepdim=True).clamp(min=1)).expand_as(x)


def _units(x: Tensor, is_valid: Tensor, level: str) -> Tensor:
    """One number a token or, where all tokens of a response have the same, one a response; x is not negative."""
    # valid tokens share one number and masked ones hold 0: the largest is that number
    return x[is_valid] if level.startswith("token") else x.amax(-1)[is_valid.any(-1)]


def _named(metrics: dict[str, Tensor]) -> dict[str, float]:
    return {f"rollout_corr/{name}": value.item() for name, value in metrics.items()}


def mismatch_metrics(rollout_log_probs: Tensor, actor_log_probs: Tensor) -> dict[str, float]:
    """Compare mu, the rollout engine's probabilities, and pi, the trainer's policy, on the sampled tokens.

        training/rollout_probs_diff_{mean,max,std}      of |mu(y_t) - pi(y_t)|
        training/rollout_actor_probs_pearson_corr       of mu(y_t) and pi(y_t); left out where one of them is constant
        rollout_corr/kl                                 k1: mean of log mu - log pi, an estimate of KL(mu || pi)
        rollout_corr/k3_kl                              k3: mean of r - 1 - log r with r = pi / mu; never negative
        rollout_corr/rollout_is_eff_sample_size         (sum w)^2 / (T sum w^2) with w = r: the share of the tokens
                                                        that would count as much, were they sampled from pi

    ``training/rollout_probs_diff_valid`` is 1; with no token it is 0, and the only metric.

    Args:
        rollout_log_probs, actor_log_probs: (T,) log mu and log pi of the sampled tokens.

    Source: k1, k3: Schulman 2020, http://joschu.net/blog/kl-approx.html; effective sample size: Kong 1992.
    """
    if not rollout_log_probs.numel():
        return {"training/rollout_probs_diff_valid": 0.0}
    rollout, actor = rollout_log_probs.double(), actor_log_probs.double()
    mu, pi = rollout.exp(), actor.exp()
    difference = (mu - pi).abs()  # of probabilities, not of their logarithms: rare tokens differ much in these
    # cut as in `importance_ratio`: one token of exp(50) would be the whole sample
    weights = (actor - rollout).clamp(-20, 20).exp()
    metrics = {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": difference.max().item(),
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_std": difference.std(unbiased=False).item(),
        "rollout_corr/kl": kl_penalty(rollout, actor, "k1").mean().item(),
        "rollout_corr/k3_kl": kl_penalty(rollout, actor, "k3").mean().item(),
        "rollout_corr/rollout_is_eff_sample_size": (weights.mean() ** 2 / (weights**2).mean()).item(),
    }
    correlation = torch.corrcoef(torch.stack([mu, pi]))[0, 1].item() if len(mu) > 1 else float("nan")
    if correlation == correlation:  # NaN where mu or pi is constant
        metrics["training/rollout_actor_probs_pearson_corr"] = correlation
    return metrics
