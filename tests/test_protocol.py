import copy
import pickle
import subprocess
import sys
import warnings
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import verl.batch.windows as known_columns
from verl.batch.layout import Layout
from verl.batch.ragged import Ragged
from verl.protocol import (
    DataProto,
    DataProtoConfig,
    DataProtoError,
    DataProtoFuture,
    DataProtoItem,
    MissingColumn,
    all_gather_data_proto,
    collate_fn,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    register_ragged_column,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)

P, R, PAD = 5, 6, 9
quick = settings(deadline=None, max_examples=40)
lengths = st.tuples(st.integers(1, P), st.integers(0, R))


def rollout(sizes, packed=True) -> DataProto:
    """What a rollout hands over, for rows of (prompt length, response length), and a dense column ``row``."""
    prompts = [list(range(10, 10 + p)) for p, _ in sizes]
    responses = [[100 * (i + 1) + j for j in range(r)] for i, (_, r) in enumerate(sizes)]
    prompt = Ragged.from_rows(prompts, P, "left", PAD)
    response = Ragged.from_rows(responses, R, "right", PAD)
    starts = prompt.layout.starts
    whole = Layout(starts, prompt.layout.lengths + response.layout.lengths, P + R)
    ids = [torch.tensor(p + r) for p, r in zip(prompts, responses, strict=True)]
    positions = [torch.arange(len(row)) for row in ids]
    empty = [torch.zeros(0, dtype=torch.int64)]
    columns = {
        "prompts": prompt,
        "responses": response,
        "input_ids": Ragged(torch.cat(ids + empty), whole, PAD),
        "attention_mask": Ragged(torch.ones(whole.total, dtype=torch.int64), whole),
        "position_ids": Ragged(torch.cat(positions + empty), whole, "position"),
        "response_mask": response.like(torch.ones(response.layout.total, dtype=torch.int64)),
        "old_log_probs": response.like(-torch.arange(response.layout.total).bfloat16() / 8),
    }
    arrays = {"uid": [f"u{i}" for i in range(len(sizes))], "extra_info": [{"index": i} for i in range(len(sizes))]}
    meta_info = {"temperature": 0.7, "pad_token_id": PAD}
    row = {"row": torch.arange(len(sizes))}
    if packed:
        return DataProto.from_ragged(columns, row, arrays, meta_info)
    return DataProto.from_dict({name: c.padded() for name, c in columns.items()} | row, arrays, meta_info)


def same(a: DataProto, b: DataProto) -> bool:
    assert set(a.keys()) == set(b.keys()) and set(a.non_tensor_batch) == set(b.non_tensor_batch)
    tensors = all(torch.equal(a.column(name), b.column(name)) for name in a.keys())
    arrays = all(a.non_tensor_batch[name].tolist() == b.non_tensor_batch[name].tolist() for name in a.non_tensor_batch)
    return len(a) == len(b) and tensors and arrays and a.meta_info == b.meta_info


def is_packed(data: DataProto) -> bool:
    return "ragged" in repr(data)


def plain(rows=6) -> DataProto:
    tensors = {"a": torch.arange(rows), "b": torch.arange(rows * 2.0).view(rows, 2)}
    return DataProto.from_dict(tensors, {"name": [f"n{i}" for i in range(rows)]}, {"t": 1})


# The two sides --------------------------------------------------------------------------------------------------------


@quick
@given(st.lists(lengths, max_size=6))
def test_packed_and_padded_batches_look_alike(sizes):
    packed, padded = rollout(sizes), rollout(sizes, packed=False)
    assert same(packed, padded) and is_packed(packed)
    for name in ("input_ids", "position_ids", "responses", "prompts", "old_log_probs"):
        assert torch.equal(packed.batch[name], padded.batch[name])
    assert not is_packed(packed), "touching the batch pads every column in"


@quick
@given(st.lists(lengths, min_size=1, max_size=6))
def test_packing_a_padded_batch_finds_the_tokens_the_rollout_packed(sizes):
    packed, repacked = rollout(sizes), rollout(sizes, packed=False).packed()
    for name in packed.keys():
        if name != "row":
            assert repacked.ragged(name).layout == packed.ragged(name).layout, name
            assert torch.equal(repacked.ragged(name).values, packed.ragged(name).values), name
    assert same(packed, repacked)
    assert repacked.ragged("responses").layout is repacked.ragged("old_log_probs").layout


