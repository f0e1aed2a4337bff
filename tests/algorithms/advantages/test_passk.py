import numpy as np
import pytest
import torch

from tests.algorithms.batches import outcome, per_response
from verl.algorithms.advantages import (
    compute_grpo_passk_outcome_advantage,
)

SCORES, LENGTHS, INDEX = [1.0, 0.0, 2.0, 0.25], [3, 1, 5, 2], np.array(["a", "a", "b", "a"], dtype=object)


@pytest.mark.parametrize(("by_std", "expected"), [(True, [1.441151, 0, 1.999998, 0]), (False, [0.75, 0, 2.0, 0])])
def test_grpo_passk_by_hand_pays_only_the_lead_of_the_best(by_std, expected):
    rewards, mask = outcome(SCORES, LENGTHS)
    advantages, returns = compute_grpo_passk_outcome_advantage(rewards, mask, INDEX, norm_adv_by_std_in_grpo=by_std)
    per_response(advantages, mask, expected)
    assert torch.equal(advantages, returns)


def test_grpo_passk_gives_zero_for_a_tie():
    rewards, mask = outcome([1.0, 1.0, 0.0], [1, 2, 3])
    assert (compute_grpo_passk_outcome_advantage(rewards, mask, np.zeros(3))[0] == 0).all()
