from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.batches import outcome, per_response
from verl.algorithms.advantages import (
    NonFiniteError,
    compute_gdpo_outcome_advantage,
)

SCORES, LENGTHS, INDEX = [1.0, 0.0, 2.0, 0.25], [3, 1, 5, 2], np.array(["a", "a", "b", "a"], dtype=object)
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
