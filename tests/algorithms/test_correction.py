"""What the sampler's distance from the trainer is weighed by, against values one can work out by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.batches import normal, ragged_mask
from tests.algorithms.losses.test_every_loss import NAMES, actor, random_batch
from verl.algorithms.correction import LEVELS, importance_ratio, importance_weights, kept_tokens
from verl.algorithms.losses import PPOLoss, TokenOutputs

# pi_old / mu is 4, 1/2, 1 in the first response; 1/8, 2 in the second, around a token of a tool
MU = torch.tensor([[0.2, 0.4, 0.5], [0.8, 0.3, 0.25]], dtype=torch.float64)
PI = torch.tensor([[0.8, 0.2, 0.5], [0.1, 0.9, 0.50]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 1]])
OLD, ROLLOUT = PI.log(), MU.log()


def near(expected):
    return lambda found: assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=1e-12, atol=1e-12)


def numbers(metrics):
    return {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}


@pytest.mark.parametrize(
    "level, ratio",
    [
        ("token", [[4.0, 0.5, 1.0], [0.125, 0.0, 2.0]]),
        ("sequence", [[2.0, 2.0, 2.0], [0.25, 0.0, 0.25]]),
        ("geometric", [[2 ** (1 / 3)] * 3, [0.5, 0.0, 0.5]]),
    ],
)
def test_ratios_by_hand(level, ratio):
    near(ratio)(importance_ratio(OLD, ROLLOUT, MASK, level))


def test_an_unknown_level_is_named():
    with pytest.raises(ValueError, match="level='turn'.*token, sequence, geometric"):
        importance_ratio(OLD, ROLLOUT, MASK, "turn")


@pytest.mark.parametrize(
    "options, weights",
    [
        ({"upper": 2.0}, [[2.0, 0.5, 1.0], [0.125, 0.0, 2.0]]),
        ({"upper": 2.0, "lower": 0.25}, [[2.0, 0.5, 1.0], [0.25, 0.0, 2.0]]),
        ({"upper": 5.0, "lower": 0.5, "mode": "mask"}, [[4.0, 0.5, 1.0], [0.0, 0.0, 2.0]]),  # IcePop as published
        ({"upper": 3.0, "mode": "mask"}, [[0.0, 0.5, 1.0], [0.0, 0.0, 2.0]]),  # lower: 1/3
        ({"level": "sequence", "upper": 1.5}, [[1.5, 1.5, 1.5], [0.25, 0.0, 0.25]]),
        ({"level": "geometric", "lower": 0.75}, [[2 ** (1 / 3)] * 3, [0.75, 0.0, 0.75]]),
        # means after truncation: (2 + 1/2 + 1 + 1/8 + 2) / 5 = 1.125 of tokens, (1.75 + 0.25) / 2 = 1 of responses
        ({"normalise": True}, [[2 / 1.125, 0.5 / 1.125, 1 / 1.125], [1 / 9, 0.0, 2 / 1.125]]),
        ({"level": "sequence", "upper": 1.75, "normalise": True}, [[1.75] * 3, [0.25, 0.0, 0.25]]),
    ],
)
def test_weights_by_hand(options, weights):
    near(weights)(importance_weights(OLD, ROLLOUT, MASK, **options)[0])


def test_metrics_of_weights_by_hand():
    found = numbers(importance_weights(OLD, ROLLOUT, MASK, upper=2.0, lower=0.25)[1])
    # weights 2, 1/2, 1, 1/4, 2: mean 1.15, squares 4, 1/4, 1, 1/16, 4
    expected = {
        "rollout_is_mean": 1.15,
        "rollout_is_std": (9.3125 / 5 - 1.15**2) ** 0.5,
        "rollout_is_min": 0.25,
        "rollout_is_max": 2.0,
        "rollout_is_eff_sample_size": 5.75**2 / (5 * 9.3125),
        "rollout_is_ratio_fraction_high": 0.2,
        "rollout_is_ratio_fraction_low": 0.2,
    }
    assert found == pytest.approx(expected, rel=1e-12)
    found = numbers(importance_weights(OLD, ROLLOUT, MASK, "sequence", upper=1.5)[1])  # 1.5 and 0.25
    assert found["rollout_is_mean"] == 0.875 and found["rollout_is_ratio_fraction_high"] == 0.5
    assert "rollout_is_ratio_fraction_low" not in found


@pytest.mark.parametrize(
    "options, kept",
    [
        ({"level": "token", "upper": 2.0}, [[0, 1, 1], [0, 0, 1]]),
        ({"level": "token", "upper": 5.0, "lower": 0.1}, [[1, 1, 1], [1, 0, 1]]),
        ({"level": "sequence", "upper": 3.0}, [[1, 1, 1], [0, 0, 0]]),
        ({"level": "geometric", "upper": 1.2, "lower": 0.4}, [[0, 0, 0], [1, 0, 1]]),
        ({"veto": 0.2}, [[1, 1, 1], [0, 0, 0]]),
        ({"veto": 0.1}, [[1, 1, 1], [1, 0, 1]]),
        ({"level": "token", "upper": 2.0, "veto": 0.2}, [[0, 1, 1], [0, 0, 0]]),
    ],
)
def test_what_is_kept_by_hand(options, kept):
    found, _ = kept_tokens(OLD, ROLLOUT, MASK, **options)
    assert found.tolist() == kept and found.dtype == MASK.dtype


def test_metrics_of_rejection_by_hand():
    assert numbers(kept_tokens(OLD, ROLLOUT, MASK, "token", 2.0, veto=0.2)[1]) == pytest.approx(
        {
            "rollout_rs_ratio_fraction_high": 1 / 5,
            "rollout_rs_ratio_fraction_low": 1 / 5,
            "rollout_is_veto_fraction": 1 / 2,
            "rollout_rs_masked_fraction": 3 / 5,
            "rollout_rs_seq_masked_fraction": 1.0,
        }
    )


@pytest.mark.parametrize("level", LEVELS)
def test_a_sampler_that_is_the_trainer_changes_nothing(level):
    weights, metrics = importance_weights(OLD, OLD, MASK, level, mode="mask", normalise=True)
    assert weights.equal(MASK.double()) and numbers(metrics)["rollout_is_eff_sample_size"] == 1
    assert kept_tokens(OLD, OLD, MASK, level, 1.001, veto=0.5)[0].equal(MASK)


@pytest.mark.parametrize("level", LEVELS)
def test_padding_order_and_values_at_masked_positions_change_nothing(level):
    mask = ragged_mask(5, 7, seed=2)
    old, rollout = normal(mask, 3), normal(mask, 4)
    flip = lambda x, fill: torch.nn.functional.pad(x.flip(0), (0, 3), value=fill)  # noqa: E731
    garbage = [torch.where(mask.bool(), x, float("nan")) for x in (old, rollout)]
    other = [*(flip(x, float("nan")) for x in garbage), flip(mask, 0)]
    for function in (importance_weights, kept_tokens):
        one, metrics = function(old, rollout, mask, level, 1.5)
        two, others = function(*other, level, 1.5)
        assert_close(two, flip(one, 0)) and (one[~mask.bool()] == 0).all()
        assert others == pytest.approx(metrics)


def test_no_tokens_no_metrics():
    for function in (importance_weights, kept_tokens):
        found, metrics = function(OLD, ROLLOUT, torch.zeros_like(MASK), "sequence")
        assert (found == 0).all() and metrics == {}


def test_a_batch_the_two_agree_on_nowhere_keeps_weights_of_zero():
    weights, metrics = importance_weights(OLD + 3, ROLLOUT, MASK, upper=1.1, mode="mask", normalise=True)
    assert (weights == 0).all() and numbers(metrics)["rollout_is_eff_sample_size"] == 0


def test_ratios_beyond_numbers_are_cut_and_what_is_nan_is_rejected():
    far = torch.tensor([[0.0, -1000.0, 0.0]])
    assert importance_ratio(far, -far, torch.ones(1, 3), "token")[0, 1].item() == pytest.approx(2.06e-9, rel=1e-2)
    assert importance_ratio(-far, far, torch.ones(1, 3), "sequence").isfinite().all()
    kept, _ = kept_tokens(torch.tensor([[0.0, float("nan")]]), torch.zeros(1, 2), torch.ones(1, 2), "token")
    assert kept.tolist() == [[1, 0]]


def test_no_gradient_runs_through_weights():
    old, rollout = OLD.clone().requires_grad_(True), ROLLOUT.clone().requires_grad_(True)
    assert not importance_weights(old, rollout, MASK)[0].requires_grad
    assert not kept_tokens(old, rollout, MASK.double(), "token")[0].requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_is_weighed_exactly_once_and_other_terms_are_not(name):
    b = random_batch(seed=21)
    changed = {"entropy_coeff": 0.5, "use_kl_loss": True, "kl_loss_coef": 0.25, "kl_loss_type": "k2"}
    loss = PPOLoss(SimpleNamespace(**{**vars(actor(name)), **changed}), response_length=b["mask"].shape[1])
    columns = {
        "old_log_probs": b["old"],
        "rollout_log_probs": b["old"],
        "ref_log_prob": b["old"] - 0.1,
        "advantages": b["adv"],
        "token_level_scores": b["adv"],
        "response_mask": b["mask"],
        "selected_tokens": torch.zeros_like(b["old"]),
    }
    assert "rollout_is_weights" in loss.extra_columns
    gradients = []
    for factor in (0.0, 1.0, 3.0):
        new = b["new"].clone().requires_grad_(True)
        weights = torch.full_like(new, factor).requires_grad_(True)
        out = TokenOutputs(new, torch.ones_like(new))
        value, metrics = loss(out, columns | {"rollout_is_weights": weights})
        value.backward()
        assert weights.grad is None
        gradients.append(new.grad)
    other_terms, once, thrice = gradients
    assert other_terms.abs().sum() > 0
    assert_close(thrice - other_terms, 3 * (once - other_terms))
    plain = b["new"].clone().requires_grad_(True)
    loss(TokenOutputs(plain, torch.ones_like(plain)), columns)[0].backward()
    assert plain.grad.equal(once)
