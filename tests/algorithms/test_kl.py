from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from verl.algorithms.kl import (
    KL_PENALTIES,
    AdaptiveKLController,
    FixedKLController,
    compute_rewards,
    get_kl_controller,
    kl_penalty,
)

D = torch.tensor([[-0.5, 0.0], [0.2, 1.5]])
REF = torch.tensor([[-1.0, -2.0], [-0.1, -3.0]])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("kl", "k1"), [[-0.5, 0.0], [0.2, 1.5]]),
        (("abs",), [[0.5, 0.0], [0.2, 1.5]]),
        (("mse", "k2"), [[0.125, 0.0], [0.02, 1.125]]),
        (("low_var_kl", "k3"), [[0.148721, 0.0], [0.018731, 0.723130]]),
    ],
)
def test_each_estimator_by_hand(names, expected):
    for name in names:
        assert_close(kl_penalty(REF + D, REF, name), torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["kl", "low_var_kl"])
def test_unbiased_estimators_have_the_true_kl_as_mean(name):
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    true_kl = (p * (p / q).log()).sum()
    assert_close((p * kl_penalty(p.log(), q.log(), name)).sum(), true_kl)


def test_low_var_kl_is_never_negative_and_one_outlier_is_cut():
    d = torch.linspace(-30, 30, 601)
    estimate = kl_penalty(d, torch.zeros_like(d), "low_var_kl")
    assert (estimate >= 0).all() and estimate.max() == 10


@pytest.mark.parametrize("name", ["kl", "abs", "mse", "low_var_kl"])
def test_gradients_agree_with_finite_differences(name):
    x, y = (t.double().requires_grad_(True) for t in (REF + D - 0.01, REF))
    assert torch.autograd.gradcheck(lambda a, b: kl_penalty(a, b, name), (x, y))


@pytest.mark.parametrize("name", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(name):
    x, y = ((REF + D - 0.01).double().requires_grad_(True) for _ in range(2))
    straight, plain = kl_penalty(x, REF.double(), f"{name}+"), kl_penalty(y, REF.double(), name)
    assert_close(straight, plain)
    (gradient,) = torch.autograd.grad(straight.sum(), x)
    assert_close(gradient, (x - REF.double()).detach())


def test_only_the_gradient_of_k2_is_that_of_the_kl_in_the_mean():
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.2, 0.5, 0.3]).double().log()
    log_p = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((log_p.exp() * (log_p - q)).sum(), logits, retain_graph=True)
    for name, is_right in (("k1", False), ("k3", False), ("k2", True), ("k1+", True), ("k3+", True)):
        sampled = (log_p.detach().exp() * kl_penalty(log_p, q, name)).sum()
        (gradient,) = torch.autograd.grad(sampled, logits, retain_graph=True)
        assert torch.allclose(gradient, expected) == is_right


@pytest.mark.parametrize("name", ["kl+", "abs+", "low_var_kl+"])
def test_a_plus_gives_the_reference_minus_that_gradient_in_float64(name):
    x, y = ((t.double() + 0.01).requires_grad_(True) for t in (REF + D, REF))
    straight = kl_penalty(x, y, name)
    assert straight.dtype == torch.float64
    gradients = torch.autograd.grad(straight.sum(), (x, y))
    assert_close(gradients, ((x - y).detach(), (y - x).detach()))


