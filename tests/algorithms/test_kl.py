from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad
from torch.testing import assert_close

from tests.algorithms.batches import normal, ragged_mask
from verl.algorithms.aggregate import AGG_MODES
from verl.algorithms.kl import (
    KL_PENALTIES,
    AdaptiveKLController,
    FixedKLController,
    compute_rewards,
    get_kl_controller,
    kl_penalty,
)
from verl.algorithms.losses import PPOLoss, TokenOutputs
from verl.config.actor import ActorConfig

D = torch.tensor([[-0.5, 0.0], [0.2, 1.5]])
REF = torch.tensor([[-1.0, -2.0], [-0.1, -3.0]])


NAMES = list(KL_PENALTIES)
K1, ABS, K2 = [[-0.5, 0.0], [0.2, 1.5]], [[0.5, 0.0], [0.2, 1.5]], [[0.125, 0.0], [0.02, 1.125]]
K3 = [[0.148721, 0.0], [0.018731, 0.723130]]
BY_HAND = {
    **dict.fromkeys(("kl", "k1", "kl+", "k1+"), K1),
    **dict.fromkeys(("abs", "abs+"), ABS),
    **dict.fromkeys(("mse", "k2", "mse+", "k2+"), K2),
    **dict.fromkeys(("low_var_kl", "k3", "low_var_kl+", "k3+"), K3),
    "full": [[0.173287, 0.0]],  # 0.5 ln 2 + 0.25 ln 1 - 0.25 ln 2 = 0.25 ln 2
}


def inputs_of(name):
    """Log-probs of sampled tokens, or of a vocabulary of three."""
    if name != "full":
        return REF + D, REF
    p = torch.tensor([[[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]])
    return p.log(), torch.tensor([[[0.25, 0.25, 0.5], [0.2, 0.3, 0.5]]]).log()


@pytest.mark.parametrize("name", NAMES)
def test_each_estimator_by_hand(name):
    x, y = inputs_of(name)
    expected = torch.tensor(BY_HAND[name])
    assert_close(kl_penalty(x, y, name), expected, rtol=0, atol=1e-6)
    assert_close(kl_penalty(x[:1, :1], y[:1, :1], name), expected[:1, :1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["kl", "low_var_kl"])
def test_unbiased_estimators_have_the_true_kl_as_mean(name):
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    true_kl = (p * (p / q).log()).sum()
    assert_close((p * kl_penalty(p.log(), q.log(), name)).sum(), true_kl)


def test_low_var_kl_is_never_negative_and_one_outlier_is_cut():
    d = torch.linspace(-30, 30, 601)
    estimate = kl_penalty(d, torch.zeros_like(d), "low_var_kl")
    assert (estimate >= 0).all() and estimate.max() == 10


@pytest.mark.parametrize("name", NAMES)
def test_gradients_agree_with_finite_differences(name):
    draw = torch.Generator().manual_seed(0)
    shape = (2, 3, 5) if name == "full" else (3, 4)
    x, y = (torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for _ in range(2))
    if name.endswith("+"):  # the slope is that of k2, by design not that of the value
        assert torch.autograd.gradcheck(lambda a, b: kl_penalty(a, b, "k2"), (x, y))
        got, expected = (torch.autograd.grad(kl_penalty(x, y, kind).sum(), (x, y)) for kind in (name, "k2"))
        assert_close(got, expected)
    else:
        assert torch.autograd.gradcheck(lambda a, b: kl_penalty(a, b, name), (x, y))


def kl_loss_of(name, mode):
    config = ActorConfig().with_values(
        {"use_kl_loss": True, "kl_loss_coef": 1.0, "kl_loss_type": name, "loss_agg_mode": mode}
    )
    return PPOLoss(config, response_length=9)


def kl_batch(name, rows=5):
    """A batch in which only the KL has a slope, as an engine hands it over."""
    mask = ragged_mask(rows, 9, seed=0, holes=True)
    mask[2] = 0
    log_probs = (normal(mask, 1) * mask).requires_grad_(True)
    full = (normal(mask, 2).square() * mask).requires_grad_(True)
    columns = {"old_log_probs": log_probs.detach(), "advantages": torch.zeros_like(full), "response_mask": mask}
    columns["ref_log_prob"] = log_probs.detach() - 0.3 * normal(mask, 3) * mask
    return TokenOutputs(log_probs, full_kl=full if name == "full" else None), columns


def kl_gradient(loss, out, columns, parts=None):
    """Gradient by what the KL is of, of the loss of ``parts`` of the rows weighed as an engine does."""
    rows = range(len(columns["response_mask"]))
    losses, weights = [], []
    for part in map(list, parts or [rows]):
        micro = {key: column[part] for key, column in columns.items()}
        here = TokenOutputs(out.log_probs[part], full_kl=None if out.full_kl is None else out.full_kl[part])
        losses.append(loss(here, micro)[0])
        weights.append(loss.weight(micro).double())
    total = sum(w * one for w, one in zip(weights, losses, strict=True)) / sum(weights)
    return torch.autograd.grad(total, out.log_probs if out.full_kl is None else out.full_kl)[0]


@pytest.mark.parametrize("mode", list(AGG_MODES))
@pytest.mark.parametrize("name", NAMES)
def test_in_the_loss_masks_padding_order_and_cuts_hold_in_every_mode(name, mode):
    loss = kl_loss_of(name, mode)
    out, columns = kl_batch(name)
    whole = kl_gradient(loss, out, columns)
    assert (whole[columns["response_mask"] == 0] == 0).all() and whole.abs().sum() > 0
    for parts in ([[0, 1], [2, 3, 4]], [[4], [0, 2], [1], [3]], [[0], [1], [2], [3], [4]]):
        assert_close(kl_gradient(loss, out, columns, parts), whole)
    for sides in ((0, 3), (3, 0)):
        moved = {key: pad(column.flip(0), sides) for key, column in columns.items()}
        moved["ref_log_prob"] = torch.where(moved["response_mask"].bool(), moved["ref_log_prob"], 7.0)
        (flat, full) = (None if x is None else pad(x.detach().flip(0), sides) for x in (out.log_probs, out.full_kl))
        flat.requires_grad_(True)
        other = TokenOutputs(flat, full_kl=None if full is None else full.requires_grad_(True))
        assert_close(kl_gradient(loss, other, moved), pad(whole.flip(0), sides))


@pytest.mark.parametrize("name", NAMES)
def test_nan_is_never_hidden(name):
    x, y = inputs_of(name)
    x[0, 0] = torch.nan
    assert kl_penalty(x, y, name)[0, 0].isnan().all()


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


def test_full_takes_logits_up_to_a_constant():
    p, q = inputs_of("full")
    assert_close(kl_penalty(p + 3, q - 5, "full"), torch.tensor(BY_HAND["full"]), rtol=0, atol=1e-6)


def test_full_has_the_gradient_of_the_sum():
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 3, 5, generator=draw, dtype=torch.float64, requires_grad=True) for _ in range(2))
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


def test_a_token_with_probability_zero_counts_nothing_in_full():
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
