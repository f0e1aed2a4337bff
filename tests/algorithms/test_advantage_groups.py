from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.test_advantage import close, outcome
from verl.algorithms.advantage import NonFiniteError, compute_grpo_outcome_advantage
from verl.algorithms.advantage_baselines import (
    compute_optimal_token_baseline_advantage,
)
from verl.algorithms.advantage_groups import (
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_opo_outcome_advantage,
)

SCORES, LENGTHS, INDEX = [1.0, 0.0, 2.0, 0.25], [3, 1, 5, 2], np.array(["a", "a", "b", "a"], dtype=object)


def per_response(advantages, mask, expected):
    assert_close(advantages, torch.tensor(expected)[:, None] * mask, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("by_std", "expected"), [(True, [1.441151, 0, 1.999998, 0]), (False, [0.75, 0, 2.0, 0])])
def test_grpo_passk_by_hand_pays_only_the_lead_of_the_best(by_std, expected):
    rewards, mask = outcome(SCORES, LENGTHS)
    advantages, returns = compute_grpo_passk_outcome_advantage(rewards, mask, INDEX, norm_adv_by_std_in_grpo=by_std)
    per_response(advantages, mask, expected)
    assert torch.equal(advantages, returns)


def test_grpo_passk_pays_nobody_for_a_tie():
    rewards, mask = outcome([1.0, 1.0, 0.0], [1, 2, 3])
    assert (compute_grpo_passk_outcome_advantage(rewards, mask, np.zeros(3))[0] == 0).all()


def test_opo_by_hand_weighs_the_baseline_by_length():
    rewards, mask = outcome(SCORES, LENGTHS)
    per_response(compute_opo_outcome_advantage(rewards, mask, INDEX)[0], mask, [0.416667, -0.583333, 2.0, -0.333333])


def test_opo_of_equal_lengths_is_grpo_without_std():
    rewards, mask = outcome(SCORES, [4] * 4)
    plain = compute_grpo_outcome_advantage(rewards, mask, INDEX, norm_adv_by_std_in_grpo=False)
    assert_close(compute_opo_outcome_advantage(rewards, mask, INDEX), plain)


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


COLUMNS = {"accuracy": np.array([1.0, 0.0, 1.0, 0.0], dtype=object), "format": np.array([0.5, 0.1, 0.1, 0.3])}


def algorithm(weights=None, keys=("accuracy", "format")):
    return SimpleNamespace(gdpo_reward_keys=list(keys), gdpo_reward_weights=weights)


def test_gdpo_by_hand_normalises_each_reward_before_the_sum():
    rewards, mask = outcome(SCORES, LENGTHS)
    advantages, _ = compute_gdpo_outcome_advantage(rewards, mask, INDEX, COLUMNS, config=algorithm([2.0, 1.0]))
    per_response(advantages, mask, [0.940323, -1.824851, 0.328293, -1.318790])


def test_gdpo_gives_a_small_reward_as_much_say_as_a_large_one():
    rewards, mask = outcome([0.0] * 4, LENGTHS)
    tiny = COLUMNS | {"format": COLUMNS["format"] * 1e-2}
    config = dict(algorithm().__dict__)  # verl hands over a mapping
    loud = compute_gdpo_outcome_advantage(rewards, mask, INDEX, COLUMNS, config=config)
    low = compute_gdpo_outcome_advantage(rewards, mask, np.array([0, 0, 0, 0]), tiny, config=config)
    assert_close(
        low, compute_gdpo_outcome_advantage(rewards, mask, np.zeros(4), COLUMNS, config=config), atol=2e-3, rtol=0
    )
    assert not torch.equal(low[0], loud[0])


@pytest.mark.parametrize(
    ("config", "columns", "error", "message"),
    [
        (algorithm(keys=()), COLUMNS, ValueError, "gdpo_reward_keys is empty"),
        (algorithm(), {"accuracy": COLUMNS["accuracy"]}, ValueError, "names 'format', which this batch does not have"),
        (algorithm([1.0]), COLUMNS, ValueError, "has 1 numbers for 2"),
        (algorithm(), COLUMNS | {"format": [0, np.nan, 0, 0]}, NonFiniteError, r"reward 'format' holds nan .*\[1\]"),
    ],
)
def test_gdpo_says_what_is_wrong_with_its_rewards(config, columns, error, message):
    rewards, mask = outcome(SCORES, LENGTHS)
    with pytest.raises(error, match=message):
        compute_gdpo_outcome_advantage(rewards, mask, INDEX, columns, config=config)


REWARDS = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.5, 0.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
LOG_PROBS = torch.tensor([[-1.0, -0.5, -0.2], [-2.0, -0.1, 9.0]])
SQUARES = torch.tensor([[0.3, 0.5, 0.7], [0.2, 0.85, 9.0]])


def test_optimal_token_baseline_by_hand_weighs_siblings_by_their_gradients_so_far():
    same = np.zeros(2)
    advantages, returns = compute_optimal_token_baseline_advantage(REWARDS, MASK, same, LOG_PROBS, SQUARES)
    close(advantages, [[0.311110, 0.266267, 1.0], [-0.188890, -0.233733, 0.0]])
    close(returns, [[1.0, 1.0, 1.0], [0.5, 0.5, 0.0]])
    kept = compute_optimal_token_baseline_advantage(REWARDS, MASK, same, LOG_PROBS, SQUARES, handle_zero_tail=False)
    close(kept[0], [[0.311110, 0.266267, 0.0], [-0.188890, -0.233733, 0.0]])


def test_optimal_token_baseline_passes_over_tool_output():
    spread = lambda x: torch.stack([x[:, 0], x[:, 0] + 5, x[:, 1], x[:, 2]], dim=1)  # noqa: E731
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 1, 0]])
    plain, _ = compute_optimal_token_baseline_advantage(REWARDS, MASK, np.zeros(2), LOG_PROBS, SQUARES)
    holes, _ = compute_optimal_token_baseline_advantage(
        spread(REWARDS), mask, np.zeros(2), spread(LOG_PROBS), spread(SQUARES)
    )
    assert_close(holes[:, [0, 2, 3]], plain)
    assert (holes[:, 1] == 0).all()


def test_optimal_token_baseline_of_a_response_alone_is_its_return_and_weights_square():
    alone, _ = compute_optimal_token_baseline_advantage(REWARDS, MASK, np.arange(2), LOG_PROBS, SQUARES)
    close(alone, [[1.0, 1.0, 1.0], [0.5, 0.5, 0.0]])
    doubled = torch.full_like(REWARDS, 2.0)
    first = compute_optimal_token_baseline_advantage(REWARDS, MASK, np.zeros(2), LOG_PROBS, SQUARES, doubled)
    assert_close(first, compute_optimal_token_baseline_advantage(REWARDS, MASK, np.zeros(2), LOG_PROBS, SQUARES))
    only_first = torch.tensor([[1.0], [0.0]]).expand(2, 3)
    close(
        compute_optimal_token_baseline_advantage(REWARDS, MASK, np.zeros(2), LOG_PROBS, SQUARES, only_first)[0],
        [[0.0, 0.0, 1.0], [-0.5, -0.5, 0.0]],
    )
