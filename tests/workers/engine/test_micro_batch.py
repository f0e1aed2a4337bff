from types import SimpleNamespace

import pytest
import torch

from tests.support.losses import Section, ppo_loss, value_loss
from tests.support.tiny_models import make_batch, make_siblings
from verl.algorithms.losses import TokenOutputs
from verl.batch import WHOLE, MicroBatching
from verl.batch.balancing import plan_micro_batches
from verl.batch.ragged import Ragged
from verl.protocol import DataProto
from verl.workers.engine.micro_batch import add_dummy_images, find_shared_prompts, split_batch


def cut(data, split=WHOLE, columns=(), packed=False, sharing=False):
    prompts = find_shared_prompts(data) if sharing else None
    groups = plan_micro_batches(data.ragged("input_ids").layout.lengths.tolist(), split, packed=packed, prompts=prompts)
    return split_batch(data, groups, columns, packed=packed, prompts=prompts)


LAYOUTS = {"padded": {}, "packed": {"packed": True}, "shared": {"packed": True, "sharing": True}}


SPLITS = [MicroBatching(), MicroBatching(size=1), MicroBatching(size=3), MicroBatching(max_tokens=60)]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("split", SPLITS)
def test_every_response_token_is_predicted_once_from_the_token_before_it(split, layout):
    data = make_batch(7, seed=3)
    parts = cut(data, split, **LAYOUTS[layout])
    tokens = parts.restore([micro.targets for micro in parts.micro_batches])
    assert torch.equal(tokens.values, data.ragged("responses").values)
    for micro in parts.micro_batches:
        assert torch.equal(micro.input_ids.flatten()[micro.valid_positions + 1], micro.targets)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", SPLITS)
def test_columns_stay_with_their_rows(split, layout):
    data = make_siblings(seed=3)
    parts = cut(data, split, columns=("advantages", "response_mask", "responses"), **LAYOUTS[layout])
    column = parts.restore([micro.columns["advantages"].values for micro in parts.micro_batches])
    assert torch.equal(column.values, data.ragged("advantages").values)
    for micro in parts.micro_batches:
        assert all(column.layout is micro.response for column in micro.columns.values())
        assert torch.equal(micro.columns["responses"].values, micro.targets)
        assert micro.columns["response_mask"].values.sum() == len(micro.targets)


def test_a_padded_batch_gives_the_same_micro_batches():
    packed = make_batch(6, seed=1)
    padded = DataProto.from_dict({name: packed.column(name) for name in packed.keys()})
    split, reads = MicroBatching(size=2), ("advantages", "response_mask")
    for one, other in zip(
        cut(packed, split, columns=reads).micro_batches,
        cut(padded, split, columns=reads).micro_batches,
        strict=True,
    ):
        assert torch.equal(one.input_ids * 1, other.input_ids)
        assert torch.equal(one.valid_positions, other.valid_positions)
        assert torch.equal(one.columns["advantages"].values, other.columns["advantages"].values)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_without_a_response_are_read_nowhere(layout):
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
    assert find_shared_prompts(short).numbers == [0, 1, 2, 3]
    parts = cut(short, MicroBatching(size=1), **LAYOUTS[layout])
    assert sorted(len(micro.targets) for micro in parts.micro_batches)[0] == 0
    assert all(micro.response.width >= 1 for micro in parts.micro_batches)
    restored = parts.restore([micro.targets for micro in parts.micro_batches])
    assert torch.equal(restored.values, short.ragged("responses").values)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_packed_rows_see_what_they_see_alone(layout, split):
    data = make_siblings(seed=5)
    rows, parts = data.ragged("input_ids").rows(), cut(data, split, **LAYOUTS[layout])
    order = iter(parts.order.tolist())
    for micro in parts.micro_batches:
        packing, ids, positions = micro.packing, micro.input_ids, micro.position_ids
        assert ids.shape == positions.shape == (1, packing.tokens)
        assert packing.cu_q.diff().tolist() == list(packing.q_lengths) and packing.cu_q.dtype == torch.int32
        assert packing.cu_k.diff().tolist() == list(packing.k_lengths)
        keys = torch.arange(packing.tokens) if packing.kv_index is None else packing.kv_index
        queries = torch.arange(packing.tokens).split(list(packing.q_lengths))
        for own, seen in zip(queries, keys.split(list(packing.k_lengths)), strict=True):
            assert torch.equal(ids[0, seen], rows[next(order)])
            assert torch.equal(positions[0, seen], torch.arange(len(seen)))
            # causal from the end: what a token sees ends with itself
            assert torch.equal(seen[len(seen) - len(own) :], own)