def test_changes_to_the_batch_are_seen_by_the_packed_side():
    data = rollout([(2, 3), (1, 2)])
    data.batch["old_log_probs"][1, 0] = 5.0
    data.batch["mine"] = torch.ones(2)
    assert data.ragged("old_log_probs").row(1)[0] == 5.0
    assert "mine" in data.keys() and data[1:].column("mine").tolist() == [1.0]


def test_padding_in_a_batch_copies_what_a_column_shares():
    data = rollout([(2, 3), (1, 2)])
    part = data[:1]
    part.batch["responses"][:] = 0
    assert data.ragged("responses").row(0).tolist() == [100, 101, 102]


def test_a_padded_column_next_to_packed_ones_is_packed_like_its_neighbours_without_a_mask():
    data = rollout([(2, 3), (1, 2)]).select(["responses", "row"])
    data.put("advantages", torch.arange(12.0).view(2, R))
    assert data.ragged("advantages").values.tolist() == [0, 1, 2, 6, 7]


def test_multi_turn_masks_keep_their_holes():
    data = rollout([(2, 4), (1, 2)], packed=False)
    data.batch["response_mask"][0, 1:3] = 0
    assert data.ragged("response_mask").values.tolist() == [1, 0, 0, 1, 1, 1]
    assert torch.equal(data.packed().column("response_mask"), data.column("response_mask"))


@pytest.mark.parametrize("name", ["position_ids", "values", "responses"])
def test_known_names_with_other_shapes_stay_as_they_are(name):
    data = rollout([(2, 3), (1, 2)], packed=False)
    odd = torch.arange(2.0 * 3 * (P + R)).view(2, 3, P + R)  # positions of a vision model
    data.put(name, odd)
    assert torch.equal(pickle.loads(pickle.dumps(data)).column(name), odd)


def test_ids_with_features_are_packed_like_any_column():
    data = rollout([(2, 3)], packed=False)
    data.put("responses", torch.ones(1, R, 2))
    assert data.ragged("responses").values.shape == (3, 2)


def test_a_mask_of_prompts_alone_does_not_cut_responses():
    data = DataProto.from_dict({"attention_mask": torch.tensor([[0, 1, 1]]), "input_ids": torch.tensor([[9, 1, 2]])})
    data.put("prompts", data.column("input_ids")).put("responses", torch.tensor([[3, 4]]))
    assert data.packed().column("responses").tolist() == [[3, 4]]
    assert data.ragged("input_ids").values.tolist() == [1, 2]


def test_token_ids_are_padded_with_what_their_padding_held():
    data = rollout([(2, 3), (1, 2)], packed=False)
    data.meta_info["pad_token_id"] = 0
    assert data.ragged("input_ids").fill == data.ragged("responses").fill == data.ragged("prompts").fill == PAD
    full = rollout([(P, R)], packed=False)
    assert full.ragged("input_ids").fill == PAD, "without a padding cell meta_info says it"


def test_a_column_of_unknown_layout_names_the_remedy():
    data = rollout([(2, 3)])
    with pytest.raises(DataProtoError, match=r"column 'row', shape \(1,\): its window is None.*register_ragged_column"):
        data.ragged("row")


def test_a_registered_column_travels_packed(monkeypatch):
    monkeypatch.setattr(known_columns, "WINDOWS", dict(known_columns.WINDOWS))
    data = rollout([(1, 2), (1, 3)])
    data.put("my_weights", torch.arange(12.0).view(2, R))
    register_ragged_column("my_weights", "response")
    received = pickle.loads(pickle.dumps(data))
    assert received.ragged("my_weights").values.tolist() == [0, 1, 6, 7, 8]
    with pytest.raises(ValueError, match="window='tail' is none of"):
        register_ragged_column("x", "tail")


def test_a_missing_column_is_named_with_those_present():
    for call in (lambda d: d.column("c"), lambda d: d.ragged("c"), lambda d: d.select(["c"])):
        with pytest.raises(KeyError, match=r"no column 'c' among the tensor columns \['a', 'b'\]"):
            call(plain())


def test_put_refuses_other_row_counts():
    with pytest.raises(ValueError, match="column 'c' has 5 rows, the batch 6"):
        plain().put("c", torch.zeros(5))


