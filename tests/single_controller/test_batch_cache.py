"""Ranks keep the columns of a batch, and always read those of the driver."""

import copy
import pickle

import numpy as np
import pytest
import torch

from tests.single_controller.roles import Reader
from verl.batch.partition import CallPlan, MiniBatches, PartitionPlan, RowCost
from verl.batch.ragged import Ragged, RowValues
from verl.batch.windows import join_windows
from verl.protocol import DataProto
from verl.single_controller.errors import WorkerError, WorkerGroupStopped
from verl.trainer.ppo.step_bundle import _drop_lost

ROWS = 7
CALLS = {
    "show": CallPlan(True, follows="show_in_steps"),
    "score": CallPlan(True),  # another division
    "score_later": CallPlan(True),
    "show_in_steps": CallPlan(True, MiniBatches(2)),  # one row in the last step: a filler for the other ranks
    "write_in_place": CallPlan(True),
}


def rollouts(seed=0):
    torch.manual_seed(seed)
    sizes = torch.randint(1, 60, (2, ROWS)).tolist()
    prompts, responses = (Ragged.from_rows([torch.randint(0, 99, (n,)) for n in row], 60) for row in sizes)
    columns = {"prompts": prompts, "responses": responses, **join_windows(prompts, responses)}
    columns |= {"response_mask": responses.constant(1)}
    columns |= {"advantages": responses.like(torch.randn(responses.layout.total))}
    columns |= {"returns": RowValues(torch.randn(ROWS), responses.layout)}
    columns |= {"token_level_scores": RowValues.on_last_tokens(torch.randn(ROWS), responses.layout)}
    data = DataProto.from_ragged(columns, {"weight": torch.arange(ROWS)})
    data.partition_plan = PartitionPlan(CALLS, RowCost(10))
    return data


def check(shown, data):
    """Every row, as ranks read it, is the driver's."""
    rows = {name: [row.tolist() for row in data.ragged(name).rows()] for name in data._ragged}
    assert list(shown.non_tensor_batch["shown"]) == [{n: rows[n][i] for n in sorted(rows)} for i in range(ROWS)]


def sent(group, call, *args):
    """Result of a call, and the bytes that were sent for it."""
    before = group.traffic.sent.total()
    return call(*args), group.traffic.sent.total() - before


@pytest.mark.parametrize("pairs", [False, True])
def test_ranks_read_the_driver_s_rows_whatever_happens_to_the_batch_between_calls(start, pairs):
    group = start(Reader, 4 if pairs else 3, pairs=pairs)
    data = rollouts()
    shown, first = sent(group, group.show, data)
    check(shown, data)
    data = data.union(group.score(data))  # rows are divided in another way, and a column comes back
    steps = group.show_in_steps(data)
    assert len(steps) >= ROWS
    check(group.show(data), data)
    shown, again = sent(group, group.show, data)
    check(shown, data)
    assert again < first * 0.9  # the rest are row numbers, objects and metadata
    data.put("advantages", data.ragged("advantages").like(-data.ragged("advantages").values))
    check(group.show(data), data)
    data.ragged("advantages").values.mul_(3)
    check(group.show(data), data)
    data.batch["values"] += 1  # from here on all is padded
    check(group.show(data.packed()), data.packed())
    check(group.show(data), data.packed())
    later = data.packed().union(group.score_later(data).get().rename("values", "later"))
    other = rollouts(seed=1)  # a second batch while the first is kept
    check(group.show(other), other)
    group.release_batches()
    check(group.show(other), other)
    check(group.show(later), later)


def test_what_ranks_have_made_is_not_sent_back_to_them(start_local):
    group = start_local(Reader, 3)
    data = rollouts().repeat(40)
    data.partition_plan = PartitionPlan({"show": CallPlan(True), "score": CallPlan(True)}, RowCost(10))
    group.show(data)
    _, without = sent(group, group.show, data)
    values = group.score(data)
    _, kept = sent(group, group.show, data.union(values))
    data.put("values", data.ragged("values").like(data.ragged("values").values.clone()))
    _, changed = sent(group, group.show, data)
    assert kept < without + 600 and changed > kept + 4 * data.ragged("values").layout.total


def test_a_column_that_stays_with_its_ranks_is_fetched_when_it_is_read(start):
    group, data = start(Reader, 3, pairs=False), rollouts().repeat(40)
    data.partition_plan = PartitionPlan({"show": CallPlan(True), "score": CallPlan(True)}, RowCost(10))
    wanted = data.ragged("responses").values * 0.5
    received, fetch = group.traffic.received, ("Reader", "__fetch_column__")
    before, scored = received[fetch], group.score(data)
    data = data.union(scored)
    assert data.is_remote("values") and "with the workers" in repr(data)
    data.print_size()
    assert data.ragged("values").is_finite() and data.ragged("values").dtype == torch.float32
    shown = group.show(data).non_tensor_batch["shown"]  # where they are, rows are read
    assert [[2 * value for value in row["values"]] for row in shown] == [row["responses"] for row in shown]
    group.release_batches()  # and are kept while somebody may read them here
    half = data.select_idxs(np.arange(0, len(data), 2))
    half.reorder(np.arange(len(half))[::-1].copy())
    assert data.is_remote("values") and half.is_remote("values") and received[fetch] == before
    assert torch.equal(data.ragged("values").values, wanted) and not data.is_remote("values")
    fetched = received[fetch]
    assert wanted.nbytes <= fetched - before < wanted.nbytes + 20_000
    again = pickle.loads(pickle.dumps(half)), copy.deepcopy(half), DataProto.concat([half, half])[: len(half)]
    for rows in again:
        assert torch.equal(rows.ragged("values").values, half.ragged("responses").values * 0.5)
    assert received[fetch] == fetched and not group._hosts.ledger.remote


