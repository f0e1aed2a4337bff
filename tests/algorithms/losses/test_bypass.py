"""The loss of ``bypass_mode``: ratios to the sampler, made, bounded and rejected where the loss is made."""

import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.batches import normal, ragged_mask
from tests.algorithms.losses.test_every_loss import ADV, MASK, NEW, OLD, actor, run
from verl.algorithms.correction import DIVERGENCES, divergence, kept_tokens
from verl.algorithms.losses import PPOLoss, TokenOutputs

# log r of the tokens: 0.1, 0.5, -0.7, 1.3 | -0.2, 0.1
KEY = "policy_loss__rollout_correction__"
REINFORCE = {f"{KEY}loss_type": "reinforce"}


def bypass(new=NEW, mode="token-mean", rows=slice(None), **options):
    config = actor("bypass_mode", **options)
    return run("bypass_mode", config, new[rows], OLD[rows], ADV[rows], MASK[rows], mode)


@pytest.mark.parametrize(
    ("options", "whole", "second"),
    [
        # -min(r A, clip(r, .8, 1.28) A): -1.105171, -2.56, 0.8, 1.5 (dual clip) | 1.637462, -0.552585
        ({}, -0.046716, 0.542438),
        # token r within 2/3 ... 3/2: keeps 0.1 | -0.2, 0.1 of the log-ratios
        ({f"{KEY}rollout_rs": "token", f"{KEY}rollout_rs_threshold": 1.5}, -0.003382, 0.542438),
        # geometric means exp(0.3) and exp(-0.05): the first is over 1.2
        ({f"{KEY}rollout_rs": "seq_mean_k1", f"{KEY}rollout_rs_threshold": 1.2}, 0.180813, 0.542438),
        # the veto: exp(-0.7) = 0.4966 is below 0.6
        ({f"{KEY}rollout_token_veto_threshold": 0.6}, 0.180813, 0.542438),
        # -A log pi, no weights: 0.9, 3, -1.2, -0.1 | -1, 0.3
        (REINFORCE, 0.316667, -0.35),
        # r up to 1.5: 1.105171, 1.5, 0.496585, 1.5 | 0.818731, 1.105171
        (REINFORCE | {f"{KEY}rollout_is": "token", f"{KEY}rollout_is_threshold": 1.5}, 0.710262, -0.243590),
        # IcePop: r within 0.6 ... 1.5 or 0
        (REINFORCE | {f"{KEY}rollout_is": "token", f"{KEY}rollout_is_threshold": "0.6_1.5"}, 0.084579, -0.243590),
        # r of responses: exp(1.2), bounded to 2, and exp(-0.1)
        (REINFORCE | {f"{KEY}rollout_is": "sequence"}, 0.761102, -0.316693),
    ],
)
def test_by_hand_in_a_batch_and_alone(options, whole, second):
    for rows, expected in ((slice(None), whole), (slice(1, 2), second)):
        loss, metrics = bypass(rows=rows, **options)
        assert_close(loss, torch.tensor(expected), rtol=0, atol=1e-6)
        assert "actor/ppo_kl" in metrics


def test_metrics_tell_what_was_rejected_and_how_much_is_left_of_a_weight():
    options = {f"{KEY}rollout_rs": "token", f"{KEY}rollout_rs_threshold": 1.5, f"{KEY}rollout_is": "token"}
    _, metrics = bypass(**REINFORCE, **options)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5
    assert metrics["rollout_corr/rollout_is_mean"].item() == pytest.approx(1.195729)
    assert not any(name.startswith("rollout_corr") for name in bypass()[1])


def test_without_corrections_it_is_the_clipped_objective():
    assert_close(bypass()[0], run("vanilla", actor("vanilla"), NEW)[0])


