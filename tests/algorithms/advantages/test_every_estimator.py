"""What every registered estimator promises. A new name needs its literals and its credit in ``estimators.py``."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad
from torch.testing import assert_close

from tests.algorithms.advantages.estimators import (
    BASELINE_FREE,
    BY_HAND,
    COLUMNS,
    CREDIT,
    EXTRAS,
    INDEX,
    MASK,
    NAMES,
    REWARDS,
    call,
    whiten_off,
)
from tests.algorithms.batches import normal, ragged_mask
from verl.algorithms.advantages import AdvantageEstimator, NonFiniteError, get_adv_estimator_fn
from verl.algorithms.registry import does_take_ragged
from verl.batch.layout import Layout
from verl.batch.ragged import Ragged
from verl.config.checks.support import built_names

pytestmark = pytest.mark.parametrize("name", NAMES)


def made_up(mask, seed=0):
    """Columns and extras of each row, the same for the same rows: they can be reordered and padded with them."""
    draw = lambda i: normal(mask, seed + i) * mask  # noqa: E731
    columns = {"values": draw(1), "old_log_probs": -draw(2).abs(), "sum_pi_squared": draw(3).sigmoid() * mask}
    numbers = np.random.default_rng(seed).normal(size=(3, len(mask)))
    columns["reward_baselines"] = torch.tensor(numbers[0])
    return columns, {"accuracy": numbers[1], "format": numbers[2]}


def reshaped(change, mask, *parts):
    """``change`` of everything (B, R) among mappings and tensors; (B,) stays."""
    each = lambda x: change(x) if isinstance(x, torch.Tensor) and x.shape == mask.shape else x  # noqa: E731
    return [{k: each(v) for k, v in part.items()} if isinstance(part, dict) else each(part) for part in parts]


def test_it_is_offered_by_the_config_named_by_the_enum_and_covered_here(name):
    assert name in built_names("algorithm.adv_estimator") and name in {e.value for e in AdvantageEstimator}
    assert name in BY_HAND and CREDIT[name] in ("response", "response and turn", "turn", "token")


@pytest.mark.parametrize("holes", [False, True])
def test_without_padding_it_gives_the_same_numbers(name, holes):
    if not does_take_ragged(get_adv_estimator_fn(name)):
        pytest.skip("takes padded columns only")
    mask = ragged_mask(9, 150, seed=4, holes=holes)
    columns, extras = made_up(mask)
    rewards, index = torch.where(mask.bool(), normal(mask, 9), 0).float(), np.arange(9) // 3
    layout = Layout.from_mask(mask)
    flat = lambda x: Ragged.from_padded(x, layout) if x.shape == mask.shape else x  # noqa: E731
    columns = {key: x.float() for key, x in columns.items()}
    expected = call(name, rewards, mask, index, columns, extras)
    found = call(name, flat(rewards), flat(mask), index, {key: flat(x) for key, x in columns.items()}, extras)
    for one, other in zip(found, expected, strict=True):
        assert one.layout == layout
        assert_close(one.padded(), other, rtol=1e-6, atol=1e-6)


def test_by_hand_in_a_batch_and_alone(name):
    batch, alone, *returns = BY_HAND[name]
    got = call(name, REWARDS, MASK, INDEX, COLUMNS, EXTRAS)
    for tensor, expected in zip(got, (batch, *(returns or [batch])), strict=True):
        expected = torch.tensor(expected, dtype=torch.float32)
        expected = expected[:, None] * MASK if expected.dim() == 1 else expected
        assert_close(tensor, expected, rtol=0, atol=2e-6)
    first = slice(0, 1)
    columns, extras = ({k: v[first] for k, v in part.items()} for part in (COLUMNS, EXTRAS))
    got, _ = call(name, REWARDS[first], MASK[first], INDEX[first], columns, extras)
    assert_close(got, torch.tensor(alone, dtype=torch.float32) * MASK[first], rtol=0, atol=2e-6)


def test_shape_dtype_and_masked_positions(name):
    mask = ragged_mask(8, 70, seed=0, holes=True)
    columns, extras = made_up(mask)
    columns = {k: v.float() for k, v in columns.items()}
    for result in call(name, (normal(mask, seed=1) * mask).float(), mask, np.arange(8) // 4, columns, extras):
        assert result.shape == mask.shape and result.dtype == torch.float32 and not result.requires_grad
        assert (result[mask == 0] == 0).all() and result.isfinite().all() and result.abs().sum() > 0


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_the_order_of_rows_does_not_matter(name, data):
    rows, seed = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 99))
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    index = np.array(data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
    mask = ragged_mask(rows, 20, seed, holes=True)
    rewards = normal(mask, seed + 1) * mask
    columns, extras = made_up(mask, seed)
    moved = [{k: v[order] for k, v in columns.items()}, {k: v[order.numpy()] for k, v in extras.items()}]
    straight = call(name, rewards, mask, index, columns, extras)
    for a, b in zip(straight, call(name, rewards[order], mask[order], index[order.numpy()], *moved), strict=True):
        assert_close(a[order], b)


@pytest.mark.parametrize("sides", [(0, 37), (37, 0), (64, 1)])
def test_padding_on_either_side_changes_nothing(name, sides):
    mask = ragged_mask(6, 64, seed=2, holes=True)
    rewards, index = normal(mask, seed=3) * mask, np.arange(6) // 3
    columns, extras = made_up(mask)
    wide_rewards, wide_mask = (pad(x, sides) for x in (rewards, mask))
    (wide,) = reshaped(lambda x: pad(x, sides, value=5.0), mask, columns)  # rubbish, as in any masked cell
    tight = call(name, rewards, mask, index, columns, extras)
    for a, b in zip(tight, call(name, wide_rewards, wide_mask, index, wide, extras), strict=True):
        assert_close(b[:, sides[0] : sides[0] + 64], a)
        assert (b[wide_mask == 0] == 0).all()


def test_what_stands_on_observation_tokens_has_no_influence(name):
    mask = ragged_mask(6, 40, seed=4, holes=True)
    rewards, index = normal(mask, seed=5) * mask, np.arange(6) // 3
    columns, extras = made_up(mask)
    (spoiled,) = reshaped(lambda x: torch.where(mask.bool(), x, torch.nan), mask, columns)
    expected = call(name, rewards, mask, index, columns, extras)
    assert_close(call(name, rewards, mask, index, spoiled, extras), expected)
    if "response" not in CREDIT[name]:  # a response's score is the sum of its rewards wherever a manager put them
        noisy = torch.where(mask.bool(), rewards, torch.nan)
        assert_close(call(name, noisy, mask, index, columns, extras), expected)


@pytest.mark.parametrize("length", [0, 2, 9])
def test_how_long_an_observation_is_does_not_matter_nor_if_it_is_there_but_to_turns(name, length):
    order = [0, 1, *[2] * length, 3, 4, 5]  # the column between the turns of row 0, again or not at all
    if length == 0 and "turn" in CREDIT[name]:
        order.insert(2, 2)  # turns are what observations make them
    rows = torch.tensor([0, 2])
    (mask, rewards), index = (x[rows] for x in (MASK, REWARDS)), INDEX[rows.numpy()]
    mask, rewards = mask.clone(), rewards.clone()
    mask[1], rewards[1] = torch.tensor([1, 0, 0, 1, 1, 0]), torch.tensor([0.25, 0, 0, 0, -1, 0])
    columns = {k: v[rows] for k, v in COLUMNS.items()}
    extras = {k: v[rows.numpy()] for k, v in EXTRAS.items()}
    before = call(name, rewards, mask, index, columns, extras)
    wide = reshaped(lambda x: x[:, order], mask, rewards, mask, columns)
    for a, b in zip(before, call(name, wide[0], wide[1], index, wide[2], extras), strict=True):
        assert_close(a[:, order], b)


def test_returns_cross_an_observation_backwards_only_and_never_get_lost_there(name):
    later, earlier = (0, 4), (0, 1)  # the ends of the two turns of row 0
    off = whiten_off(name)
    before, _ = call(name, REWARDS, MASK, INDEX, COLUMNS, EXTRAS, **off)

    def changed_by_reward_at(cell):
        rewards = REWARDS.clone()
        rewards[cell] -= 2  # so much that its rank changes, too
        extras = {**EXTRAS, "accuracy": EXTRAS["accuracy"] + np.array([1.0, 0, 0, 0])}
        return call(name, rewards, MASK, INDEX, COLUMNS, extras, **off)[0][0] != before[0]

    of_first, of_second = changed_by_reward_at(earlier), changed_by_reward_at(later)
    own = MASK[0].bool()
    if "response" in CREDIT[name]:
        assert (of_first == own).all() and (of_second == own).all()
        if CREDIT[name] == "response":
            assert all(row[mask.bool()].unique().numel() == 1 for row, mask in zip(before, MASK, strict=True))
    else:
        assert of_first.nonzero().flatten().tolist() == [0, 1]
        assert (of_second == own).all()
        if name == "agentic_reinforce":
            assert before[0, 0] == before[0, 1] and before[0, 3] == before[0, 4]


def test_groups_of_one_are_judged_as_each_row_alone(name):
    mask = ragged_mask(5, 30, seed=6, holes=True)
    rewards, index, off = normal(mask, seed=7) * mask, np.arange(5), whiten_off(name)
    columns, extras = made_up(mask)
    together = call(name, rewards, mask, index, columns, extras, **off)
    for i in range(5):
        row = slice(i, i + 1)
        parts = [{k: v[row] for k, v in part.items()} for part in (columns, extras)]
        for a, b in zip(together, call(name, rewards[row], mask[row], index[row], *parts, **off), strict=True):
            assert_close(b, a[row])


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.7])
def test_equal_rewards_give_zero_to_estimators_that_compare(name, reward):
    lengths = [3] * 21 if CREDIT[name] != "response" else [2, 5, 3, 5, 1, 4, 5] * 3
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
    rewards = torch.zeros(21, 5)
    rewards[torch.arange(21), mask.sum(-1) - 1] = reward
    columns = {
        "values": torch.full((21, 5), reward),  # a critic that is right
        "reward_baselines": torch.full((21,), reward),
        "old_log_probs": torch.full((21, 5), -1.0),
        "sum_pi_squared": torch.full((21, 5), 0.5),
    }
    extras = {"accuracy": np.full(21, reward), "format": np.full(21, reward)}
    undiscounted = {"gamma": 1.0, "lam": 1.0, "step_gamma": 1.0}
    got, _ = call(name, rewards, mask, np.repeat([0, 1, 2], 7), columns, extras, **undiscounted)
    if name in BASELINE_FREE:
        assert_close(got, reward * mask.float())
    elif name.endswith("optimal_token_baseline"):
        assert_close(got, torch.zeros_like(got), rtol=0, atol=1e-6)
    else:
        assert (got == 0).all()  # not even rounding errors


def test_rows_and_batches_without_tokens_are_quietly_zero(name):
    mask = torch.zeros(4, 6, dtype=torch.int64)
    columns, extras = made_up(mask)
    for result in call(name, torch.zeros(4, 6).double(), mask, np.zeros(4), columns, extras):
        assert (result == 0).all() and result.shape == (4, 6)
    mask[1, 2] = 1  # one token alone in the batch: nothing to whiten against
    for result in call(name, torch.zeros(4, 6).double(), mask, np.zeros(4), columns, extras):
        assert result.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_an_error_that_names_column_and_row(name, bad):
    mask = torch.ones(6, 5, dtype=torch.int64)
    rewards, index = normal(mask, seed=8), np.repeat([0, 1], 3)
    columns, extras = made_up(mask)
    spoiled = rewards.clone()
    spoiled[4, 0] = bad
    with pytest.raises(NonFiniteError, match=r"token_level_rewards holds .*in 1 of.*\[4\].*reward function"):
        call(name, spoiled, mask, index, columns, extras)
    expected = call(name, rewards, mask, index, columns, extras)
    for column, values in columns.items():
        values = values.clone()
        values[4] = bad
        try:
            got = call(name, rewards, mask, index, columns | {column: values}, extras)
        except NonFiniteError as error:
            assert column in str(error) and "[4]" in str(error)
        else:
            assert_close(got, expected)  # it does not read that column


def test_inputs_are_left_as_they_were(name):
    mask = ragged_mask(6, 70, seed=8)
    rewards = normal(mask, seed=9) * mask
    columns, extras = made_up(mask)
    before = [x.clone() for x in (rewards, mask, *columns.values())]
    call(name, rewards, mask, np.arange(6) // 2, columns, extras)
    assert all(torch.equal(a, b) for a, b in zip((rewards, mask, *columns.values()), before, strict=True))
