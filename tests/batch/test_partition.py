"""Who works on which row: every optimizer step is exactly its rows, whatever the number of ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.batch.balancing import balanced_parts
from verl.batch.partition import CallPlan, MiniBatches, PartitionPlan, RowCost, RowLengths

LENGTHS = st.lists(st.integers(1, 4096), min_size=1, max_size=60)
COST = RowCost(1000)


def plan_of(by_tokens=True, mini=None, cost=COST, together=False):
    return PartitionPlan({"work": CallPlan(by_tokens, mini)}, cost, together)


def rows_of(lengths, groups=None, prompts=None):
    return RowLengths(np.array(lengths), None if prompts is None else np.array(prompts), groups)


def long_tailed(rows, seed=0):
    return np.random.default_rng(seed).lognormal(6, 1.0, rows).astype(np.int64).clip(1, 16384)


def global_steps(partition):
    """Row numbers of each step, joined over the ranks; fillers left out."""
    found = []
    for number in range(len(partition.steps[0])):
        step = []
        for rows, has_filler, steps in zip(partition.rows, partition.has_filler, partition.steps, strict=True):
            own = len(rows) - has_filler
            step += [int(rows[place]) for place in steps[number] if place < own]
        found.append(sorted(step))
    return found


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 30), st.booleans(), st.booleans(), st.sampled_from([None, COST]))
def test_which_rows_make_a_step_does_not_depend_on_the_ranks(lengths, ranks, mini_rows, shuffle, by_tokens, cost):
    mini = MiniBatches(mini_rows, epochs=2, shuffle=shuffle, seed=7)
    partition = plan_of(by_tokens, mini, cost).partition("work", rows_of(lengths), ranks)
    expected = [sorted(step.tolist()) for step in mini.steps(len(lengths))]
    assert global_steps(partition) == expected
    for steps in partition.steps:  # every rank takes part in every step
        assert len(steps) == len(expected) and all(len(places) for places in steps)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.booleans(), st.booleans())
def test_the_rows_of_all_ranks_lead_back_to_the_batch(lengths, ranks, by_tokens, together):
    groups = np.arange(len(lengths)) // 3 if together else None
    rows = rows_of(lengths, groups, np.ones(len(lengths), dtype=int))
    partition = plan_of(by_tokens, together=together).partition("work", rows, ranks)
    assert np.concatenate(partition.rows)[partition.output_positions()].tolist() == list(range(len(lengths)))
    assert all(len(share) for share in partition.rows)


def test_shuffled_mini_batches_are_taken_from_the_whole_batch_again_each_epoch():
    steps = MiniBatches(8, epochs=2, shuffle=True, seed=1).steps(32)
    assert len(steps) == 8 and all(sorted(np.concatenate(steps[i : i + 4])) == list(range(32)) for i in (0, 4))
    assert [sorted(a) for a in steps[:4]] != [sorted(a) for a in steps[4:]]
    assert max(steps[0]) - min(steps[0]) > 8
    assert not np.array_equal(steps[0], MiniBatches(8, 2, True, seed=2).steps(32)[0])


def test_unequal_numbers_of_rows_balance_where_equal_ones_cannot():
    lengths = np.array([4096] + [64] * 63)
    unequal, equal = (plan_of(by_tokens).loads("work", rows_of(lengths), 4, COST)[1][0] for by_tokens in (True, False))
    assert unequal.max() == COST.of(lengths).max()  # the longest row alone
    assert equal.max() > unequal.max()
    counts = [len(rows) for rows in plan_of(True).partition("work", rows_of(lengths), 4).rows]
    assert min(counts) == 1 and max(counts) == 21


def test_forwards_of_a_fixed_size_get_equal_numbers_of_rows():
    partition = plan_of(by_tokens=False).partition("work", rows_of(long_tailed(22)), 4)
    assert sorted(len(rows) for rows in partition.rows) == [5, 5, 6, 6]


@pytest.mark.parametrize("by_tokens", [True, False])
def test_the_slowest_rank_is_near_the_mean(by_tokens):
    lengths = long_tailed(1024)
    costs = plan_of(by_tokens).loads("work", rows_of(lengths), 16, COST)[1][0]
    assert costs.max() / costs.mean() < 1.02
    unbalanced = plan_of(cost=None).loads("work", rows_of(lengths), 16, COST)[1][0]
    assert unbalanced.max() / unbalanced.mean() > 1.2


def test_siblings_stay_on_one_rank_where_that_is_fastest():
    groups = np.repeat(np.arange(32), 4)
    rows = rows_of(np.full(128, 600), groups, np.full(128, 500))
    partition = plan_of(together=True).partition("work", rows, 8)
    assert all(len(set(groups[share])) == 4 and len(share) == 16 for share in partition.rows)
    few = rows_of(np.full(16, 600), np.repeat(np.arange(2), 8), np.full(16, 100))  # two prompts, four ranks
    partition = plan_of(together=True).partition("work", few, 4)
    assert sorted(len(share) for share in partition.rows) == [4, 4, 4, 4]
    assert all(len(set(few.groups[share])) == 1 for share in partition.rows)


def test_few_epochs_need_no_row_twice_and_more_may():
    rows = rows_of(long_tailed(32))
    once = plan_of(mini=MiniBatches(8, epochs=3)).partition("work", rows, 4)
    assert once.output_positions() is not None  # the same mini-batches again
    again = plan_of(mini=MiniBatches(8, epochs=2, shuffle=True)).partition("work", rows, 4)
    assert again.output_positions() is None and len(again.steps[0]) == 8


def test_a_row_costs_its_tokens_and_their_square():
    assert RowCost(100).of(np.array([1, 100, 200])).tolist() == [101, 20000, 60000]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=64), st.integers(1, 12))
def test_equal_parts_of_rows_that_do_not_divide_differ_by_little(costs, parts):
    result = balanced_parts(np.array(costs), parts, equal_size=True)
    assert sorted(row for part in result for row in part) == list(range(len(costs)))
    most = -(-len(costs) // parts)
    assert len(result) == parts and max(map(len, result)) <= most
    assert all(result) or len(costs) < parts


def test_shuffling_does_not_touch_the_process_generator():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    MiniBatches(4, shuffle=True).steps(16)
    assert torch.equal(before, torch.get_rng_state())


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.booleans(), st.sampled_from([None, COST]))
def test_pairs_stay_on_one_rank(lengths, ranks, by_tokens, cost):
    lengths = [length for length in lengths for _ in range(2)]
    plan = plan_of(by_tokens, MiniBatches(len(lengths)), cost)._replace(together=2)
    for call in (plan, plan._replace(calls={"work": CallPlan(by_tokens)})):
        partition = call.partition("work", rows_of(lengths), ranks)
        assert np.concatenate(partition.rows)[partition.output_positions()].tolist() == list(range(len(lengths)))
        for rows, has_filler in zip(partition.rows, partition.has_filler, strict=True):
            own = rows[: len(rows) - has_filler].reshape(-1, 2)
            assert (own[:, 0] % 2 == 0).all() and (own[:, 1] == own[:, 0] + 1).all()


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.booleans(), st.booleans(), st.booleans())
def test_a_call_that_follows_an_update_gives_each_rank_the_same_rows(lengths, ranks, by_tokens, in_tokens, shuffle):
    mini = MiniBatches(7, 1, shuffle, seed=3)
    calls = {"update": CallPlan(by_tokens, mini), "score": CallPlan(in_tokens, follows="update")}
    plan = PartitionPlan(calls, COST)
    score, update = (plan.partition(method, rows_of(lengths), ranks) for method in ("score", "update"))
    assert score.output_positions() is not None and score.steps is None
    if by_tokens and not in_tokens:  # equal numbers of rows come first
        sizes = [len(rows) - filler for rows, filler in zip(score.rows, score.has_filler, strict=True)]
        assert max(sizes) - min(sizes) <= 1
        return
    of_update = [rows[: len(rows) - filler] for rows, filler in zip(update.rows, update.has_filler, strict=True)]
    of_score = [rows[: len(rows) - filler] for rows, filler in zip(score.rows, score.has_filler, strict=True)]
    assert [rows.tolist() for rows in of_score] == [rows.tolist() for rows in of_update]
