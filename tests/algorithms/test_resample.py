"""Rows resampled by their scores: probabilities by hand, frequencies, seeds."""

import pytest
import torch

from verl.algorithms.resample import RESAMPLE_METHODS, resample_probabilities, resample_rows

SCORES = torch.tensor([1.0, -2.0, 0.0, 3.0, 3.0])


@pytest.mark.parametrize(
    ("method", "power", "weights"),
    [
        ("pow", 2.0, [1, 4, 0, 9, 9]),
        ("pow", 1.0, [1, 2, 0, 3, 3]),
        ("pow", 0.0, [1, 1, 1, 1, 1]),
        ("max_min", 2.0, [0, 1, 0, 1, 1]),
        ("max_random", 2.0, [1, 1, 1, 4, 4]),
    ],
)
def test_probabilities_by_hand(method, power, weights):
    expected = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    torch.testing.assert_close(resample_probabilities(SCORES, method, power), expected)


@pytest.mark.parametrize("method", RESAMPLE_METHODS)
@pytest.mark.parametrize("score", [0.0, -2.5, 1e300, 1e-300])
def test_equal_scores_are_equally_likely(method, score):
    scores = torch.full((4,), score, dtype=torch.float64)
    assert resample_probabilities(scores, method).tolist() == [0.25] * 4
    assert resample_probabilities(scores[:1], method).tolist() == [1.0]


@pytest.mark.parametrize("method", RESAMPLE_METHODS)
def test_probabilities_follow_their_rows(method):
    order = torch.tensor([3, 0, 4, 2, 1])
    assert torch.equal(resample_probabilities(SCORES[order], method), resample_probabilities(SCORES, method)[order])


def test_large_powers_leave_the_most_extreme():
    assert resample_probabilities(SCORES.double() * 1e200, "pow", 10000.0).tolist() == [0, 0, 0, 0.5, 0.5]


@pytest.mark.parametrize("method", RESAMPLE_METHODS)
def test_rows_come_as_often_as_they_are_likely(method):
    scores = SCORES.repeat(20_000)
    rows = resample_rows(scores, method, seed=3)
    assert rows.shape == scores.shape and rows.dtype == torch.int64
    shares = torch.bincount(rows % 5, minlength=5) / len(rows)
    expected = resample_probabilities(SCORES, method)
    torch.testing.assert_close(shares.double(), expected, atol=0.006, rtol=0)
    assert not shares[expected == 0].any()


def test_the_seed_decides():
    assert torch.equal(resample_rows(SCORES, seed=1), resample_rows(SCORES, seed=1))
    assert any(not torch.equal(resample_rows(SCORES, seed=1), resample_rows(SCORES, seed=seed)) for seed in (2, 3, 4))


def test_what_cannot_be_weighed_is_named():
    with pytest.raises(ValueError, match="row 1 is nan"):
        resample_probabilities(torch.tensor([0.0, float("nan")]))
    with pytest.raises(ValueError, match="reweight_method=best is not known: use pow, max_min, max_random"):
        resample_probabilities(SCORES, "best")
