import numpy as np
import torch
from torch.testing import assert_close

from tests.algorithms.batches import outcome
from verl.algorithms.advantages import compute_rloo_outcome_advantage

SCORES, LENGTHS, INDEX = [1.0, 0.0, 2.0, 0.25], [3, 1, 5, 2], np.array(["a", "a", "b", "a"], dtype=object)


def test_rloo_by_hand():
    rewards, mask = outcome(SCORES, LENGTHS)
    advantages, _ = compute_rloo_outcome_advantage(rewards, mask, INDEX)
    assert_close(advantages, torch.tensor([[0.875], [-0.625], [2.0], [-0.25]]) * mask)
