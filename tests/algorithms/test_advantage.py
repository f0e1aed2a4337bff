from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.batches import normal, ragged_mask, slow_gae, slow_suffix_sum
from verl.algorithms.advantage import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageEstimator,
    NonFiniteError,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
    get_adv_estimator_fn,
    register_adv_est,
)

REWARDS = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.5, 0.0, -1.0, 0.0]])
VALUES = torch.tensor([[0.5, 0.4, 0.3, 9.0], [0.2, 7.0, -0.1, 0.3]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]])  # the second row has a hole: a tool's output


def close(got, expected):
    assert_close(got, torch.tensor(expected), rtol=0, atol=1e-6)


def outcome(scores, lengths, width=5):
    """Rewards on the last token of each row, as managers give them, and the mask."""
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    rewards = torch.zeros(len(scores), width)
    for i, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        rewards[i, length - 1] = score
    return rewards, mask


# ------------------------------------------------------------------------------------------------------ closed form


def test_gae_of_one_response_by_hand():
    advantages, returns = compute_gae_advantage_return(REWARDS[:1], VALUES[:1], MASK[:1], 0.9, 0.8)
    close(advantages, [[-0.949324, -0.094625, 1.043949, 0.0]])
    close(returns, [[0.62928, 0.774, 1.0, 0.0]])


def test_gae_of_a_batch_with_a_hole_by_hand():
    advantages, returns = compute_gae_advantage_return(REWARDS, VALUES, MASK, 0.9, 0.8)
    close(advantages, [[0.330066, 0.763742, 1.341457, 0.0], [-0.606329, 0.0, -1.398260, -0.430675]])
    close(returns, [[0.62928, 0.774, 1.0, 0.0], [-0.19912, 0.0, -0.946, 0.0]])


def test_gae_with_lambda_one_returns_the_discounted_rewards_whatever_the_critic_says():
    mask = ragged_mask(5, 70, seed=0, holes=True)
    rewards = normal(mask, seed=1)
    _, returns = compute_gae_advantage_return(rewards, normal(mask, seed=2), mask, 0.95, 1.0)
    assert_close(returns, slow_suffix_sum(rewards, mask, 0.95))


def test_gae_of_constant_values_and_no_reward_is_the_value_lost_at_the_end():
    mask = torch.ones(1, 4, dtype=torch.int64)
    _, returns = compute_gae_advantage_return(torch.zeros(1, 4), torch.full((1, 4), 2.0), mask, 1.0, 0.0)
    close(returns, [[2.0, 2.0, 2.0, 0.0]])


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("width", [3, 64, 200])
def test_gae_equals_the_loop_and_is_whitened_over_tokens(width, holes):
    mask = ragged_mask(6, width, seed=3, holes=holes)
    rewards, values = normal(mask, seed=4), normal(mask, seed=5)
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, 0.99, 0.95)
    slow = slow_gae(rewards, values, mask, 0.99, 0.95)
    assert_close(returns, (slow + values) * mask)
    on_tokens = slow[mask.bool()]
    assert_close(advantages[mask.bool()], (on_tokens - on_tokens.mean()) / (on_tokens.var() + 1e-8).sqrt())
    assert (advantages[mask == 0] == 0).all()


def test_gae_in_single_precision_stays_close_over_thousands_of_tokens():
    mask = torch.ones(2, 9000, dtype=torch.int64)
    rewards, values = normal(mask, seed=6), normal(mask, seed=7)
    exact = compute_gae_advantage_return(rewards, values, mask, 1.0, 1.0)
    single = compute_gae_advantage_return(rewards.float(), values.float(), mask, 1.0, 1.0)
    for a, b in zip(single, exact, strict=True):
        assert_close(a.double(), b, rtol=1e-4, atol=1e-3)


SCORES, LENGTHS, INDEX = [1.0, 0.0, 2.0, 0.25], [3, 1, 5, 2], np.array(["a", "a", "b", "a"], dtype=object)


@pytest.mark.parametrize(
    ("by_std", "expected"),
    [(True, [1.120895, -0.800639, 1.999998, -0.320256]), (False, [0.583333, -0.416667, 2.0, -0.166667])],
)
def test_grpo_by_hand_and_a_response_without_siblings_keeps_its_score(by_std, expected):
    rewards, mask = outcome(SCORES, LENGTHS)
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, INDEX, norm_adv_by_std_in_grpo=by_std)
    assert_close(advantages, torch.tensor(expected)[:, None] * mask, rtol=0, atol=1e-6)
    assert torch.equal(advantages, returns)


