"""Shaping of rewards and advantages, against values one can work out by hand."""

import math

import numpy as np
import pytest
import torch

from tests.algorithms.batches import normal, ragged_mask
from verl.algorithms.advantages import (
    NonFiniteError,
    compute_gae_advantage_return,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
)
from verl.algorithms.reward_shaping import (
    Moments,
    centre_and_spread,
    clip_scores,
    clip_tokens,
    merge_moments,
    overlong_penalty,
    rescore,
    whiten_tokens,
    within_difficulty,
)

SCORES = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1], dtype=torch.float64)
GROUPS = np.array([7, 7, 7, 7, 3, 3, 3, 3])
SOURCE = ["math"] * 8


def normalised(scores, index=GROUPS, mean=None, std=None, running=None, sources=None):
    centre, spread = centre_and_spread(scores, index, mean, std, running, sources)
    return (scores - centre) / spread


def close(x, expected, atol=1e-6):
    expected = torch.as_tensor(expected, dtype=x.dtype)
    torch.testing.assert_close(x, expected.expand_as(x), atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        ("group", "group", [0.866025, -0.866025, -0.866025, 0.866025, -0.5, -0.5, -0.5, 1.5]),
        ("group", "batch", [0.966092, -0.966092, -0.966092, 0.966092, -0.483046, -0.483046, -0.483046, 1.449138]),
        ("batch", "batch", [1.207615, -0.724569, -0.724569, 1.207615, -0.724569, -0.724569, -0.724569, 1.207615]),
        ("running", "running", [1.207615, -0.724569, -0.724569, 1.207615, -0.724569, -0.724569, -0.724569, 1.207615]),
        ("group", None, [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, -0.25, 0.75]),
        (None, "batch", [1.932184, 0, 0, 1.932184, 0, 0, 0, 1.932184]),
        (None, "group", [1.732051, 0, 0, 1.732051, 0, 0, 0, 2.0]),
        (None, None, [1, 0, 0, 1, 0, 0, 0, 1]),
    ],
)
def test_normalisation_by_hand(mean, std, expected):
    running = merge_moments({}, SCORES, SOURCE)
    close(normalised(SCORES, GROUPS, mean, std, running, SOURCE), expected, atol=5e-6)


def test_running_moments_in_parts_are_those_of_everything():
    g = torch.Generator().manual_seed(0)
    scores = 100 + torch.randn(60, generator=g, dtype=torch.float64)
    sources = np.array(["a", "b", "b"] * 20)
    known: dict = {}
    for part in (slice(0, 7), slice(7, 8), slice(8, 60)):
        known = merge_moments(known, scores[part], sources[part])
    for name in ("a", "b"):
        mine = scores[torch.from_numpy(sources == name)]
        assert known[name].size == len(mine)
        assert known[name].mean == pytest.approx(mine.mean().item(), abs=1e-10)
        assert known[name].std == pytest.approx(mine.std().item(), abs=1e-10)


def test_two_merges_by_hand():
    first = Moments.of(torch.tensor([1.0, 3.0]))  # mean 2, squares 2
    assert first == (2, 2.0, 2.0)
    both = first.merge(Moments.of(torch.tensor([5.0, 5.0, 8.0])))  # mean 6, squares 6
    assert both.size == 5 and both.mean == pytest.approx(4.4) and both.m2 == pytest.approx(2 + 6 + 16 * 6 / 5)
    assert both.std == pytest.approx(math.sqrt(27.2 / 4))
    assert Moments().merge(Moments()) == (0, 0.0, 0.0) and Moments.of(torch.tensor([4.0])).std == 0


def test_a_source_is_normalised_by_its_own_past():
    known = {"math": Moments(4, 10.0, 12.0), "code": Moments(3, 0.0, 2.0)}  # std 2 and 1
    got = normalised(torch.tensor([12.0, 1.0]).double(), [0, 1], "running", "running", known, ["math", "code"])
    close(got, [1.0, 1.0], atol=2e-6)


@pytest.mark.parametrize("mean", [None, "batch", "group", "running"])
@pytest.mark.parametrize("std", [None, "batch", "group", "running"])
def test_equal_scores_stay_finite_and_a_subtracted_mean_leaves_zero(mean, std):
    scores = torch.full((8,), 0.3, dtype=torch.float64)
    running = merge_moments({}, scores, SOURCE)
    close(normalised(scores, GROUPS, mean, std, running, SOURCE), 0.0 if mean else 0.3, atol=1e-12)


def test_equal_scores_in_a_group_are_not_blown_up_by_anothers_mean():
    scores = torch.tensor([1.0, 1, 0, 2], dtype=torch.float64)
    close(normalised(scores, [0, 0, 1, 1], "batch", "group")[:2], 0.0)
    close(normalised(scores + torch.tensor([1.0, 1, 0, 0]), [0, 0, 1, 1], "batch", "group")[:2], 0.5)


def test_a_response_alone_is_compared_with_zero():
    close(normalised(torch.tensor([0.7, 1.0, 0.0]).double(), [5, 6, 6], "group", "group")[:1], 0.7)


