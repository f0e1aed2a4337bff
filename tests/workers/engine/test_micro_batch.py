import pytest
import torch

from tests.support.tiny_models import make_batch
from verl.protocol import DataProto
from verl.utils.micro_batching import WHOLE, MicroBatching
from verl.utils.ragged import Ragged
from verl.utils.seqlen_balancing import plan_micro_batches
from verl.workers.engine.micro_batch import cut_batch, row_lengths


def cut(data, split=WHOLE, reads=()):
    return cut_batch(data, plan_micro_batches(row_lengths(data), split), reads)


SPLITS = [MicroBatching(), MicroBatching(size=1), MicroBatching(size=3), MicroBatching(max_tokens=60)]


@pytest.mark.parametrize("split", SPLITS)
def test_every_response_token_is_predicted_once_from_the_token_before_it(split):
    data = make_batch(7, seed=3)
    parts = cut(data, split)
    tokens = parts.restore([micro.targets for micro in parts.micro_batches])
    assert torch.equal(tokens.values, data.ragged("responses").values)
    for micro in parts.micro_batches:
        assert torch.equal(micro.input_ids.flatten()[micro.cells + 1], micro.targets)
        assert torch.equal(micro.tight(micro.targets).flatten()[micro.slots], micro.targets)


@pytest.mark.parametrize("split", SPLITS)
def test_columns_stand_beside_their_rows(split):
    data = make_batch(7, seed=3)
    parts = cut(data, split, reads=("advantages", "response_mask", "responses"))
    column = parts.restore([micro.columns["advantages"].flatten()[micro.slots] for micro in parts.micro_batches])
    assert torch.equal(column.values, data.ragged("advantages").values)
    for micro in parts.micro_batches:
        assert micro.columns["response_mask"].shape == micro.shape
        assert torch.equal(micro.columns["responses"], micro.tight(micro.targets))
        assert micro.columns["response_mask"].sum() == len(micro.targets)


def test_a_padded_batch_gives_the_same_micro_batches():
    packed = make_batch(6, seed=1)
    padded = DataProto.from_dict({name: packed.column(name) for name in packed.keys()})
    split, reads = MicroBatching(size=2), ("advantages", "response_mask")
    for one, other in zip(
        cut(packed, split, reads=reads).micro_batches,
        cut(padded, split, reads=reads).micro_batches,
        strict=True,
    ):
        assert torch.equal(one.input_ids * 1, other.input_ids)
        assert torch.equal(one.cells, other.cells)
        assert torch.equal(one.columns["advantages"], other.columns["advantages"])


def test_rows_without_a_response_are_read_nowhere():
    data = make_batch(4, seed=2)
    lengths = data.ragged("responses").layout.lengths
    rows = [row[: 0 if i == 2 else None] for i, row in enumerate(data.ragged("responses").rows())]
    whole = data.ragged("input_ids").rows()
    whole[2] = whole[2][: -int(lengths[2])]
    prompts = data.ragged("prompts")
    ids = Ragged.from_rows(whole, 28)
    ids = Ragged(ids.values, type(ids.layout)(prompts.layout.starts, ids.layout.lengths, 28))
    short = DataProto.from_ragged(
        {"prompts": prompts, "responses": Ragged.from_rows(rows, 16), "input_ids": ids,
         "attention_mask": ids.like(torch.ones_like(ids.values))}
    )  # fmt: skip
    parts = cut(short, MicroBatching(size=1))
    assert sorted(len(micro.targets) for micro in parts.micro_batches)[0] == 0
    assert all(micro.shape[1] >= 1 for micro in parts.micro_batches)
    restored = parts.restore([micro.targets for micro in parts.micro_batches])
    assert torch.equal(restored.values, short.ragged("responses").values)


def test_a_response_without_a_prompt_is_refused():
    ids = Ragged.from_rows([torch.tensor([5, 6])], 2)
    mask = ids.like(torch.ones_like(ids.values))
    data = DataProto.from_ragged({"responses": ids, "input_ids": ids, "attention_mask": mask})
    with pytest.raises(ValueError, match="row 0 has no prompt token"):
        cut(data)


def test_positions_are_handed_over_only_if_they_do_not_count_from_zero():
    data = make_batch(3)
    assert cut(data).micro_batches[0].position_ids is None
    positions = data.ragged("position_ids")
    data.put("position_ids", Ragged(positions.values + 2, positions.layout, "position"))
    given = cut(data).micro_batches[0].position_ids
    assert torch.equal(given, torch.arange(given.shape[1]).expand_as(given) + 2)


def test_a_column_of_one_value_a_row_stays_one_value_a_row():
    data = make_batch(5, seed=4)
    data.put("difficulty", torch.arange(5.0))
    parts = cut(data, MicroBatching(size=2), reads=("difficulty",))
    assert torch.cat([micro.columns["difficulty"] for micro in parts.micro_batches]).tolist() == parts.order.tolist()


def test_laying_out_reads_nothing_back_from_the_device():
    data = make_batch(7, seed=3)
    groups = plan_micro_batches(row_lengths(data), MicroBatching(size=3))
    here = cut_batch(data, groups, reads=("advantages",)).micro_batches
    # the meta device has shapes and no values: whoever asks for one fails
    there = cut_batch(data, groups, reads=("advantages",), device="meta").micro_batches
    for micro, moved in zip(here, there, strict=True):
        assert moved.shape == micro.shape
        for name in ("input_ids", "cells", "targets", "slots"):
            assert getattr(moved, name).is_meta and getattr(moved, name).shape == getattr(micro, name).shape
        assert moved.columns["advantages"].is_meta