def test_grpo_of_a_single_response_by_hand():
    rewards, mask = outcome([0.75], [2], width=3)
    close(compute_grpo_outcome_advantage(rewards, mask, np.array([0]), 0.5)[0], [[0.5, 0.5, 0.0]])


def test_rloo_by_hand():
    rewards, mask = outcome(SCORES, LENGTHS)
    advantages, _ = compute_rloo_outcome_advantage(rewards, mask, INDEX)
    assert_close(advantages, torch.tensor([[0.875], [-0.625], [2.0], [-0.25]]) * mask)


def test_remax_by_hand():
    advantages, returns = compute_remax_outcome_advantage(REWARDS, torch.tensor([0.25, -1.0]), MASK)
    close(returns, [[1.0, 1.0, 1.0, 0.0], [-0.5, 0.0, -1.0, 0.0]])
    close(advantages, [[0.75, 0.75, 0.75, 0.0], [0.5, 0.0, 0.0, 1.0]])


@pytest.mark.parametrize("arguments", [{"gamma": 0.9}, {"config": SimpleNamespace(gamma=0.9)}])
def test_reinforce_plus_plus_by_hand(arguments):
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(REWARDS, MASK, **arguments)
    close(returns, [[0.81, 0.9, 1.0, 0.0], [-0.4, 0.0, -1.0, 0.0]])
    close(advantages, [[0.723908, 0.834024, 0.956374, 0.0], [-0.756535, 0.0, -1.490639, -0.267132]])


def test_reinforce_plus_plus_without_a_discount_says_where_to_give_one():
    with pytest.raises(ValueError, match="gamma is missing. Pass gamma=, or config="):
        compute_reinforce_plus_plus_outcome_advantage(REWARDS, MASK)


def test_reinforce_plus_plus_baseline_by_hand():
    rewards, mask = outcome([1.0, 0.0, 0.5], [3, 1, 2], width=3)
    index = np.array([7, 7, 8])
    advantages, _ = compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, index)
    assert_close(advantages, torch.tensor([[0.408248], [-2.041241], [0.408248]]) * mask, rtol=0, atol=1e-6)


def test_a_value_or_baseline_that_is_not_finite_is_named_but_rubbish_in_padding_is_not_looked_at():
    values = VALUES.clone()
    values[0, 3] = torch.nan
    compute_gae_advantage_return(REWARDS, values, MASK, 1.0, 1.0)
    values[1, 2] = torch.nan
    with pytest.raises(NonFiniteError, match=r"values holds nan in 1 .*\[1\]"):
        compute_gae_advantage_return(REWARDS, values, MASK, 1.0, 1.0)
    with pytest.raises(NonFiniteError, match=r"reward_baselines holds inf"):
        compute_remax_outcome_advantage(REWARDS, torch.tensor([0.0, torch.inf]), MASK)


@pytest.mark.parametrize("index", [np.array(["x", "y", "x"], dtype=object), ["x", "y", "x"], torch.tensor([5, 2, 5])])
def test_prompt_ids_may_be_strings_a_list_or_a_tensor(index):
    rewards, mask = outcome([1.0, 3.0, 0.0], [1, 2, 3], width=3)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)
    assert_close(advantages, torch.tensor([[0.5], [3.0], [-0.5]]) * mask)


# --------------------------------------------------------------------------------------------------------- registry


def test_an_estimator_of_ones_own_is_found_by_name(monkeypatch, caplog):
    for name in ("_entries", "_about"):
        monkeypatch.setattr(ADV_ESTIMATOR_REGISTRY, name, dict(getattr(ADV_ESTIMATOR_REGISTRY, name)))

    @register_adv_est("score_itself")
    def score_itself(token_level_rewards, response_mask, config=None):
        advantages = token_level_rewards.sum(-1, keepdim=True) * response_mask
        return advantages, advantages

    assert get_adv_estimator_fn("score_itself") is score_itself
    assert get_adv_estimator_fn(AdvantageEstimator.GRPO) is compute_grpo_outcome_advantage
    register_adv_est(AdvantageEstimator.GRPO)(score_itself)
    assert get_adv_estimator_fn("grpo") is score_itself and "from now on, not verl's own" in caplog.text
    with pytest.raises(ValueError, match="'score_itself' is already taken"):
        register_adv_est("score_itself")(compute_grpo_outcome_advantage)


def test_an_unknown_estimator_lists_the_known_and_the_nearest():
    with pytest.raises(ValueError, match="algorithm.adv_estimator=grop is not known; did you mean 'grpo'.*rloo"):
        get_adv_estimator_fn("grop")
