from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.batches import close, outcome
from verl.algorithms.advantages import (
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
)

REWARDS = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.5, 0.0, -1.0, 0.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]])  # the second row has a hole: a tool's output
SCORES, LENGTHS, INDEX = [1.0, 0.0, 2.0, 0.25], [3, 1, 5, 2], np.array(["a", "a", "b", "a"], dtype=object)


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
