"""The comparison of sampler and trainer, against values one can work out by hand."""

import math

import pytest
import torch

from verl.algorithms.correction import mismatch_metrics


def test_equal_probabilities_differ_by_nothing():
    log_probs = torch.log(torch.tensor([0.5, 0.25, 0.125]))
    metrics = mismatch_metrics(log_probs, log_probs)
    zero = ["training/rollout_probs_diff_max", "training/rollout_probs_diff_mean", "rollout_corr/kl"]
    assert [metrics[name] for name in zero] == [0, 0, 0] and abs(metrics["rollout_corr/k3_kl"]) < 1e-12
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1)


def test_two_tokens_by_hand():
    mu, pi = [0.5, 0.2], [0.25, 0.4]
    metrics = mismatch_metrics(torch.log(torch.tensor(mu)), torch.log(torch.tensor(pi)))
    ratios = [0.5, 2.0]
    expected = {
        "training/rollout_probs_diff_mean": 0.225,
        "training/rollout_probs_diff_max": 0.25,
        "training/rollout_probs_diff_std": 0.025,
        "rollout_corr/kl": 0.0,  # log 2 and -log 2
        "rollout_corr/k3_kl": sum(r - 1 - math.log(r) for r in ratios) / 2,
        "rollout_corr/rollout_is_eff_sample_size": sum(ratios) ** 2 / (2 * sum(r * r for r in ratios)),
        "training/rollout_actor_probs_pearson_corr": -1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_what_cannot_be_said_is_left_out():
    assert mismatch_metrics(torch.empty(0), torch.empty(0)) == {"training/rollout_probs_diff_valid": 0.0}
    constant = mismatch_metrics(torch.log(torch.tensor([0.5, 0.5])), torch.log(torch.tensor([0.5, 0.4])))
    assert "training/rollout_actor_probs_pearson_corr" not in constant
    assert all(math.isfinite(value) for value in constant.values())