def test_columns_that_stay_outlive_what_goes_wrong_between_calls(start_local):
    group, data = start_local(Reader, 3), rollouts()
    wanted = data.ragged("responses").values * 0.5
    later, scored = group.score_later(data), group.score(data)
    with pytest.raises(TypeError, match="cannot be sent"):
        group.show(data, (number for number in range(3)))
    group.release_batches()
    check(group.show(rollouts(seed=1)), rollouts(seed=1))
    with pytest.raises(TypeError, match="'values' is with .* is in an argument that is being sent. Read it before"):
        group.show(data, [scored])
    for column in (scored.ragged("values"), later.get().ragged("values")):
        assert torch.equal(column.values, wanted)


def test_columns_of_ranks_that_have_ended_are_an_error_that_names_them(start_local):
    group, data = start_local(Reader, 3, fresh=True), rollouts()
    copied, lost = (group.score(data) for _ in range(2))
    copied.fetched()
    group.stop()
    assert torch.equal(copied.ragged("values").values, data.ragged("responses").values * 0.5)
    with pytest.raises(WorkerGroupStopped, match="column 'values' is with the processes of 'Reader' alone"):
        _ = lost.batch
    assert _drop_lost(lost) == ["values"] and "values" not in lost  # what the bundle of a failed step leaves out


def test_a_call_that_could_not_be_sent_leaves_no_rank_behind(start_local):
    group, data = start_local(Reader, 3), rollouts()
    with pytest.raises(TypeError, match="cannot be sent"):
        group.show(data, (number for number in range(3)))
    check(group.show(data), data)


def test_processes_started_again_get_everything(start_local):
    group, data = start_local(Reader, 3, fresh=True), rollouts()
    group.show(data)
    group.restart()
    check(group.show(data), data)


def test_a_kept_column_that_a_method_writes_to_is_an_error_and_never_read(start_local):
    group, data = start_local(Reader, 3, fresh=True), rollouts()
    group.write_in_place(data)
    with pytest.raises(WorkerError, match="'advantages' was written to in place"):
        group.show(data)


def test_images_are_sent_once_for_all_calls_on_a_batch(start):
    group, data = start(Reader, 3, pairs=False), rollouts()
    images = [{"pixels": torch.rand(900, 3), "grid": torch.tensor([[1, 30, 30]])} for _ in range(3)]

    def of(rows):
        return np.fromiter((images[i] for i in rows), object, ROWS)

    def seen(shown):
        return [{n: torch.tensor(v) for n, v in row["images"].items()} for row in shown.non_tensor_batch["shown"]]

    def matches(shown):
        pairs = zip(seen(shown), data.non_tensor_batch["images"], strict=True)
        return all(torch.equal(a[name], b[name]) for a, b in pairs for name in ("pixels", "grid"))

    data.non_tensor_batch["images"] = of([0, 0, 0, 1, 1, 2, 2])
    size = images[0]["pixels"].nbytes
    assert matches(group.show(data))
    group.show_in_steps(data)  # another division: some ranks get more
    shown, again = sent(group, group.show, data)
    assert matches(shown) and again < size
    images[0]["pixels"].mul_(2)
    assert matches(group.show(data))
    data.non_tensor_batch["images"] = of([2, 1, 0, 2, 1, 0, 0])
    assert matches(group.show(data))
    data.non_tensor_batch["images"][0] = {"pixels": torch.rand(2, 3), "grid": torch.tensor([[1]])}
    assert matches(group.show(data))
    group.release_batches()
    shown, released = sent(group, group.show, data)
    assert matches(shown) and released > 2 * size


def test_an_image_that_a_method_writes_to_is_an_error(start_local):
    group, data = start_local(Reader, 3, fresh=True), rollouts()
    data.non_tensor_batch["images"] = np.fromiter(({"pixels": torch.rand(9)} for _ in range(ROWS)), object, ROWS)
    group.write_in_place(data)
    with pytest.raises(WorkerError, match="'images' was written to in place"):
        group.show(data)


def test_one_number_a_row_is_sent_as_such_and_once(start_local):
    group, data = start_local(Reader, 3), rollouts().repeat(40)
    data.partition_plan = PartitionPlan({"show": CallPlan(True)}, RowCost(10))
    group.show(data)
    total, rows = data.ragged("responses").layout.total, len(data)
    _, without = sent(group, group.show, data)
    data.put("advantages", RowValues(torch.randn(rows), data.ragged("responses").layout))
    shown, changed = sent(group, group.show, data)
    assert changed - without < total  # four bytes a token if it were laid out
    _, again = sent(group, group.show, data)
    assert again < without + 600
    for row, number in zip(shown.non_tensor_batch["shown"], data.ragged("advantages").numbers.tolist(), strict=True):
        assert set(row["advantages"]) == {number}


def test_the_same_numbers_on_other_tokens_are_another_column(start_local):
    """A reward moves to an earlier token where its own is rejected; its number stays."""
    group, data = start_local(Reader, 3), rollouts()
    given = data.ragged("token_level_scores")
    moved = RowValues(given.numbers, given.layout, torch.zeros(ROWS, dtype=torch.int64))
    data.put("token_level_rewards", moved).put("advantages", RowValues(given.numbers, given.layout))
    for scores in (given, moved, given.copied()):
        data.put("token_level_scores", scores)
        for _ in range(2):
            check(group.show(data), data)
