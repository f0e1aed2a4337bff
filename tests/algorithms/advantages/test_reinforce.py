import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.batches import close, normal, ragged_mask, slow_suffix_sum
from verl.algorithms.advantages import (
    compute_agentic_reinforce_advantage,
    compute_reinforce_advantage,
    compute_step_reinforce_advantage,
)

# three turns of 3, 1 and 2 tokens, a tool's output after each of the first two; rewards at the ends of turns
REWARDS = torch.tensor([[0.0, 0.0, 1.0, 7.0, 2.0, 7.0, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0, 7.0, 7.0, 7.0, 7.0]])
MASK = torch.tensor([[1, 1, 1, 0, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0]])


def test_reinforce_by_hand():
    advantages, returns = compute_reinforce_advantage(REWARDS, MASK, 0.5)
    close(advantages, [[0.53125, 1.0625, 2.125, 0, 2.25, 0, 0.5, 0], [0.5, 1.0, 0, 0, 0, 0, 0, 0]])
    assert torch.equal(advantages, returns)


def test_agentic_reinforce_by_hand_discounts_by_turns_not_by_tokens():
    advantages, _ = compute_agentic_reinforce_advantage(REWARDS, MASK, 0.5)
    close(advantages, [[2.125, 2.125, 2.125, 0, 2.25, 0, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0, 0, 0, 0, 0]])


def test_step_reinforce_by_hand_sets_each_turns_return_on_its_last_token():
    advantages, _ = compute_step_reinforce_advantage(REWARDS, MASK, 0.5, 0.9)
    close(advantages, [[0.80125, 1.6025, 3.205, 0, 2.45, 0, 0.25, 0.5], [0.125, 0.25, 0.5, 1.0, 0, 0, 0, 0]])


@pytest.mark.parametrize("width", [7, 300])
def test_a_response_of_one_turn_rewarded_at_its_end_is_plain_reinforce(width):
    mask = ragged_mask(6, width, seed=0)
    rewards = torch.zeros(6, width, dtype=torch.float64)
    rewards[torch.arange(6), mask.sum(-1) - 1] = torch.arange(6.0, dtype=torch.float64)
    expected = slow_suffix_sum(rewards, mask, 0.9)
    assert_close(compute_reinforce_advantage(rewards, mask, 0.9)[0], expected)
    assert_close(compute_step_reinforce_advantage(rewards, mask, 0.9, 0.5)[0], expected)
    assert_close(compute_agentic_reinforce_advantage(rewards, mask, 0.1)[0], rewards.sum(-1, keepdim=True) * mask)


def test_without_discount_a_turn_is_worth_all_that_follows_it_in_rewards_anywhere():
    mask = ragged_mask(5, 90, seed=3, holes=True)
    rewards = normal(mask, seed=4)
    to_go = slow_suffix_sum(rewards, mask, 1.0)
    advantages, _ = compute_agentic_reinforce_advantage(rewards, mask, 1.0)
    for row, own in enumerate(mask.bool()):
        begins = [t for t in range(90) if own[t] and (t == 0 or not own[t - 1])]
        for t in begins:
            assert_close(advantages[row, t], to_go[row, t])
