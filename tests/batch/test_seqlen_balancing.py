import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.ranks import run_ranks
from verl.batch.balancing import (
    MicroBatching,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    inverse_permutation,
    log_seqlen_unbalance,
    plan_micro_batches,
    rearrange_micro_batches,
)

LENGTHS = st.lists(st.integers(0, 4096), min_size=1, max_size=200)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 16))
def test_partitions_hold_every_row_once_and_none_is_empty(lengths, parts):
    if len(lengths) < parts:
        with pytest.raises(ValueError, match="cannot fill"):
            get_seqlen_balanced_partitions(lengths, parts, False)
        return
    result = get_seqlen_balanced_partitions(lengths, parts, equal_size=False)
    assert sorted(row for part in result for row in part) == list(range(len(lengths)))
    assert len(result) == parts and all(result) and all(part == sorted(part) for part in result)
    loads = [sum(lengths[row] for row in part) for part in result]
    # greedy from the longest is within 4/3 of the best there can be (Graham 1969)
    assert max(loads) <= 4 / 3 * max(sum(lengths) / parts, max(lengths)) + max(lengths) / 3


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.integers(1, 12), st.randoms(use_true_random=False))
def test_equal_partitions_hold_every_row_once(parts, rounds, random):
    lengths = [random.randint(0, 4096) for _ in range(parts * rounds)]
    result = get_seqlen_balanced_partitions(lengths, parts, equal_size=True)
    assert sorted(row for part in result for row in part) == list(range(len(lengths)))
    assert {len(part) for part in result} == {rounds}


@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize("rows, parts", [(1024, 64), (8192, 512)])
def test_long_tailed_lengths_balance_to_half_a_percent(rows, parts, equal_size):
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randn(rows, generator=draw).add(5.5).exp().clamp(1, 4096).long().tolist()
    result = get_seqlen_balanced_partitions(lengths, parts, equal_size)
    loads = [sum(lengths[row] for row in part) for part in result]
    assert max(loads) <= 1.005 * max(sum(lengths) / parts, max(lengths))


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="7 rows do not divide into 2"):
        get_seqlen_balanced_partitions([1] * 7, 2, equal_size=True)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 20), st.integers(1, 9))
@example([0, 0, 0, 0], 1, 4)
def test_micro_batches_hold_every_row_once_and_keep_their_limits(lengths, size, at_least):
    for split in (MicroBatching(size=size), MicroBatching(max_tokens=max(lengths) + size), MicroBatching()):
        groups = plan_micro_batches(lengths, split, at_least)
        assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
        assert all(groups) and len(groups) >= min(at_least, len(lengths))
        for group in groups:
            assert split.size is None or len(group) <= split.size
            longest = max(lengths[row] for row in group)
            assert split.max_tokens is None or len(group) * longest <= split.max_tokens


def test_the_longest_rows_come_first_and_like_lengths_together():
    assert plan_micro_batches([1, 9, 2, 8], MicroBatching(size=2)) == [[1, 3], [2, 0]]


def test_a_row_over_the_budget_is_refused():
    with pytest.raises(ValueError, match="row of 9 tokens does not fit a micro-batch of max_tokens=8"):
        plan_micro_batches([1, 9], MicroBatching(max_tokens=8))


def test_reordering_back_restores_the_order():
    order = [3, 0, 2, 1]
    assert [order[place] for place in get_reverse_idx(order)] == [0, 1, 2, 3]
    assert inverse_permutation(torch.tensor(order)).tolist() == get_reverse_idx(order)


def test_unbalance_is_measured_before_and_after():
    assert log_seqlen_unbalance([1, 2, 3, 10], [[3], [0, 1, 2]], "global_seqlen") == {
        "global_seqlen/min": 3,
        "global_seqlen/max": 13,
        "global_seqlen/minmax_diff": 10,
        "global_seqlen/balanced_min": 6,
        "global_seqlen/balanced_max": 10,
        "global_seqlen/mean": 8.0,
    }


def padded(lengths):
    from tensordict import TensorDict

    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    return TensorDict({"attention_mask": mask}, batch_size=len(lengths))


def test_rearranged_micro_batches_stay_under_the_budget():
    lengths = [5, 9, 3, 7, 2, 8]
    micro_batches, rows = rearrange_micro_batches(padded(lengths), max_token_len=12)
    assert sorted(row for part in rows for row in part) == list(range(6))
    assert all(batch["attention_mask"].sum() <= 12 for batch in micro_batches)
    assert len(rearrange_micro_batches(padded(lengths), 12, num_batches_divided_by=3)[0]) % 3 == 0
    assert len(rearrange_micro_batches(padded(lengths), 100, min_num_micro_batch=2)[0]) == 2
    with pytest.raises(ValueError, match="less than the longest row, 9"):
        rearrange_micro_batches(padded(lengths), max_token_len=8)


def _number_of_micro_batches():
    import torch.distributed as dist

    lengths = [9, 9, 9] if dist.get_rank() else [1, 2, 3]
    return len(rearrange_micro_batches(padded(lengths), max_token_len=9)[0])


def test_ranks_agree_on_the_number_of_micro_batches():
    assert run_ranks(2, _number_of_micro_batches) == [3, 3]