def test_the_packed_path_never_imports_tensordict():
    code = """
import pickle, sys, torch
from verl.protocol import DataProto
from verl.batch.ragged import Ragged
responses = Ragged.from_rows([[1, 2], [3]], 4)
data = DataProto.from_ragged({"responses": responses}, {"x": torch.arange(2)}, {"u": ["a", "b"]})
data = DataProto.concat(pickle.loads(pickle.dumps(data)).repeat(2).chunk(2)).union(data[[0, 0, 1, 1]]).to("cpu")
data.ragged("responses").padded(), data.column("responses"), [mini for mini in data.make_iterator(2, 1)]
assert "tensordict" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Rows -----------------------------------------------------------------------------------------------------------------


@quick
@given(st.lists(lengths, min_size=1, max_size=4), st.integers(1, 3), st.booleans())
def test_concat_undoes_chunk_and_split(sizes, chunks, packed):
    data = rollout(sizes * chunks, packed)
    for parts in (data.chunk(chunks), data.split(2)):
        joined = DataProto.concat(parts)
        assert same(joined, data) and is_packed(joined) == packed
    assert [len(part) for part in data.chunk(chunks)] == [len(sizes)] * chunks


@quick
@given(st.lists(lengths, min_size=1, max_size=5), st.data())
def test_every_way_to_take_rows_agrees_with_the_padded_tensors(sizes, data):
    rows = data.draw(st.lists(st.integers(-len(sizes), len(sizes) - 1)))
    bounds = slice(*data.draw(st.tuples(*[st.none() | st.integers(-6, 6)] * 2)), data.draw(st.sampled_from([None, 2])))
    flags = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    for packed in (True, False):
        data = rollout(sizes, packed)
        for index in (rows, np.array(rows, dtype=np.int32), torch.tensor(rows).long(), bounds, flags, np.array(flags)):
            taken = data[index]
            at = index if isinstance(index, slice) else torch.as_tensor(index)
            at = at if isinstance(at, slice) or at.dtype == torch.bool else at.long()
            assert torch.equal(taken.column("input_ids"), data.column("input_ids")[at])
            assert torch.equal(taken.column("row"), data.column("row")[at])
            assert taken.non_tensor_batch["uid"].tolist() == [f"u{i}" for i in taken.column("row")]


@quick
@given(st.lists(lengths, min_size=1, max_size=4), st.integers(1, 3))
def test_repeat_sets_copies_side_by_side_or_block_by_block(sizes, times):
    data, rows = rollout(sizes), list(range(len(sizes)))
    interleaved, blocks = data.repeat(times), data.repeat(times, interleave=False)
    assert interleaved.column("row").tolist() == [i for i in rows for _ in range(times)]
    assert blocks.column("row").tolist() == rows * times
    assert same(blocks, DataProto.concat([data] * times))
    assert same(interleaved, data.sample_level_repeat([times] * len(rows)))


def test_rows_repeat_as_often_as_requested():
    data = rollout([(1, 1), (2, 2), (3, 3)]).sample_level_repeat(torch.tensor([2, 0, 1]))
    assert data.column("row").tolist() == [0, 0, 2] and data.ragged("prompts").layout.lengths.tolist() == [1, 1, 3]
    with pytest.raises(DataProtoError, match="2 counts for 3 rows"):
        data.sample_level_repeat([1, 2])


@quick
@given(st.permutations(range(5)))
def test_reordering_back_restores_the_batch(order):
    data = rollout([(1, 5), (2, 4), (3, 3), (4, 2), (5, 1)])
    original = data.select()
    data.reorder(torch.tensor(order))
    assert data.column("row").tolist() == list(order)
    data.reorder(np.argsort(order))
    assert same(data, original)


def test_rows_out_of_range_and_other_indices_are_refused():
    data = plain(3)
    for index in (3, -4, [0, 3]):
        with pytest.raises(IndexError, match="of a DataProto of 3 rows"):
            data[index]
    for index in ("a", (0, 1), 1.5):
        with pytest.raises(TypeError, match="is no row number"):
            data[index]
    with pytest.raises(TypeError, match="neither row numbers nor a mask"):
        data[np.array([0.5])]
    with pytest.raises(TypeError, match="neither row numbers nor a mask"):
        data[[True, False]]


def test_one_row_is_an_item_with_its_tensors_objects_and_metadata():
    item = rollout([(2, 3), (1, 2)])[-1]
    assert isinstance(item, DataProtoItem)
    assert item.batch["responses"].tolist() == [200, 201, PAD, PAD, PAD, PAD]
    assert item.non_tensor_batch["extra_info"] == {"index": 1} and item.meta_info["temperature"] == 0.7
    assert [int(item.batch["row"]) for item in rollout([(1, 1)] * 3)] == [0, 1, 2]


def test_items_collate_back_into_a_batch():
    data = rollout([(2, 3), (1, 2)])
    collated = collate_fn([data[0], data[1]])
    collated.meta_info = data.meta_info
    assert same(collated, data)


def test_an_uneven_chunk_says_numbers_and_way_out(monkeypatch):
    with pytest.raises(
        AssertionError, match="6 rows do not make 4 equal chunks, 2 would be left.*pad_dataproto_to_div"
    ):
        plain().chunk(4)
    monkeypatch.setenv("VERL_AUTO_PADDING", "1")
    assert [len(part) for part in plain().chunk(4)] == [2, 2, 1, 1]


def test_padding_is_enabled_by_switch_environment_or_batch(monkeypatch):
    assert not plain().is_padding_enabled()
    assert DataProto.from_dict({"a": torch.zeros(1)}, auto_padding=True).is_padding_enabled()
    monkeypatch.setenv("VERL_AUTO_PADDING", "TRUE")
    assert plain().is_padding_enabled()
    monkeypatch.delenv("VERL_AUTO_PADDING")
    DataProtoConfig.auto_padding = True
    try:
        assert plain().is_padding_enabled()
    finally:
        DataProtoConfig.auto_padding = False


@pytest.mark.parametrize(("candidate", "row"), [("first", 0), ("last", 2), ("", 2)])
def test_padding_appends_copies_of_one_row(candidate, row):
    data = plain(3)
    data.padding(2, candidate)
    assert data.column("a").tolist() == [0, 1, 2, row, row] and data.non_tensor_batch["name"][-1] == f"n{row}"


@quick
@given(st.integers(1, 5), st.integers(1, 12))
def test_padding_to_a_divisor_starts_over_as_often_as_needed(rows, divisor):
    data = rollout([(1, 1)] * rows)
    padded, added = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0 and 0 <= added < divisor
    assert padded.column("row").tolist() == [i % rows for i in range(rows + added)]
    assert same(unpad_dataproto(padded, added), data)


def test_mini_batches_cover_every_row_each_epoch_in_an_order_the_seed_decides():
    data = rollout([(1, 1)] * 6)

    def rows(seed):
        batches = data.make_iterator(3, 2, seed, {"shuffle": True})
        return [batch.column("row").tolist() for batch in batches]

    first = rows(0)
    assert first == rows(0) != rows(1)
    assert sorted(first[0] + first[1]) == sorted(first[2] + first[3]) == list(range(6)) and first[:2] != first[2:]
    plain_order = list(data.make_iterator(3, 1))
    assert [b.column("row").tolist() for b in plain_order] == [[0, 1, 2], [3, 4, 5]]
    assert plain_order[0].meta_info == data.meta_info
    with pytest.raises(AssertionError, match="6 rows are no multiple of mini_batch_size=4"):
        data.make_iterator(4, 1)


def test_parts_with_different_columns_or_widths_do_not_join():
    with pytest.raises(KeyError, match=r"columns \['b'\] are not in both part 0 and part 1"):
        DataProto.concat([plain(), plain().select(["a"])])
    with pytest.raises(ValueError, match=r"column 'r' has shapes \[\(1, 2\), \(1, 3\)\]"):
        DataProto.concat([DataProto.from_ragged({"r": Ragged.from_rows([[1]], width)}) for width in (2, 3)])
    with pytest.raises(ValueError, match="empty list"):
        DataProto.concat([])


def test_a_packed_and_a_padded_part_join():
    sizes = [(2, 3), (1, 2)]
    assert same(
        DataProto.concat([rollout(sizes), rollout(sizes, packed=False)]), DataProto.concat([rollout(sizes)] * 2)
    )


def test_joined_batches_keep_the_metadata_of_the_first():
    a, b = plain(1), plain(1)
    a.meta_info, b.meta_info = {"metrics": 1}, {"metrics": 2}
    assert DataProto.concat([a, b]).meta_info == {"metrics": 1}


def test_metadata_set_on_a_part_stays_there():
    data = plain()
    for part in (data[:2], data[[0]], data.select(), data.chunk(2)[0], next(data.make_iterator(3, 1))):
        part.meta_info["mine"] = 1
    assert data.meta_info == {"t": 1}


def test_slices_share_memory_and_chosen_rows_do_not():
    data = plain()
    data[2:].batch["a"][0] = 70
    data[[0, 1]].batch["a"][0] = 80
    assert data.batch["a"].tolist() == [0, 1, 70, 3, 4, 5]


# Columns --------------------------------------------------------------------------------------------------------------


def test_making_one_from_a_single_dict_sorts_columns_by_kind():
    data = DataProto.from_single_dict({"a": torch.zeros(2, 3), "n": np.array([1, None], dtype=object)}, {"t": 1})
    assert data.keys() == ["a"] and list(data.non_tensor_batch) == ["n"] and data.meta_info == {"t": 1}
    with pytest.raises(ValueError, match="'x' is a list"):
        DataProto.from_single_dict({"x": [1]})


@pytest.mark.parametrize(
    "value",
    [[[1, 2], [3, 4]], [[1], [2, 3]], ["ab", "cd"], [[["a"], ["b"]], [["c"], ["d"]]], [[[1], [2, 3]], [[4], [5]]]],
    ids=str,
)
def test_nested_lists_become_the_array_of_objects_that_numpy_makes_of_them(value):
    made, expected = DataProto.from_dict(non_tensors={"x": value}).non_tensor_batch["x"], np.array(value, dtype=object)
    assert made.shape == expected.shape and made.dtype == object and made.tolist() == expected.tolist()


def test_images_and_tensors_in_lists_stay_objects():
    image, tensor = np.zeros((2, 2)), torch.zeros(2)
    made = DataProto.from_dict(non_tensors={"a": [image, image], "t": [tensor, tensor]}).non_tensor_batch
    assert made["a"].shape == made["t"].shape == (2,) and made["t"][1] is tensor


def test_columns_of_several_dims_go_through_rows_and_back():
    data = DataProto.from_dict({"x": torch.zeros(2, 1)}, {"ids": [[1, 2], [3, 4]]})
    assert collate_fn([data[0], data[1]]).non_tensor_batch["ids"].tolist() == [[1, 2], [3, 4]]


def test_unfolding_cuts_tensors_arrays_and_lists_and_repeats_the_rest():
    tensors = {"a": torch.arange(12).view(2, 6), "b": torch.arange(2)[:, None]}
    labels = [[["a1"], ["a2"], ["a3"]], [["b1"], ["b2"], ["b3"]]]
    data = DataProto.from_dict(tensors, {"labels": labels, "name": ["x", "y"]}, {"fact": 1})
    unfolded = data.unfold_column_chunks(3, split_keys=["a", "labels", "not there"])
    assert unfolded.batch["a"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert unfolded.batch["b"].flatten().tolist() == [0, 0, 0, 1, 1, 1] and unfolded.meta_info == {"fact": 1}
    assert unfolded.non_tensor_batch["labels"].tolist() == [[[f"{r}{i}"]] for r in "ab" for i in "123"]
    assert unfolded.non_tensor_batch["name"].tolist() == list("xxxyyy")
    lists = np.empty(2, dtype=object)
    lists[:] = [[1, 2, 3, 4], [5, 6]]
    ragged = DataProto(non_tensor_batch={"ids": lists}).unfold_column_chunks(2, ["ids"])
    assert ragged.non_tensor_batch["ids"].tolist() == [[1, 2], [3, 4], [5], [6]]
    with pytest.raises(AssertionError, match="does not make 4 equal chunks"):
        data.unfold_column_chunks(4, ["a"])


def test_a_tensordict_with_objects_comes_and_goes():
    data = DataProto.from_dict({"x": torch.zeros(2, 1)}, {"name": ["a", "b"]})
    again = DataProto.from_tensordict(data.to_tensordict(), {"fact": 1})
    assert again.non_tensor_batch["name"].tolist() == ["a", "b"] and again.meta_info == {"fact": 1}
    assert again.batch["x"].shape == (2, 1)


def test_columns_of_different_length_are_refused():
    with pytest.raises(AssertionError, match=r"batch dims differ: \{'a': \(2,\), 'b': \(3,\)\}"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(AssertionError, match="column 'a' has 2 rows, the batch 3"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"n": [1, 2, 3]})
    data = plain(2)
    data.non_tensor_batch["n"] = np.zeros(3)
    with pytest.raises(AssertionError, match=r"2 rows, but columns \{'n': 3\}"):
        data.check_consistency()
    with pytest.raises(AssertionError, match="'n'.* is a list, not a numpy array"):
        DataProto(non_tensor_batch={"n": [1]})
    with pytest.raises(AssertionError, match="not exactly one batch dim"):
        DataProto(plain(6).batch.view(2, 3))


def test_a_given_tensordict_is_kept_and_can_be_replaced():
    batch = plain().batch
    data = DataProto(batch)
    assert data.batch is batch
    data.batch = plain(2).batch
    assert len(data) == 2
    data.batch = None
    assert data.batch is None and len(data) == 0 and data.keys() == []


def test_length_comes_from_tensors_else_arrays_else_is_zero():
    assert len(plain(4)) == len(plain(4).select([])) == len(DataProto.from_dict(non_tensors={"n": [0] * 4})) == 4
    assert len(DataProto()) == len(DataProto(meta_info={"a": 1})) == 0


def test_select_shares_tensors_and_a_deep_copy_does_not():
    data = rollout([(1, 2)])
    part = data.select(["responses", "row"], ["uid"], ["temperature"])
    assert part.keys() == ["row", "responses"] and part.meta_info == {"temperature": 0.7}
    assert part.column("row") is data.column("row") and part.ragged("responses") is data.ragged("responses")
    for deep in (data.select(deepcopy=True), copy.deepcopy(data)):
        assert same(deep, data)
        deep.column("row")[0] = 7
        deep.non_tensor_batch["extra_info"][0]["index"] = 7
    assert data.column("row")[0] == 0 and data.non_tensor_batch["extra_info"][0] == {"index": 0}
    assert same(copy.copy(data), data)


@pytest.mark.parametrize("touched", [False, True])
def test_pop_takes_columns_out(touched):
    data = rollout([(1, 2), (3, 4)])
    assert not touched or data.batch is not None
    taken = data.pop(["responses", "row"], ["uid"], ["temperature"])
    assert sorted(taken.keys()) == ["responses", "row"] and list(taken.non_tensor_batch) == ["uid"]
    assert taken.meta_info == {"temperature": 0.7} and "temperature" not in data.meta_info
    assert not {"responses", "row", "uid"} & {*data.keys(), *data.non_tensor_batch}
    assert data.pop(non_tensor_batch_keys=["extra_info"]).batch is None


def test_pop_of_what_is_not_there_changes_nothing():
    data = plain()
    for keys in ([["a", "x"]], [["a"], ["x"]], [["a"], ["name"], ["x"]]):
        with pytest.raises(AssertionError, match=r"\['x'\] not in"):
            data.pop(*keys)
    with pytest.raises(MissingColumn) as error:
        data.pop(["x"])
    assert str(error.value) == "pop: ['x'] not in batch, which holds ['a', 'b']. Pop only those."
    assert same(data, plain())


@pytest.mark.parametrize("touched", [False, True])
def test_rename_takes_names_lists_or_a_dict(touched):
    data = plain()
    assert not touched or data.batch is not None
    assert sorted(data.rename("a", "c").rename(["b"], ["d"]).keys()) == ["c", "d"]
    assert data.rename({"c": "d", "d": "c"}).column("d").tolist() == list(range(6))
    with pytest.raises(ValueError, match="2 old names"):
        data.rename(["c", "d"], ["x"])


@pytest.mark.parametrize("touched", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_union_adds_columns_and_accepts_equal_ones(touched, packed):
    sizes = [(1, 2), (3, 4)]
    data, other = rollout(sizes).select(["responses", "row"]), rollout(sizes, packed)
    assert not touched or data.batch is not None
    assert data.union(other) is data and same(data, rollout(sizes))


def test_union_names_the_column_and_the_first_row_that_differs():
    sizes = [(1, 2), (3, 4), (2, 2)]
    other = rollout(sizes, packed=False)
    other.batch["responses"][1, 2] = 5
    expected = (
        r"column 'responses' is in both and differs: first at row 1, \[200, 201, 202, 203\] and \[200, 201, 5, 203\]"
    )
    for data in (rollout(sizes), rollout(sizes, packed=False)):
        before = data.keys()
        pattern = expected if is_packed(data) else "column 'responses' is in both and differs: first at row 1"
        with pytest.raises(AssertionError, match=pattern):
            data.union(other.union(DataProto.from_dict({"new": torch.zeros(3)})))
        assert data.keys() == before
    with pytest.raises(ValueError, match="column 'uid'.*first at row 2, 'u2' and 'other'"):
        rollout(sizes).union(DataProto.from_dict(non_tensors={"uid": ["u0", "u1", "other"]}))
    with pytest.raises(ValueError, match="meta_info 'temperature'.*0.7 and 1.0"):
        rollout(sizes).union(DataProto(meta_info={"temperature": 1.0}))
    with pytest.raises(ValueError, match="column 'row'.*int64 .* and torch.float32"):
        rollout(sizes).union(DataProto.from_dict({"row": torch.arange(3.0)}))
    with pytest.raises(ValueError, match="union: 3 and 2 rows"):
        rollout(sizes).union(plain(2))


def test_union_compares_objects_nan_safe_and_in_depth():
    def made():
        return {
            "score": np.array([1.0, float("nan")]),
            "info": np.array([{"x": [float("nan"), np.arange(2)]}, None], dtype=object),
        }

    assert union_numpy_dict(made(), made()).keys() == made().keys()
    changed = made()
    changed["info"][0]["x"][1][0] = 4
    with pytest.raises(DataProtoError, match="'info' is in both and differs: first at row 0"):
        union_numpy_dict(made(), changed)


def test_tensordicts_unite_in_place():
    a, b = plain().batch, plain().batch
    b["c"] = torch.zeros(6)
    assert union_tensor_dict(a, b) is a and "c" in a.keys()
    with pytest.raises(DataProtoError, match=r"batch sizes \(6,\) and \(2,\)"):
        union_tensor_dict(a, plain(2).batch)


def test_column_chunks_unfold_into_rows():
    data = DataProto.from_dict({"pair": torch.arange(8).view(2, 4), "id": torch.tensor([0, 1])}, {"n": ["x", "y"]})
    unfolded = data.unfold_column_chunks(2, ["pair"])
    assert unfolded.column("pair").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert unfolded.column("id").tolist() == [0, 0, 1, 1] and unfolded.non_tensor_batch["n"].tolist() == list("xxyy")


def test_folding_the_batch_dim_and_back_gives_the_batch():
    data = plain()
    folded = fold_batch_dim(data, 2)
    assert len(folded) == 2 and folded.batch["b"].shape == (2, 3, 2) and folded.non_tensor_batch["name"].shape == (2, 3)
    assert same(unfold_batch_dim(folded), data)
    with pytest.raises(DataProtoError, match="6 rows do not fold into 4"):
        fold_batch_dim(data, 4)


def test_rows_turn_into_columns():
    assert list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"a": 3, "b": 4}]) == {"a": [1, 3], "b": [2, 4]}
    assert list_of_dict_to_dict_of_list([]) == {}
    with pytest.raises(AssertionError, match=r"row 1 has keys \['b'\], row 0 \['a'\]"):
        list_of_dict_to_dict_of_list([{"a": 1}, {"b": 2}])


# On the wire ----------------------------------------------------------------------------------------------------------


def sent(data: DataProto, read_only=True) -> tuple[DataProto, int]:
    """Send out of band, as Ray and shared memory do; returns what arrives and the bytes that travelled."""
    buffers = []
    head = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    memory = [(bytes if read_only else bytearray)(buffer.raw()) for buffer in buffers]
    return pickle.loads(head, buffers=memory), len(head) + sum(map(len, memory))


@quick
@given(st.lists(lengths, max_size=5), st.booleans(), st.booleans())
def test_a_batch_arrives_as_it_left(sizes, packed, touched):
    data = rollout(sizes, packed)
    assert not touched or data.batch is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for received in (pickle.loads(pickle.dumps(data)), sent(data)[0], sent(data, read_only=False)[0]):
            assert same(received, data)
            assert received.column("old_log_probs").dtype == torch.bfloat16


def test_what_travels_is_the_valid_tokens_whatever_the_window():
    def travelled(width, packed):
        columns = {"responses": Ragged.from_rows([[1] * 50] * 20, width)}
        columns["attention_mask"] = columns["responses"].like(torch.ones(1000, dtype=torch.int64))
        data = DataProto.from_ragged(columns)
        return sent(data if packed else DataProto.from_dict({name: data.column(name) for name in data.keys()}))[1]

    assert travelled(512, True) == travelled(4096, True) < 2 * 1000 * 8 + 2000
    assert travelled(4096, False) == travelled(4096, True)


@pytest.mark.parametrize("packed", [False, True])
def test_a_part_sends_only_its_own_rows(packed):
    data = rollout([(P, R)] * 400, packed)
    data.put("dense", torch.zeros(400, 500))
    whole, part = sent(data)[1], sent(data[7:9])[1]
    assert part < whole / 50


def test_the_batch_of_received_data_may_be_changed_although_its_memory_is_read_only():
    data = rollout([(2, 3), (1, 2)])
    buffers = []
    head = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    memory = [bytes(buffer.raw()) for buffer in buffers]
    before = [bytes(bytearray(block)) for block in memory]
    received = pickle.loads(head, buffers=memory)
    for name in received.keys():
        received.batch[name].zero_()
    assert memory == before


def test_unusual_tensors_survive():
    data = DataProto.from_dict(
        {
            "transposed": torch.arange(6).view(3, 2).T,
            "expanded": torch.ones(1, 3).expand(2, 3),
            "grad": torch.ones(2, requires_grad=True),
            "fp8": torch.ones(2).to(torch.float8_e4m3fn),
            "none": torch.zeros(2, 0),
            "flag": torch.tensor([True, False]),
        },
        {"numbers": np.arange(2.0), "objects": [{"image": np.zeros(2)}, None]},
    )
    received, _ = sent(data)
    buffers = []
    pickle.dumps(data.select(["transposed", "expanded"], []), protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 2, "strided tensors, too, leave out of band"
    for name in data.keys():
        assert received.column(name).dtype == data.column(name).dtype
        assert torch.equal(received.column(name).float(), data.column(name).float())


def test_a_batch_is_saved_and_loaded(tmp_path):
    data = rollout([(2, 3), (1, 2)])
    data.save_to_disk(tmp_path / "batch.pkl")
    assert same(DataProto.load_from_disk(tmp_path / "batch.pkl"), data)


class Made(TorchDispatchMode):
    """Elements of all tensors that the block makes, in ``elements``."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.elements += sum(one.numel() for one in tree_leaves(made) if isinstance(one, torch.Tensor))
        return made


