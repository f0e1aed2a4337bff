"""GiGPO: turns are compared with turns that began in the same state."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.advantages.estimators import num_turns
from tests.algorithms.batches import close, normal, outcome, ragged_mask
from verl.algorithms.advantages import (
    compute_gigpo_outcome_advantage,
    compute_grpo_outcome_advantage,
)
from verl.algorithms.advantages.common import find_turns
from verl.algorithms.advantages.gigpo import anchor_groups, anchor_metrics, state_key

# two responses to one prompt, of three and two turns, rewarded at the ends of turns
MASK = torch.tensor([[1, 1, 0, 1, 0, 1, 1, 0], [1, 0, 1, 1, 0, 0, 0, 0]])
REWARDS = torch.tensor([[0.0, 0.0, 7.0, 1.0, 7.0, 0.0, 2.0, 7.0], [0.5, 7.0, 0.0, 0.0, 7.0, 7.0, 7.0, 7.0]]) * MASK
STATES = [["start", "hall", "start"], ["start", "cellar"]]
INDEX = np.array(["p", "p"], dtype=object)
# with step_gamma 1/2: to go 1, 2, 2 and 1/2, 0; "start" is begun in three times, its mean 7/6 and its std 0.763763
# scores 3 and 1/2, their mean 7/4 and their std 1.767767


@pytest.mark.parametrize(
    ("options", "of_turns"),
    [
        ({}, [0.488889, 0.707106, 1.798194, -1.579977, -0.707106]),
        ({"mode": "mean_norm"}, [1.083333, 1.25, 2.083333, -1.916667, -1.25]),
        ({"mode": "mean_norm", "episode_weight": 0.0}, [-0.166667, 0.0, 0.833333, -0.666667, 0.0]),
        ({"mode": "mean_norm", "step_weight": 0.0}, [1.25, 1.25, 1.25, -1.25, -1.25]),
        ({"mode": "mean_norm", "episode_weight": 2.0, "step_weight": 0.5}, [2.416667, 2.5, 2.916667, -2.833333, -2.5]),
    ],
)
def test_gigpo_by_hand_compares_episodes_and_turns_of_the_same_state(options, of_turns):
    advantages, returns = compute_gigpo_outcome_advantage(REWARDS, MASK, INDEX, STATES, step_gamma=0.5, **options)
    a, b, c, d, e = of_turns
    close(advantages, [[a, a, 0, b, 0, c, c, 0], [d, 0, e, e, 0, 0, 0, 0]])
    assert torch.equal(advantages, returns)


def test_options_come_from_the_algorithm_section():
    config = SimpleNamespace(gigpo=SimpleNamespace(episode_weight=2.0, step_weight=0.5, mode="mean_norm"))
    by_config = compute_gigpo_outcome_advantage(REWARDS, MASK, INDEX, STATES, 0.5, config=config)
    by_hand = compute_gigpo_outcome_advantage(REWARDS, MASK, INDEX, STATES, 0.5, 2.0, 0.5, "mean_norm")
    assert_close(by_config, by_hand)


def test_one_response_alone_is_compared_with_zero_and_with_its_own_returns_to_a_state():
    advantages, _ = compute_gigpo_outcome_advantage(REWARDS[:1], MASK[:1], INDEX[:1], STATES[:1], 0.5, mode="mean_norm")
    close(advantages, [[2.5, 2.5, 0, 3.0, 0, 3.5, 3.5, 0]])


def test_states_of_different_prompts_are_different_states():
    alone = compute_gigpo_outcome_advantage(REWARDS[:1], MASK[:1], INDEX[:1], STATES[:1])[0]
    together = compute_gigpo_outcome_advantage(REWARDS, MASK, np.array(["p", "q"]), STATES)[0]
    assert_close(together[:1], alone)


def test_responses_of_one_turn_need_no_states_and_get_both_weights_times_grpo():
    rewards, mask = outcome([1.0, 0.0, 2.0, 0.25], [3, 1, 5, 2])
    index = np.array(["a", "a", "b", "a"], dtype=object)
    grpo = compute_grpo_outcome_advantage(rewards, mask, index)[0]
    ours = compute_gigpo_outcome_advantage(rewards, mask, index, episode_weight=0.5, step_weight=2.0)[0]
    assert_close(ours[[0, 1, 3]], 2.5 * grpo[[0, 1, 3]])
    assert_close(ours[2], 0.5 * grpo[2])  # alone: no other row begins with its prompt
    assert_close(compute_gigpo_outcome_advantage(rewards, mask, index, [["here"]] * 4, 0.9, 0.5, 2.0)[0], ours)


def test_padding_order_of_rows_and_names_of_states_change_nothing():
    mask = ragged_mask(8, 90, seed=1, holes=True)
    rewards, index = normal(mask, seed=2) * mask, np.arange(8) % 3
    states = [[k % 3 for k in range(count)] for count in num_turns(mask)]
    expected = compute_gigpo_outcome_advantage(rewards, mask, index, states)[0]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    wide = torch.nn.functional.pad(mask[order], (0, 100)), torch.nn.functional.pad(rewards[order], (0, 100))
    renamed = [[f"room {s}" for s in states[i]] for i in order.tolist()]
    got = compute_gigpo_outcome_advantage(wide[1], wide[0], index[order.numpy()], renamed)[0]
    assert_close(got[:, :90], expected[order])


def test_a_masked_response_counts_as_an_episode_and_has_no_turns():
    mask = MASK.clone()
    mask[1] = 0
    advantages, _ = compute_gigpo_outcome_advantage(REWARDS, mask, INDEX, STATES, 0.5, mode="mean_norm")
    close(advantages[:1], [[0.75, 0.75, 0, 1.25, 0, 1.75, 1.75, 0]])
    assert (advantages[1] == 0).all()


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (None, r"gigpo: 2 of the batch's responses .*row 0, 3 turns.*turn_state_ids.*extra_fields.*grpo"),
        ([["start", "hall"], ["start", "cellar"]], r"row 0 has 2 entries, and the response has 3 turns"),
        ([STATES[0], None], r"row 1 has no list"),
        (["abc", STATES[1]], r"row 0 has no list"),
        ([STATES[0], ["start", object()]], r"a state is a object, which cannot be compared by value"),
    ],
)
def test_turns_without_states_are_refused_with_the_way_out(states, words):
    with pytest.raises(ValueError, match=words):
        compute_gigpo_outcome_advantage(REWARDS, MASK, INDEX, states)
    with pytest.raises(ValueError, match="algorithm.gigpo.mode=std is not known"):
        compute_gigpo_outcome_advantage(REWARDS, MASK, INDEX, STATES, mode="std")


def test_states_are_compared_by_value():
    board = np.arange(4).reshape(2, 2)
    assert state_key(board) == state_key(torch.arange(4).reshape(2, 2)) != state_key(board.T)
    assert state_key([1, "a", {"b": board}]) == state_key((1, "a", {"b": board.copy()}))
    assert len({state_key(x) for x in (1, "1", [1], {"1": 1}, None, np.array([1]))}) == 6


def test_metrics_tell_how_much_there_is_to_compare():
    groups = anchor_groups(find_turns(REWARDS, MASK), INDEX, STATES)
    assert anchor_metrics(groups, 2) == {"gigpo/turns_per_response": 2.5, "gigpo/shared_state_fraction": 0.6}
