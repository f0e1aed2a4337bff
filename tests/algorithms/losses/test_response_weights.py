import pytest
import torch
from torch.testing import assert_close

from verl.algorithms.losses import response_weights

LENGTHS, DIFFICULTY = torch.tensor([2, 4, 3, 0]), torch.tensor([-7.0, 1.0, 0.5, 9.0])


@pytest.mark.parametrize(
    ("difficulty", "by_length", "expected"),
    [
        (None, True, [1.5, 0.5, 1.0, 0.0]),
        (DIFFICULTY, False, [0.4, 1.6, 1.0, 0.0]),  # 1/2, 2 and 5/4 over their mean 5/4
        (DIFFICULTY, True, [0.75, 1.0, 1.25, 0.0]),
        (None, False, [1.0, 1.0, 1.0, 0.0]),
    ],
)
def test_weights_by_hand(difficulty, by_length, expected):
    assert_close(response_weights(LENGTHS, difficulty, by_length), torch.tensor(expected))


def test_order_of_responses_changes_nothing():
    order = torch.tensor([2, 0, 3, 1])
    weights = response_weights(LENGTHS, DIFFICULTY, True)
    assert_close(response_weights(LENGTHS[order], DIFFICULTY[order], True), weights[order])


@pytest.mark.parametrize("lengths", [[3, 3, 3], [5], [0, 0], []])
def test_equal_lengths_weigh_the_same_and_responses_without_tokens_nothing(lengths):
    lengths = torch.tensor(lengths, dtype=torch.long)
    assert_close(response_weights(lengths, by_length=True), (lengths > 0).float())
