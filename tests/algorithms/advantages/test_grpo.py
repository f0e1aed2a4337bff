import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.batches import close, outcome
from verl.algorithms.advantages import (
    compute_grpo_outcome_advantage,
    compute_rloo_outcome_advantage,
    get_adv_estimator_fn,
)

SCORES, LENGTHS, INDEX = [1.0, 0.0, 2.0, 0.25], [3, 1, 5, 2], np.array(["a", "a", "b", "a"], dtype=object)


@pytest.mark.parametrize(
    ("by_std", "expected"),
    [(True, [1.120895, -0.800639, 1.999998, -0.320256]), (False, [0.583333, -0.416667, 2.0, -0.166667])],
)
def test_grpo_by_hand_and_a_response_alone_keeps_its_score(by_std, expected):
    rewards, mask = outcome(SCORES, LENGTHS)
    advantages, returns = compute_grpo_outcome_advantage(rewards, mask, INDEX, norm_adv_by_std_in_grpo=by_std)
    assert_close(advantages, torch.tensor(expected)[:, None] * mask, rtol=0, atol=1e-6)
    assert torch.equal(advantages, returns)


def test_grpo_of_a_single_response_by_hand():
    rewards, mask = outcome([0.75], [2], width=3)
    close(compute_grpo_outcome_advantage(rewards, mask, np.array([0]), 0.5)[0], [[0.5, 0.5, 0.0]])


def test_vectorized_names_are_the_same_functions():
    assert get_adv_estimator_fn("grpo_vectorized") is compute_grpo_outcome_advantage
    assert get_adv_estimator_fn("rloo_vectorized") is compute_rloo_outcome_advantage