@pytest.mark.parametrize("options", [{}, REINFORCE, REINFORCE | {f"{KEY}rollout_is": "sequence"}])
def test_the_gradient_is_that_of_finite_differences_with_weights_held(options):
    options = {**options, f"{KEY}rollout_rs": "token", f"{KEY}rollout_rs_threshold": 1.5}
    new = NEW.double().requires_grad_()
    (grad,) = torch.autograd.grad(bypass(new, **options)[0], new)
    ratio, step = (NEW - OLD).double(), 1e-6
    keep = (ratio.abs() <= torch.tensor(1.5).log()) & MASK.bool()
    assert (grad[~keep] == 0).all()
    if not options.get(f"{KEY}rollout_is"):
        for cell in keep.nonzero().tolist():
            ends = []
            for sign in (1, -1):
                moved = NEW.double().clone()
                moved[tuple(cell)] += sign * step
                ends.append(bypass(moved, **options)[0])
            assert_close((ends[0] - ends[1]) / (2 * step), grad[tuple(cell)], atol=1e-6, rtol=1e-5)
    else:
        weights = torch.tensor([[2.0], [torch.tensor(-0.1).exp()]]).double()
        assert_close(grad, -weights * ADV * keep / 6, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"])
@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_loss_and_gradient_do_not_depend_on_how_the_batch_is_cut(mode, loss_type):
    options = {"loss_type": loss_type, "rollout_is": "sequence", "rollout_rs": "token,seq_max_k3"}
    options |= {"rollout_rs_threshold": "2,1.5", "rollout_token_veto_threshold": 0.05}
    config = actor("bypass_mode", loss_agg_mode=mode, **{f"{KEY}{name}": value for name, value in options.items()})
    loss, mask = PPOLoss(config, 30), ragged_mask(8, 30, seed=1)
    columns = {"old_log_probs": normal(mask, 2), "advantages": normal(mask, 3), "response_mask": mask}
    new = (columns["old_log_probs"] + 0.3 * normal(mask, 4)).requires_grad_()

    def total(parts):
        micros = [{name: column[part] for name, column in columns.items()} for part in parts]
        weights = [loss.weight(micro) for micro in micros]
        whole = sum(weights)
        results = [loss(TokenOutputs(log_probs=new[part]), micro)[0] for part, micro in zip(parts, micros, strict=True)]
        value = sum(w / whole * result for w, result in zip(weights, results, strict=True))
        value = value * (whole if loss.aggregation.is_sum else 1.0)
        return value, *torch.autograd.grad(value, new)

    expected = total([slice(0, 8)])
    assert expected[1].abs().sum() > 0
    for parts in ([slice(i, i + 1) for i in range(8)], [slice(0, 3), slice(3, 8)]):
        assert_close(total(parts), expected)


def test_divergences_by_hand():
    mask = torch.tensor([[1, 1, 0]])
    old, mu = torch.tensor([[-1.0, -1.0, 9.0]]), torch.tensor([[-1.5, 0.0, 0.0]])  # d = 0.5, -1
    k2, k3 = [0.125, 0.5], [0.148721, 0.367879]
    expected = {
        "token": lambda k: k,
        "seq_sum": lambda k: [sum(k)] * 2,
        "seq_mean": lambda k: [sum(k) / 2] * 2,
        "seq_max": lambda k: [max(k)] * 2,
    }
    for kind in DIVERGENCES:
        over, _, estimate = kind.rpartition("_")
        values = expected[over](k2 if estimate == "k2" else k3)
        got = divergence(old, mu, mask, kind)
        assert_close(got, torch.tensor([[*values, 0.0]]).double(), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="kind='k2' is no estimate of a divergence: use one of token_k2"):
        divergence(old, mu, mask, "k2")


def test_tokens_or_responses_too_far_apart_are_rejected():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    old, mu = torch.tensor([[-1.0, -1.0, 9.0], [-1.0, 0, 0]]), torch.tensor([[-1.5, 0.0, 0.0], [-1.0, 0, 0]])
    kept, metrics = kept_tokens(old, mu, mask, "token_k2", 0.2)
    assert kept.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 3)
    assert kept_tokens(old, mu, mask, "seq_max_k3", 0.3)[0].tolist() == [[0, 0, 0], [1, 0, 0]]
    assert kept_tokens(old, mu, mask, "seq_mean_k3", 0.3)[0].tolist() == mask.tolist()
