import numpy as np
from torch.testing import assert_close

from tests.algorithms.batches import outcome, per_response
from verl.algorithms.advantages import compute_grpo_outcome_advantage, compute_opo_outcome_advantage

SCORES, LENGTHS, INDEX = [1.0, 0.0, 2.0, 0.25], [3, 1, 5, 2], np.array(["a", "a", "b", "a"], dtype=object)


def test_opo_by_hand_weighs_the_baseline_by_length():
    rewards, mask = outcome(SCORES, LENGTHS)
    per_response(compute_opo_outcome_advantage(rewards, mask, INDEX)[0], mask, [0.416667, -0.583333, 2.0, -0.333333])


def test_opo_of_equal_lengths_is_grpo_without_std():
    rewards, mask = outcome(SCORES, [4] * 4)
    plain = compute_grpo_outcome_advantage(rewards, mask, INDEX, norm_adv_by_std_in_grpo=False)
    assert_close(compute_opo_outcome_advantage(rewards, mask, INDEX), plain)
