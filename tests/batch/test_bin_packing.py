import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.batch import MicroBatching
from verl.batch.balancing import Prompts, plan_micro_batches

LENGTHS = st.lists(st.integers(0, 4096), min_size=1, max_size=120)


@st.composite
def families(draw):
    """Lengths of rows, in some order, and which of them share a prompt."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 500)), min_size=1, max_size=12))
    prompts = [(number, prompt) for number, (size, prompt) in enumerate(sizes) for _ in range(size)]
    draw(st.randoms(use_true_random=False)).shuffle(prompts)
    lengths = [prompt + draw(st.integers(0, 300)) for _, prompt in prompts]
    return lengths, Prompts([number for number, _ in prompts], [prompt for _, prompt in prompts])


def tokens_of(group, lengths, prompts=None):
    return prompts.tokens_of(group, lengths) if prompts else sum(lengths[row] for row in group)


def check(groups, lengths, split, at_least, prompts=None):
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert all(groups) and len(groups) >= min(at_least, len(lengths))
    for group in groups:
        assert split.size is None or len(group) <= split.size
        assert split.max_tokens is None or tokens_of(group, lengths, prompts) <= split.max_tokens


def every_split(lengths, size):
    return MicroBatching(size=size), MicroBatching(max_tokens=max(*lengths, 1) + 50 * size), MicroBatching()


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 20), st.integers(1, 9), st.sampled_from([None, 1024]))
def test_packed_micro_batches_hold_every_row_once_and_keep_their_limits(lengths, size, at_least, best):
    for split in every_split(lengths + [0], size):
        groups = plan_micro_batches(lengths, split, at_least, best, packed=True)
        check(groups, lengths, split, at_least)
        if best:
            assert all(tokens_of(group, lengths) <= best for group in groups if len(group) > 1)


@settings(max_examples=100, deadline=None)
@given(families(), st.integers(1, 20), st.integers(1, 9))
def test_micro_batches_of_shared_prompts_keep_their_limits_in_tokens_that_run(rows, size, at_least):
    lengths, prompts = rows
    for split in every_split(lengths + [0], size):
        check(plan_micro_batches(lengths, split, at_least, None, True, prompts), lengths, split, at_least, prompts)


@settings(max_examples=100, deadline=None)
@given(families(), st.integers(1, 20), st.integers(0, 30), st.booleans())
def test_ranks_that_ask_for_more_micro_batches_get_as_many_and_no_more(rows, size, more, is_sharing):
    lengths, prompts = rows
    for split in every_split(lengths + [0], size):
        plan = dict(split=split, packed=True, prompts=prompts if is_sharing else None)
        few = len(plan_micro_batches(lengths, **plan))
        assert len(plan_micro_batches(lengths, at_least=few + more, **plan)) == min(few + more, len(lengths))


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(0, 4096))
def test_a_budget_of_tokens_needs_about_as_few_micro_batches_as_there_can_be(lengths, room):
    budget = max(*lengths, 1) + room if len(lengths) > 1 else lengths[0] + room + 1
    groups = plan_micro_batches(lengths, MicroBatching(max_tokens=budget), packed=True)
    # best-fit decreasing: 11/9 of the optimum and 4/5 of a bin (Johnson 1974)
    assert len(groups) <= 11 / 9 * max(1, optimum_bound(lengths, budget)) + 4
    loads = [tokens_of(group, lengths) for group in groups]
    assert loads == sorted(loads, reverse=True)


def optimum_bound(lengths, budget):
    """No packing has fewer bins: by the sum, and because rows over half a bin each need one."""
    return max(math.ceil(sum(lengths) / budget), sum(2 * length > budget for length in lengths))


def test_log_normal_lengths_fill_their_budget():
    import torch

    lengths = torch.randn(512, generator=torch.Generator().manual_seed(0)).add(5.5).exp().clamp(1, 4096).long().tolist()
    groups = plan_micro_batches(lengths, MicroBatching(max_tokens=8192), packed=True)
    assert len(groups) == math.ceil(sum(lengths) / 8192)
    loads = [tokens_of(group, lengths) for group in groups]
    assert max(loads) <= 1.01 * min(loads)


def test_rows_of_one_prompt_stay_together_where_the_budget_lets_them():
    lengths, prompts = [12, 30, 14, 30, 16, 30], Prompts([0, 1, 0, 1, 0, 1], [10, 20, 10, 20, 10, 20])
    groups = plan_micro_batches(lengths, MicroBatching(max_tokens=50), packed=True, prompts=prompts)
    assert [sorted(group) for group in groups] == [[1, 3, 5], [0, 2, 4]]
    assert prompts.tokens_of(groups[0], lengths) == 50
    # 20 + 3 * 10 tokens do not fit into 49: the prompt runs in two pieces
    split = plan_micro_batches(lengths, MicroBatching(max_tokens=49), packed=True, prompts=prompts)
    assert max(prompts.tokens_of(group, lengths) for group in split) <= 49
    assert sum(prompts.tokens_of(group, lengths) for group in split) == 50 + 22 + 20


def test_pieces_of_a_group_are_of_about_equal_length():
    lengths, prompts = [10, 1000, 500, 20, 900, 30, 600, 40], Prompts([0] * 8, [10] * 8)
    groups = plan_micro_batches(lengths, MicroBatching(size=4), packed=True, prompts=prompts)
    loads = [prompts.tokens_of(group, lengths) for group in groups]
    assert len(loads) == 2 and max(loads) <= 1.1 * min(loads)


def test_a_size_that_suits_a_device_best_does_not_tear_rows_of_one_prompt_apart():
    lengths, prompts = [600] * 8, Prompts([0] * 4 + [1] * 4, [500] * 8)
    assert len(plan_micro_batches(lengths, MicroBatching(), 1, 512, True, prompts)) == 2
    assert len(plan_micro_batches(lengths, MicroBatching(), 1, 512, True)) == 8


def test_a_row_over_the_budget_is_refused():
    with pytest.raises(ValueError, match="row of 9 tokens does not fit a micro-batch of max_tokens=8: raise the"):
        plan_micro_batches([1, 9], MicroBatching(max_tokens=8), packed=True)
    with pytest.raises(ValueError, match="row of 9 tokens"):
        plan_micro_batches([9, 9], MicroBatching(max_tokens=8), packed=True, prompts=Prompts([0, 0], [8, 8]))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 9), st.booleans(), st.sampled_from([None, 1024]))
def test_rows_that_stay_together_are_in_one_micro_batch_and_keep_the_limits(lengths, size, at_least, packed, best):
    lengths = lengths + lengths[-1:] * (len(lengths) % 2)
    for split in every_split(lengths, size):
        split = split._replace(together=2, size=split.size and 2 * split.size)
        if split.max_tokens:
            split = split._replace(max_tokens=2 * split.max_tokens)
        groups = plan_micro_batches(lengths, split, at_least, best, packed)
        check(groups, lengths, split, min(at_least, len(lengths) // 2))
        assert all(group[::2] == [row - 1 for row in group[1::2]] and group[0] % 2 == 0 for group in groups)


def test_a_pair_over_the_budget_is_refused_and_a_shared_prompt_counts_once():
    split, prompts = MicroBatching(max_tokens=16, together=2), Prompts([0, 0, 1, 1], [6, 6, 6, 6])
    assert len(plan_micro_batches([10, 10, 9, 9], split, packed=True, prompts=prompts)) == 2
    for packed in (True, False):
        with pytest.raises(ValueError, match=r"20 tokens \(2 that stay together\) does not fit"):
            plan_micro_batches([10, 10, 9, 9], split, packed=packed)