def test_full_is_the_sum_over_the_vocabulary_by_hand():
    p = torch.tensor([[[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]])
    q = torch.tensor([[[0.25, 0.25, 0.5], [0.2, 0.3, 0.5]]])
    # 0.5 ln 2 + 0.25 ln 1 - 0.25 ln 2 = 0.25 ln 2
    expected = torch.tensor([[0.173287, 0.0]])
    assert_close(kl_penalty(p.log(), q.log(), "full"), expected, rtol=0, atol=1e-6)
    shifted = kl_penalty(p.log() + 3, q.log() - 5, "full")  # logits count up to a constant
    assert_close(shifted, expected, rtol=0, atol=1e-6)


def test_full_has_the_gradient_of_the_sum():
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 3, 5, generator=draw, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: kl_penalty(a, b, "full"), (x, y))
    kl = kl_penalty(x, y, "full")
    (gradient,) = torch.autograd.grad(kl.sum(), x)
    log_p, log_q = x.detach().log_softmax(-1), y.detach().log_softmax(-1)
    assert_close(gradient, log_p.exp() * (log_p - log_q - kl.detach()[..., None]))
    (at_the_reference,) = torch.autograd.grad(kl_penalty(x, x.detach(), "full").sum(), x)
    assert_close(at_the_reference, torch.zeros_like(x))


def test_the_sampled_estimators_have_the_full_kl_as_mean():
    draw = torch.Generator().manual_seed(1)
    log_p, log_q = (torch.randn(2, 3, 5, generator=draw, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    for name in ("k1", "k1+"):
        assert_close((log_p.exp() * kl_penalty(log_p, log_q, name)).sum(-1), kl_penalty(log_p, log_q, "full"))


def test_a_token_the_policy_never_draws_counts_nothing_in_full():
    log_p = torch.tensor([[[0.0, 0.0, -torch.inf]]], requires_grad=True)
    kl = kl_penalty(log_p, torch.tensor([[[0.0, 0.0, 0.0]]]), "full")
    assert_close(kl, torch.tensor([[1.5]]).log())
    kl.sum().backward()
    assert log_p.grad.isfinite().all()
    assert kl_penalty(log_p, log_p.detach(), "full").item() == 0.0


def test_full_of_sampled_tokens_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match=r"\(2, 2\).*logits \(B, R, V\).*low_var_kl"):
        kl_penalty(REF, REF, "full")


def test_an_unknown_estimator_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'low_var_kl'"):
        kl_penalty(REF, REF, "low_varkl")
    assert {"kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"} <= set(KL_PENALTIES)


def test_rewards_are_scores_minus_the_charged_log_ratio():
    assert_close(compute_rewards(torch.ones(2, 2), REF + D, REF, 0.1), 1 - 0.1 * D)


def test_a_fixed_coefficient_never_moves():
    controller = get_kl_controller(SimpleNamespace(type="fixed", kl_coef=0.01))
    assert isinstance(controller, FixedKLController)
    controller.update(current_kl=5.0, n_steps=1000)
    assert controller.value == 0.01


def test_an_adaptive_coefficient_moves_by_the_clipped_relative_error():
    controller = AdaptiveKLController(init_kl_coef=0.1, target_kl=2.0, horizon=1000)
    controller.update(current_kl=2.2, n_steps=100)  # error 0.1 -> 0.1 * (1 + 0.1 * 0.1)
    assert controller.value == pytest.approx(0.101)
    controller.update(current_kl=100.0, n_steps=100)  # error cut at 0.2 -> * 1.02
    assert controller.value == pytest.approx(0.101 * 1.02)
    controller.update(current_kl=0.0, n_steps=500)  # error cut at -0.2 -> * 0.9
    assert controller.value == pytest.approx(0.101 * 1.02 * 0.9)


def test_a_resumed_adaptive_controller_goes_on_where_it_was():
    config = SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=2.0, horizon=1000)
    first, second = get_kl_controller(config), get_kl_controller(config)
    first.update(3.0, 64)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(1.0, 64)
    assert first.value == second.value != 0.1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"type": "adaptve"}, "kl_ctrl.type=adaptve is not known"),
        ({"horizon": 0}, r"kl_ctrl.horizon=0 must be positive"),
        ({"target_kl": 0.0}, r"kl_ctrl.target_kl=0.0 must be positive"),
    ],
)
def test_impossible_controllers_are_refused(changed, message):
    config = {"type": "adaptive", "kl_coef": 0.1, "target_kl": 2.0, "horizon": 1000} | changed
    with pytest.raises(ValueError, match=message):
        get_kl_controller(SimpleNamespace(**config))
