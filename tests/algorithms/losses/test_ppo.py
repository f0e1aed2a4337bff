"""The clipped objective by hand; what it shares with every other loss is in losses/test_every_loss.py."""

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from verl.algorithms import valid_tokens as valid_tokens_module
from verl.algorithms.losses import (
    POLICY_LOSS_REGISTRY,
    compute_policy_loss,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    loss_and_metrics,
    register_policy_loss,
)

OLD = torch.tensor([[-1.0, -2.0, -0.5, -1.5], [-0.3, -0.7, 0.0, 0.0]])
NEW = torch.tensor([[-0.9, -1.5, -1.2, 0.3], [-0.5, -0.6, 5.0, -7.0]])
ADV = torch.tensor([[1.0, 2.0, -1.0, -0.5], [-2.0, 0.5, 3.0, 4.0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
BOUNDS = {"cliprange": 0.2, "cliprange_high": 0.28, "clip_ratio_c": 3.0}
# per token: free; clipped high; clipped low; held by the dual clip | free; free
TOKEN_GRADIENTS = torch.tensor([[-1.105171, 0.0, 0.0, 0.0], [1.637462, -0.552585, 0.0, 0.0]])


@pytest.fixture(params=["dense", "packed"], autouse=True)
def both_layouts(request, monkeypatch):
    if request.param == "packed":
        monkeypatch.setattr(valid_tokens_module, "PADDED_BELOW", 0)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", -0.046716),
        ("seq-mean-token-sum", -0.140147),
        ("seq-mean-token-mean", 0.100573),
        ("seq-mean-token-sum-norm", -0.070074),
    ],
)
def test_loss_and_shares_by_hand_in_every_mode(mode, expected):
    result = compute_policy_loss(OLD, NEW, ADV, MASK, **BOUNDS, loss_agg_mode=mode)
    assert_close(torch.stack(result), torch.tensor([expected, 2 / 6, -1.6 / 6, 1 / 6]), rtol=0, atol=1e-6)


def test_gradient_by_hand_is_minus_ratio_times_advantage_where_no_bound_holds():
    new = NEW.clone().requires_grad_(True)
    compute_policy_loss(OLD, new, ADV, MASK, **BOUNDS)[0].backward()
    assert_close(new.grad, TOKEN_GRADIENTS / 6, rtol=0, atol=1e-6)


def test_an_exploded_ratio_costs_a_bounded_amount():
    far = torch.tensor([[1000.0, 1000.0]]).requires_grad_(True)
    loss = compute_policy_loss(torch.zeros(1, 2), far, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2), 0.2)[0]
    loss.backward()
    assert_close(loss.detach(), torch.tensor((-1.2 + 3.0) / 2))
    assert (far.grad == 0).all()


def test_rollout_weights_multiply_each_tokens_loss():
    weights = torch.tensor([[0.5, 1.0, 2.0, 0.0], [1.0, 3.0, 9.0, 9.0]])
    tokens = torch.tensor([-1.105171, -2.56, 0.8, 1.5, 1.637462, -0.552585])
    loss = compute_policy_loss(OLD, NEW, ADV, MASK, **BOUNDS, rollout_is_weights=weights)[0]
    assert_close(loss, (tokens * weights[MASK.bool()]).mean(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cliprange": 0.2, "clip_ratio_c": 1.0}, "clip_ratio_c=1.0 must exceed 1"),
        ({"cliprange_low": 0.2}, "leave a side without a bound"),
        ({"cliprange": 0.2, "loss_agg_mode": "tokenmean"}, "did you mean 'token-mean'"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        compute_policy_loss(OLD, NEW, ADV, MASK, **arguments)


ACTOR = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)


def test_the_registered_form_reads_the_actor_section_and_names_its_metrics():
    fn = get_policy_loss_fn("vanilla")
    assert fn is compute_policy_loss_vanilla
    loss, metrics = fn(
        old_log_prob=OLD, log_prob=NEW, advantages=ADV, response_mask=MASK, loss_agg_mode="token-mean", config=ACTOR
    )
    expected = compute_policy_loss(OLD, NEW, ADV, MASK, **BOUNDS)
    assert_close(loss, expected[0])
    assert_close(
        metrics,
        {"actor/pg_clipfrac": expected[1], "actor/ppo_kl": expected[2], "actor/pg_clipfrac_lower": expected[3]},
    )
    with pytest.raises(ValueError, match="config is missing"):
        fn(OLD, NEW, ADV, MASK)


def test_results_of_older_losses_are_named_and_other_shapes_refused():
    assert loss_and_metrics((1, 2, 3, 4)) == (
        1,
        {"actor/pg_clipfrac": 2, "actor/ppo_kl": 3, "actor/pg_clipfrac_lower": 4},
    )
    assert loss_and_metrics((1, {"a": 2})) == (1, {"a": 2})
    for wrong in ((1, 2, 3), torch.zeros(())):
        with pytest.raises(TypeError, match=r"must return \(loss, metrics dict\)"):
            loss_and_metrics(wrong)


def test_a_loss_of_ones_own_is_found_by_name_and_unknown_names_list_it(monkeypatch, caplog):
    for name in ("_entries", "_about"):
        monkeypatch.setattr(POLICY_LOSS_REGISTRY, name, dict(getattr(POLICY_LOSS_REGISTRY, name)))

    @register_policy_loss("my_loss")
    def my_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
        return log_prob.sum(), {}

    assert get_policy_loss_fn("my_loss") is my_loss
    with pytest.raises(ValueError, match="loss_mode=my_los is not known; did you mean 'my_loss'.*Known: .*vanilla"):
        get_policy_loss_fn("my_los")
    register_policy_loss("vanilla")(my_loss)
    assert get_policy_loss_fn("vanilla") is my_loss and "from now on, not verl's own" in caplog.text
    with pytest.raises(ValueError, match="already taken"):
        register_policy_loss("my_loss")(test_a_loss_of_ones_own_is_found_by_name_and_unknown_names_list_it)
