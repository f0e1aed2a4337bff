"""Estimators and losses named as FILE.py:NAME: found, checked before anything starts, and trained with."""

from types import SimpleNamespace

import pytest
import torch

from tests.algorithms.losses.test_actor import actor
from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn
from verl.algorithms.losses import POLICY_LOSS_REGISTRY, PPOLoss, TokenOutputs, get_policy_loss_fn

MINE = """
import torch
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss

def half_the_score(token_level_rewards, response_mask, **kwargs):
    advantages = token_level_rewards.sum(-1, keepdim=True) / 2 * response_mask
    return advantages, advantages

@register_adv_est("twice_the_score")
def twice(token_level_rewards, response_mask):
    advantages = token_level_rewards.sum(-1, keepdim=True) * 2 * response_mask
    return advantages, advantages

def older(old, new, adv, mask, mode, config):
    zero = torch.zeros(())
    return agg_loss(-adv * new, mask, mode), zero, zero + 2.0, zero

@register_policy_loss("plain")
def plain(log_prob, advantages, response_mask, loss_agg_mode):
    return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode), {"mine/count": 1.0}

def stranger(x, y):
    return x
a_number = 3
"""
LOSS, ESTIMATOR = "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.adv_estimator"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    for registry in (ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


@pytest.mark.parametrize(("name", "factor"), [("half_the_score", 0.5), ("twice", 2.0)])
def test_an_estimator_of_a_file_is_called_decorated_or_not(mine, name, factor):
    rewards, mask = torch.tensor([[0.0, 3.0], [1.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    advantages, _ = get_adv_estimator_fn(f"{mine}:{name}")(token_level_rewards=rewards, response_mask=mask)
    assert advantages.tolist() == [[3 * factor, 3 * factor], [factor, 0]]


@pytest.mark.parametrize(
    ("name", "metrics"), [("older", {"actor/ppo_kl": 2.0, "actor/pg_clipfrac": 0.0}), ("plain", {"mine/count": 1.0})]
)
def test_a_loss_of_a_file_is_called_also_by_position_and_with_four_results(mine, name, metrics):
    loss = PPOLoss(actor(policy_loss=SimpleNamespace(loss_mode=f"{mine}:{name}")))
    columns = {"old_log_probs": torch.zeros(1, 2), "advantages": torch.ones(1, 2), "response_mask": torch.ones(1, 2)}
    value, found = loss(TokenOutputs(torch.tensor([[-1.0, -3.0]])), columns)
    assert value.item() == 2.0
    assert {key: float(found[key]) for key in metrics} == metrics


@pytest.mark.parametrize("find", [get_adv_estimator_fn, get_policy_loss_fn])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:f", "=nowhere.py:f: there is no file nowhere.py .*give its full path"),
        ("{mine}:misspelt", r":misspelt: .*no function or class 'misspelt'; it has .*half_the_score.*correct it"),
        ("{mine}:a_number", "a_number is a int. Name a function"),
        ("{mine}:stranger", r"stranger takes \(x, y\)\..* must .*rename its parameters"),
    ],
)
def test_what_is_wrong_is_said_with_key_value_and_way_out(mine, find, name, message):
    key = LOSS if find is get_policy_loss_fn else ESTIMATOR
    with pytest.raises(ValueError, match=message) as error:
        find(name.format(mine=mine))
    assert str(error.value).startswith(f"{key}={name.format(mine=mine)}")


def test_an_error_in_the_file_is_chained_and_names_the_line(tmp_path):
    (tmp_path / "broken.py").write_text("x = 1\ny = x / 0\n")
    with pytest.raises(RuntimeError, match=r"broken.py failed while it was loaded in line 2: ZeroDivisionError"):
        get_policy_loss_fn(f"{tmp_path}/broken.py:f")


def test_a_name_with_a_colon_that_is_no_file_is_unknown():
    with pytest.raises(ValueError, match="loss_mode=van:illa is not known"):
        get_policy_loss_fn("van:illa")
