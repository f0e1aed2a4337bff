"""How far the probabilities a sampler drew with are from the trainer's, for the same tokens under the same weights."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.kl import kl_penalty


def mismatch_metrics(rollout_log_probs: Tensor, actor_log_probs: Tensor) -> dict[str, float]:
    """Compare mu, what the sampler drew with, and pi, the trainer's policy, on the tokens that were drawn.

        training/rollout_probs_diff_{mean,max,std}      of |mu(y_t) - pi(y_t)|
        training/rollout_actor_probs_pearson_corr       of mu(y_t) and pi(y_t); left out where one of them is constant
        rollout_corr/kl                                 k1: mean of log mu - log pi, an estimate of KL(mu || pi)
        rollout_corr/k3_kl                              k3: mean of r - 1 - log r with r = pi / mu; never negative
        rollout_corr/rollout_is_eff_sample_size         (sum w)^2 / (T sum w^2) with w = r: the share of the tokens
                                                        that would count as much, were they drawn from pi

    ``training/rollout_probs_diff_valid`` is 1; with no token it is 0, and the only metric.

    Args:
        rollout_log_probs, actor_log_probs: (T,) log mu and log pi of the sampled tokens.

    Source: k1, k3: Schulman 2020, http://joschu.net/blog/kl-approx.html; effective sample size: Kong 1992.
    """
    if not rollout_log_probs.numel():
        return {"training/rollout_probs_diff_valid": 0.0}
    rollout, actor = rollout_log_probs.double(), actor_log_probs.double()
    mu, pi = rollout.exp(), actor.exp()
    difference = (mu - pi).abs()
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
    if correlation == correlation:
        metrics["training/rollout_actor_probs_pearson_corr"] = correlation
    return metrics