def test_packing_sending_and_receiving_costs_what_the_real_tokens_cost():
    count = torch.full((1024,), 400)

    names = ("responses", "old_log_probs", "advantages", "returns", "values")

    def cost(width):
        layout = Layout(torch.zeros(1024, dtype=torch.int64), count, width)
        data = DataProto.from_ragged({name: Ragged(torch.rand(layout.total), layout) for name in names})
        with Made() as made:
            num_bytes = sent(data.packed())[1]
        return num_bytes, made.elements

    (num_bytes, elements), wide = cost(4096), cost(1 << 20)
    assert wide == (pytest.approx(num_bytes, abs=16), elements), "the width of the window costs nothing"
    assert num_bytes < 1.01 * len(names) * 4 * int(count.sum())


# Elsewhere ------------------------------------------------------------------------------------------------------------


def test_moving_keeps_columns_packed_and_layouts_shared():
    data = rollout([(2, 3), (1, 2)])
    assert data.to("cpu") is data and is_packed(data)
    moved = data.select().to("meta")
    assert moved.ragged("responses").values.device.type == moved.column("row").device.type == "meta"
    assert moved.ragged("responses").layout is moved.ragged("old_log_probs").layout


def test_sizes_are_printed(capsys):
    rollout([(2, 3)]).print_size("rollout")
    assert capsys.readouterr().out.startswith("rollout, tensors: 0.0000")


