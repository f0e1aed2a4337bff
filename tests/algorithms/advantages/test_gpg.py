import numpy as np
from torch.testing import assert_close

from tests.algorithms.batches import outcome, per_response
from verl.algorithms.advantages import (
    compute_gpg_outcome_advantage,
)

SCORES, LENGTHS, INDEX = [1.0, 0.0, 2.0, 0.25], [3, 1, 5, 2], np.array(["a", "a", "b", "a"], dtype=object)


def test_gpg_by_hand_scales_by_the_share_of_responses_that_teach():
    rewards, mask = outcome([1.0, 0.0, 1.0, 1.0, 0.0], [3, 1, 5, 2, 4])
    index = np.array([0, 0, 1, 1, 2])  # the second group is all right, the third a response alone with nothing
    advantages, _ = compute_gpg_outcome_advantage(rewards, mask, index)
    per_response(advantages, mask, [1.25, -1.25, 0.0, 0.0, 0.0])
    per_response(compute_gpg_outcome_advantage(rewards, mask, index, f_norm=5.0)[0], mask, [0.25, -0.25, 0.0, 0.0, 0.0])


def test_gpg_does_not_depend_on_where_zero_lies():
    rewards, mask = outcome([1.0, 0.0, 1.0, 1.0], [3, 1, 5, 2])
    index = np.array([0, 0, 1, 1])
    shifted, _ = outcome([4.0, 3.0, 4.0, 4.0], [3, 1, 5, 2])
    assert_close(
        compute_gpg_outcome_advantage(shifted, mask, index), compute_gpg_outcome_advantage(rewards, mask, index)
    )
