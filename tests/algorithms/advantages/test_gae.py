import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.batches import close, normal, ragged_mask, slow_gae, slow_suffix_sum
from verl.algorithms.advantages import (
    compute_gae_advantage_return,
)

REWARDS = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.5, 0.0, -1.0, 0.0]])
VALUES = torch.tensor([[0.5, 0.4, 0.3, 9.0], [0.2, 7.0, -0.1, 0.3]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]])  # the second row has a hole: a tool's output


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