def done(result=None, error=None) -> Future:
    future = Future()
    future.set_exception(error) if error else future.set_result(result)
    return future


def test_a_future_joins_and_hands_out_chunks():
    data = plain()
    future = DataProtoFuture.concat([done(part) for part in data.chunk(3)])
    assert same(future.get(), data)
    halves = future.chunk(2)
    assert same(halves[1].get(), data[3:]) and same(halves[1].chunk(3)[0].get(), data[3:4])


def test_a_future_raises_the_first_failure_even_if_another_worker_never_answers():
    with pytest.raises(RuntimeError, match="rank 1"):
        DataProtoFuture(DataProto.concat, [Future(), done(error=RuntimeError("rank 1"))]).get()


def test_a_future_waits_for_whatever_has_a_result():
    class Handle:  # as a Ray ObjectRef: makes a concurrent future of itself
        def future(self):
            return done(plain(2))

    class Getter:
        def get(self):
            return plain(2)

    for kind in (Handle, Getter):
        assert len(DataProtoFuture(DataProto.concat, [kind(), kind()]).get()) == 4


def gather_on_rank(rank: int, store: str) -> None:
    group = torch.distributed.group
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        data = rollout([(2, 3), (1, 2)] if rank == 0 else [(3, 1), (P, R)])
        all_gather_data_proto(data, group.WORLD)
        expected = DataProto.concat([rollout([(2, 3), (1, 2)]), rollout([(3, 1), (P, R)])])
        assert same(data, expected)
    finally:
        torch.distributed.destroy_process_group()


def test_every_rank_gathers_the_rows_of_all(tmp_path):
    torch.multiprocessing.start_processes(gather_on_rank, (str(tmp_path / "store"),), nprocs=2, start_method="fork")