@pytest.mark.parametrize("mean", ["batch", "group", "running"])
@pytest.mark.parametrize("std", ["batch", "group", "running"])
def test_the_order_of_responses_does_not_matter(mean, std):
    g = torch.Generator().manual_seed(3)
    scores = torch.randn(12, generator=g, dtype=torch.float64)
    index, sources = np.arange(12) % 4, np.array(["a", "b", "b"] * 4)
    order = torch.randperm(12, generator=g)
    running = merge_moments({}, scores, sources)
    moved = merge_moments({}, scores[order], sources[order.numpy()])
    here = normalised(scores, index, mean, std, running, sources)
    there = normalised(scores[order], index[order.numpy()], mean, std, moved, sources[order.numpy()])
    close(there, here[order], atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_refused(bad):
    with pytest.raises(NonFiniteError, match="token_level_scores holds"):
        centre_and_spread(torch.tensor([0.0, bad]), [0, 0], "batch", "batch")
    with pytest.raises(NonFiniteError, match="token_level_scores holds"):
        within_difficulty(torch.tensor([0.0, bad]), [0, 0], 0, 1)


def test_overlong_penalty_by_hand():
    lengths = torch.tensor([0, 80, 85, 90, 100, 120])
    close(overlong_penalty(lengths, 100, 20), [0, 0, -0.25, -0.5, -1, -1])
    close(overlong_penalty(lengths, 100, 20, 0.2), [0, 0, -0.05, -0.1, -0.2, -0.2])


def test_rescored_tokens_add_up_by_hand():
    scores = torch.tensor([[1.0, 3.0, 0.0], [0.0, 2.0, 9.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 0]])
    scores[1, 2] = 0
    got = rescore(scores, mask, torch.tensor([1.0, -1.5, 7.0]), torch.tensor([0.5, 0.5, 0.5]))
    close(got, [[0.5, 0.5, 0], [0, -1.5, 0], [0, 0, 0]])
    assert got.dtype == torch.float32


def test_rescoring_with_a_hole_at_the_end_uses_the_last_sampled_token():
    got = rescore(torch.zeros(1, 4), torch.tensor([[1, 0, 1, 0]]), torch.tensor([2.0]), torch.ones(1))
    close(got, [[0, 0, 2, 0]])


def test_padding_changes_nothing():
    mask = ragged_mask(6, 9, 0)
    x = normal(mask, 1) * mask
    scores, scale = torch.arange(6.0), torch.linspace(0.5, 2, 6)
    wide, wide_mask = torch.nn.functional.pad(x, (0, 5)), torch.nn.functional.pad(mask, (0, 5))
    rubbish = torch.where(wide_mask.bool(), wide, 1e6)
    close(rescore(wide, wide_mask, scores, scale)[:, :9], rescore(x, mask, scores, scale), atol=1e-12)
    close(whiten_tokens(rubbish, wide_mask)[:, :9], whiten_tokens(x, mask), atol=1e-12)
    assert whiten_tokens(rubbish, wide_mask)[:, 9:].eq(0).all()
    assert clip_tokens(rubbish, wide_mask, 0.5)[1] == pytest.approx(clip_tokens(x, mask, 0.5)[1])


def test_whitened_tokens_by_hand():
    x = torch.tensor([[0.0, 0.0, 1.0], [0.0, 3.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])  # mean 0.8, variance (3 * 0.64 + 0.04 + 4.84) / 4 = 1.7
    expected = [[-0.613572, -0.613572, 0.153393], [-0.613572, 1.687323, 0]]
    close(whiten_tokens(x, mask), expected)


def test_whitening_one_token_or_none_or_equal_ones_gives_zero():
    assert whiten_tokens(torch.tensor([[4.0, 0.0]]), torch.tensor([[1, 0]])).tolist() == [[0, 0]]
    assert whiten_tokens(torch.ones(2, 3), torch.zeros(2, 3)).eq(0).all()
    close(whiten_tokens(torch.full((2, 3), 0.1), torch.ones(2, 3)), 0.0, atol=1e-3)


def test_bounds_and_the_share_they_changed():
    scores, share = clip_scores(torch.tensor([-3.0, 0.5, 2.0, 9.0]), 2.0)
    assert scores.tolist() == [-2, 0.5, 2, 2] and share == 0.5
    tokens, share = clip_tokens(torch.tensor([[4.0, 1.0, 4.0]]), torch.tensor([[1, 1, 0]]), 2.0)
    assert tokens[0, :2].tolist() == [2, 1] and share == 0.5
    assert clip_scores(torch.zeros(0), 1.0)[1] == 0 and clip_tokens(torch.ones(1, 2), torch.zeros(1, 2), 0.5)[1] == 0


def test_difficulty_is_that_of_the_group_and_its_ends_are_inside():
    scores = torch.tensor([1.0, 1, 0, 1, 0, 0, 0.2])
    index = ["easy", "easy", "mid", "mid", "hard", "hard", "alone"]
    assert within_difficulty(scores, index, 0.1, 0.9).tolist() == [False, False, True, True, False, False, True]
    assert within_difficulty(scores, index, 0.5, 1.0).tolist() == [True, True, True, True, False, False, False]
    assert within_difficulty(scores, index, 0.0, 1.0).all()


def test_whitening_can_be_switched_off():
    mask = torch.tensor([[1, 1], [1, 0]])
    rewards, values = torch.tensor([[0.0, 1.0], [3.0, 0.0]]), torch.tensor([[0.5, 0.25], [1.0, 0.0]])
    raw, _ = compute_gae_advantage_return(rewards, values, mask, 1.0, 1.0, whiten_advantages=False)
    close(raw, [[0.5, 0.75], [2.0, 0]])
    whitened, _ = compute_gae_advantage_return(rewards, values, mask, 1.0, 1.0)
    close(whitened, whiten_tokens(raw, mask))
    raw, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.5, whiten_advantages=False)
    close(raw, [[0.5, 1.0], [3.0, 0]])
    assert raw.equal(returns)
    raw, _ = compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, [0, 0], whiten_advantages=False)
    close(raw, [[-1.0, -1.0], [1.0, 0]])