@pytest.mark.parametrize("split", SPLITS)
def test_a_shared_prompt_runs_once_in_a_micro_batch_and_predicts_every_first_token(split):
    data = make_siblings(seed=5)
    parts, prompts = cut(data, split, **LAYOUTS["shared"]), find_shared_prompts(data)
    groups = parts.order.split([len(micro.response) for micro in parts.micro_batches])
    lengths, ids = data.ragged("input_ids").layout.lengths.tolist(), data.ragged("input_ids").rows()
    for micro, group in zip(parts.micro_batches, groups, strict=True):
        assert micro.packing.tokens == prompts.tokens_of(group.tolist(), lengths)
        before = [torch.arange(len(ids[row]))[prompts.lengths[row] - 1 : -1] for row in group.tolist()]
        assert torch.equal(micro.position_ids[0, micro.valid_positions], torch.cat(before))
        assert torch.equal(
            micro.input_ids[0, micro.valid_positions],
            torch.cat([ids[row][positions] for row, positions in zip(group.tolist(), before, strict=True)]),
        )
    tokens = parts.restore([micro.targets for micro in parts.micro_batches])
    assert torch.equal(tokens.values, data.ragged("responses").values)
    if split == WHOLE:
        assert micro.packing.tokens == sum(lengths) - sum(n * (k - 1) for n, k in ((5, 3), (9, 4)))


def test_equal_prompts_are_those_of_equal_tokens_and_positions():
    data = make_siblings(seed=1)
    assert find_shared_prompts(data).numbers == [0, 0, 0, 1, 1, 1, 1, 2]
    assert find_shared_prompts(data).lengths == [5, 5, 5, 9, 9, 9, 9, 1]
    positions = data.ragged("position_ids")
    later = torch.repeat_interleave(torch.tensor([0, 1, 0, 0, 0, 0, 0, 0]), positions.layout.lengths)
    data.put("position_ids", Ragged(positions.values + later, positions.layout, "position"))
    assert find_shared_prompts(data).numbers == [0, 1, 0, 2, 2, 2, 2, 3]


def test_a_dummy_row_of_packed_rows_stands_behind_them_and_is_seen_by_none():
    vision = SimpleNamespace(spatial_merge_size=2, temporal_patch_size=2, patch_size=14, in_channels=3)
    config = SimpleNamespace(vision_config=vision, image_token_id=7)
    for layout in ("packed", "shared"):
        [micro] = cut(make_siblings(), **LAYOUTS[layout]).micro_batches
        more = add_dummy_images(micro, config, ["image"])
        assert more.vision_inputs["pixel_values"].shape == (4, 3 * 2 * 14 * 14)
        assert more.input_ids[0, -1] == 7 and more.position_ids[0, -1] == 0
        assert more.packing.tokens == micro.packing.tokens + 1 == more.input_ids.shape[1]
        assert more.packing.k_lengths == (*micro.packing.k_lengths, 1)


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
    parts = cut(data, MicroBatching(size=2), columns=("difficulty",))
    assert torch.cat([micro.columns["difficulty"] for micro in parts.micro_batches]).tolist() == parts.order.tolist()


def test_laying_out_reads_nothing_back_from_the_device():
    data = make_batch(7, seed=3)
    groups = plan_micro_batches(data.ragged("input_ids").layout.lengths.tolist(), MicroBatching(size=3))
    here = split_batch(data, groups, columns=("advantages",)).micro_batches
    # the meta device has shapes and no values: whoever asks for one fails
    there = split_batch(data, groups, columns=("advantages",), device="meta").micro_batches
    for micro, moved in zip(here, there, strict=True):
        for name in ("input_ids", "valid_positions", "targets"):
            assert getattr(moved, name).is_meta and getattr(moved, name).shape == getattr(micro, name).shape
        assert moved.columns["advantages"].values.is_meta and moved.response.starts.is_meta
        assert moved.columns["advantages"].shape == micro.columns["advantages"].shape


@pytest.mark.parametrize("loss", [ppo_loss(), ppo_loss(policy_loss=Section(loss_mode="gspo")), value_loss()])
def test_a_loss_reads_nothing_back_from_the_device(loss):
    data = make_batch(7, seed=3)
    (micro,) = split_batch(data, [list(range(7))], loss.columns, device="meta").micro_batches
    leaf = torch.zeros(len(micro.targets), device="meta", requires_grad=True)
    assert loss.weight(micro.columns).is_meta
    loss(TokenOutputs(leaf, leaf, leaf), micro.columns)[0].backward()
    assert leaf.grad.shape == leaf.shape
