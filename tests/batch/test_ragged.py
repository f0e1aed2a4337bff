import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.batch.layout import Layout, tensor_from_numpy, tensor_to_numpy
from verl.batch.ragged import GatheredRows, Ragged, RowValues, cat_columns, select_columns, slice_columns
from verl.batch.windows import join_windows

quick = settings(deadline=None, max_examples=60)


@st.composite
def layouts(draw, min_rows=0):
    width = draw(st.integers(0, 9))
    runs = draw(st.lists(st.tuples(st.integers(0, width), st.integers(0, width)), min_size=min_rows, max_size=7))
    starts = torch.tensor([min(run) for run in runs], dtype=torch.int64)
    ends = torch.tensor([max(run) for run in runs], dtype=torch.int64)
    return Layout(starts, ends - starts, width)


def column(layout: Layout, tail=(), dtype=torch.float32) -> Ragged:
    values = torch.arange(1, 1 + layout.total * int(np.prod(tail)), dtype=torch.float32)
    return Ragged(values.reshape(-1, *tail).to(dtype), layout)


@quick
@given(layouts())
def test_a_mask_and_its_layout_say_the_same(layout):
    assert Layout.from_mask(layout.mask()) == layout
    assert layout.mask().sum(1).tolist() == layout.lengths.tolist()


def test_a_row_with_holes_counts_from_its_first_to_its_last_real_cell():
    layout = Layout.from_mask(torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]))
    assert layout.lengths.tolist() == [3, 0, 5]
    assert layout.starts[[0, 2]].tolist() == [1, 0]


@quick
@given(layouts(), st.sampled_from([(), (2,)]))
def test_packing_a_padded_column_keeps_its_valid_tokens(layout, tail):
    original = column(layout, tail)
    padded = original.padded()
    assert padded.shape == original.shape == (len(layout), layout.width, *tail)
    assert torch.equal(Ragged.from_padded(padded, layout).values, original.values)
    assert (padded[layout.mask() == 0] == 0).all()


@quick
@given(layouts(), st.data())
def test_the_window_of_a_layout_is_the_layout_of_the_cut_mask(layout, data):
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, layout.width)] * 2)))
    assert torch.equal(layout.window(first, last).mask(), layout.mask()[:, first:last])


@quick
@given(layouts(min_rows=1), st.data())
def test_choosing_rows_packed_and_padded_gives_the_same(layout, data):
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(layout) - 1))), dtype=torch.int64)
    assert torch.equal(column(layout).select(rows).padded(), column(layout).padded()[rows])


@quick
@given(layouts(), st.integers(-8, 8), st.integers(-8, 8))
def test_a_slice_is_the_slice_of_the_padded_form(layout, first, last):
    assert torch.equal(column(layout).slice(first, last).padded(), column(layout).padded()[first:last])


@quick
@given(layouts(), st.integers(0, 7))
def test_joining_the_parts_gives_the_whole(layout, cut):
    whole = column(layout)
    joined = Ragged.cat([whole.slice(0, cut), whole.slice(cut, len(layout))])
    assert joined.layout == layout
    assert torch.equal(joined.values, whole.values)


def test_a_slice_shares_the_memory_of_the_whole():
    whole = column(Layout(torch.tensor([0, 1]), torch.tensor([2, 3]), 4))
    assert whole.slice(1, 2).values.data_ptr() == whole.values[2:].data_ptr()


@quick
@given(layouts(min_rows=1))
def test_rows_are_the_valid_tokens_row_by_row(layout):
    ragged = column(layout)
    for i, row in enumerate(ragged.rows()):
        expected = ragged.padded()[i][layout.mask()[i].bool()]
        assert torch.equal(row, expected) and torch.equal(ragged.row(i), expected)
    assert torch.equal(ragged.row(-1), ragged.rows()[-1])
    with pytest.raises(IndexError):
        ragged.row(len(layout))


def test_tight_drops_the_padding_no_row_needs():
    ragged = Ragged(torch.tensor([5, 6, 7]), Layout(torch.tensor([3, 90]), torch.tensor([1, 2]), 100), fill=-1)
    assert ragged.trim_padding().tolist() == [[5, -1], [6, 7]]


def test_gradients_flow_through_the_padded_and_the_tight_form():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    ragged = Ragged(values, Layout(torch.tensor([1, 0]), torch.tensor([1, 2]), 4))
    (ragged.padded().sum() + 2 * (ragged.trim_padding() * torch.tensor([[1.0, 9.0], [2.0, 3.0]])).sum()).backward()
    assert values.grad.tolist() == [3, 5, 7]


def test_positions_are_zero_on_the_left_and_count_on_to_the_right():
    mask = torch.tensor([[0, 0, 1, 1, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]])
    positions = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    packed = Ragged.from_padded(positions, Layout.from_mask(mask), "position")
    assert packed.values.tolist() == [0, 1, 0, 1, 2, 0]
    assert torch.equal(packed.padded(), positions)
    assert packed.trim_padding().tolist() == [[0, 1, 2], [0, 1, 2], [0, 0, 0], [0, 1, 2]]


@pytest.mark.parametrize(("side", "expected"), [("left", [[0, 1, 2], [0, 0, 3]]), ("right", [[1, 2, 0], [3, 0, 0]])])
def test_rows_are_packed_with_the_padding_on_the_named_side(side, expected):
    for rows in ([[1, 2], [3]], [torch.tensor([1, 2]), torch.tensor([3])], [torch.tensor([1, 2]), [3]]):
        ragged = Ragged.from_rows(rows, 3, side)
        assert ragged.padded().tolist() == expected and ragged.values.dtype == torch.int64


def test_no_rows_and_empty_rows_can_be_packed():
    assert Ragged.from_rows([], 3).padded().shape == (0, 3)
    assert Ragged.from_rows([[], []], 3).padded().tolist() == [[0, 0, 0], [0, 0, 0]]
    assert Ragged.from_rows([[]], 0).trim_padding().shape == (1, 0)


def test_a_row_longer_than_the_window_is_named():
    with pytest.raises(ValueError, match="row 1 has 3 tokens, width=2"):
        Ragged.from_rows([[1], [1, 2, 3]], 2)


def test_runs_that_leave_the_window_are_refused():
    ragged = Ragged(torch.zeros(3), Layout(torch.tensor([0, 3]), torch.tensor([1, 2]), 4))
    with pytest.raises(ValueError, match=r"starts\[1\]=3, lengths\[1\]=2 leave the window of width=4"):
        ragged.padded()


def test_values_that_do_not_fill_the_layout_are_refused():
    with pytest.raises(ValueError, match="do not fill a layout of 3 tokens"):
        column(Layout(torch.tensor([0]), torch.tensor([3]), 4)).like(torch.zeros(2))


def test_widths_that_differ_do_not_join():
    with pytest.raises(ValueError, match=r"widths \[2, 3\] differ"):
        Ragged.cat([Ragged.from_rows([[1]], 2), Ragged.from_rows([[1]], 3)])


def test_columns_that_share_a_layout_go_on_sharing_it():
    layout = Layout(torch.tensor([0, 1, 0]), torch.tensor([2, 3, 0]), 4)
    columns = {"a": column(layout), "b": column(layout)}
    for result in (
        select_columns(columns, torch.tensor([2, 0])),
        slice_columns(columns, 0, 2),
        cat_columns([columns, columns]),
        pickle.loads(pickle.dumps(columns)),
    ):
        assert result["a"].layout is result["b"].layout


def test_where_an_empty_row_would_start_makes_no_difference():
    empty = torch.tensor([0])
    assert Layout(torch.tensor([0]), empty, 4) == Layout(torch.tensor([4]), empty, 4)
    assert Layout(torch.tensor([0]), empty, 4) != Layout(torch.tensor([0]), empty, 5)
    assert Layout(torch.tensor([0]), empty + 1, 4) != Layout(torch.tensor([1]), empty + 1, 4)


@quick
@given(
    layouts(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn]),
)
def test_a_column_survives_pickling(layout, dtype):
    original = Ragged(torch.arange(layout.total).to(dtype), layout, fill=1)
    copy = pickle.loads(pickle.dumps(original, protocol=5))
    assert copy.values.dtype == dtype and copy.layout == layout and copy.fill == 1
    assert torch.equal(copy.values.float(), original.values.float())


def test_a_view_sends_only_its_own_rows():
    rows = 64
    whole = Ragged(torch.zeros(rows * 1000), Layout(torch.zeros(rows).long(), torch.full((rows,), 1000), 1000))
    assert len(pickle.dumps(whole.slice(3, 5), protocol=5)) < 2 * 1000 * 4 + 2000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_read_only_memory_is_wrapped_without_a_copy_or_a_warning(dtype):
    array, tag = tensor_to_numpy(torch.arange(4).to(dtype))
    memory = np.frombuffer(array.tobytes(), dtype=array.dtype)
    assert not memory.flags.writeable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = tensor_from_numpy(memory, tag)
    assert tensor.data_ptr() == memory.ctypes.data
    owner = weakref.ref(memory)
    del memory
    assert owner() is not None, "the tensor alone keeps the memory"
    assert tensor.tolist() == [0, 1, 2, 3]
    del tensor
    assert owner() is None


def travelled(column: Ragged) -> tuple[Ragged, int]:
    """The column as it arrives, and the bytes that were sent."""
    arrays: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(column, protocol=5, buffer_callback=arrays.append)
    arrived = pickle.loads(stream, buffers=arrays)
    return arrived, len(stream) + sum(array.raw().nbytes for array in arrays)


LENGTHS = torch.tensor([300, 0, 1, 500, 200, 0])
LONG = Layout(torch.zeros_like(LENGTHS), LENGTHS, 500)
SPARSE = torch.zeros(1001).index_fill(0, torch.tensor([3, 999]), -0.0).index_fill(0, torch.tensor([700]), torch.nan)


@pytest.mark.parametrize(
    ("values", "most_bytes"),
    [
        (torch.arange(1001) + 40_000, 2 * 1001),  # token ids of a vocabulary of at most 65,536
        (torch.arange(1001) + 65_000, 4 * 1001),  # of a larger one
        (torch.arange(1001) % 2, 1001),  # a mask with holes
        (torch.ones(1001, dtype=torch.int64), 0),
        (torch.full((1001,), -0.0), 0),
        (LONG.spread(torch.tensor([1.5, 9, torch.nan, -0.0, 2, 9])), 6 * 4),  # advantages of GRPO
        (SPARSE.bfloat16(), 3 * 6),  # rewards
        (torch.cat([torch.zeros(1000), torch.ones(1)]).bool(), 5),
        (torch.arange(1001) << 40, 8 * 1001),
        (torch.randn(1001), 4 * 1001),
        (torch.arange(3003).view(1001, 3), 2 * 3003),
    ],
)
def test_values_arrive_bit_for_bit_in_few_bytes(values, most_bytes):
    arrived, sent = travelled(Ragged(values, LONG, 7))
    same = arrived.values.dtype == values.dtype and arrived.values.shape == values.shape
    assert same and arrived.layout == LONG and arrived.fill == 7
    assert (
        values.numpy(force=True).tobytes() == arrived.values.contiguous().numpy().tobytes()
        if (values.dtype != torch.bfloat16)
        else torch.equal(values.view(torch.int16), arrived.values.view(torch.int16))
    )
    assert sent < most_bytes + 600


@quick
@given(layouts(min_rows=1), st.data())
def test_columns_that_others_imply_go_through_rows_and_the_wire(prompt, data):
    rows = len(prompt)
    response = Layout(torch.zeros(rows, dtype=torch.int64), prompt.lengths.flip(0), prompt.width)
    prompt = Layout(prompt.width - prompt.lengths, prompt.lengths, prompt.width)  # left-padded
    prompts, responses = (Ragged(torch.randint(0, 9, (one.total,)), one) for one in (prompt, response))
    columns = {"prompts": prompts, "responses": responses, **join_windows(prompts, responses)}
    ids = torch.cat([prompts.padded(), responses.padded()], 1)
    mask = torch.cat([prompt.mask(), response.mask()], 1)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1)), dtype=torch.int64)
    first = data.draw(st.integers(0, len(chosen)))
    parts = select_columns(columns, chosen)
    parts = cat_columns([slice_columns(parts, 0, first), slice_columns(parts, first, len(chosen))])
    parts = pickle.loads(pickle.dumps(parts, protocol=5))
    assert not {"values"} & {*vars(parts["input_ids"]), *vars(parts["position_ids"])}  # not made, nor sent
    assert torch.equal(parts["input_ids"].padded(), ids[chosen])
    assert torch.equal(parts["attention_mask"].padded(), mask[chosen])
    assert torch.equal(parts["position_ids"].values, columns["position_ids"].select(chosen).values)
    assert torch.equal(
        parts["position_ids"].padded()[mask[chosen] != 0], (mask[chosen].cumsum(1) - 1)[mask[chosen] != 0]
    )


def test_a_token_of_a_whole_sequence_takes_four_bytes_on_its_way():
    prompts, responses = (Ragged(torch.randint(0, 150_000, (1001,)), LONG) for _ in range(2))
    columns = {"prompts": prompts, "responses": responses, **join_windows(prompts, responses)}
    columns["response_mask"] = responses.constant(1)
    assert travelled(columns)[1] < 4 * 2002 + 1500


@quick
@given(layouts(min_rows=1), st.data())
def test_columns_joined_later_hold_the_rows_that_they_would_now(layout, data):
    parts = [{"x": column(layout, dtype=torch.bfloat16)}, {"x": column(layout.slice(0, 1), dtype=torch.bfloat16)}]
    now, later = cat_columns(parts), cat_columns(parts, later=True)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(layout)))), dtype=torch.int64)
    chosen = select_columns(later, rows)["x"]
    assert isinstance(chosen, GatheredRows) and not {"values"} & {*vars(chosen.gather), *vars(later["x"].gather)}
    assert chosen.shape == now["x"].select(rows).shape
    assert torch.equal(chosen.values, now["x"].select(rows).values)
    assert torch.equal(later["x"].padded(), now["x"].padded())


@st.composite
def row_values(draw):
    """A column of one number a row, and the same column with all its values."""
    layout = draw(layouts())
    numbers = torch.arange(1, 1 + len(layout), dtype=torch.float32) / 4
    at = None
    if draw(st.booleans()):
        at = torch.tensor([draw(st.integers(0, max(n - 1, 0))) for n in layout.lengths.tolist()], dtype=torch.int64)
    given = RowValues(numbers, layout, at)
    values = torch.zeros(layout.total)
    for row, (first, last) in enumerate(zip(layout.offsets.tolist(), layout.offsets.tolist()[1:], strict=False)):
        if at is None:
            values[first:last] = numbers[row]
        elif last > first:
            values[first + int(at[row])] = numbers[row]
    return given, Ragged(values, layout)


@quick
@given(row_values(), st.data())
def test_one_number_a_row_is_the_column_of_its_values(columns, data):
    given, whole = columns
    rows = torch.tensor(
        data.draw(st.lists(st.integers(0, len(given.layout) - 1), max_size=6) if len(given.layout) else st.just([])),
        dtype=torch.int64,
    )
    first, last = sorted(data.draw(st.tuples(st.integers(0, 7), st.integers(0, 7))))
    changes = [
        lambda column: column,
        lambda column: column.select(rows),
        lambda column: column.slice(first, last),
        lambda column: Ragged.cat([column, column.slice(first, last)]),
        lambda column: column.copied(),
        lambda column: pickle.loads(pickle.dumps(column)),
    ]
    for change in changes:
        expected = change(whole)
        # the values of the second are there, after the first change
        for column in (RowValues(given.numbers, given.layout, given.at), given):
            found = change(column)
            assert torch.equal(found.values, expected.values) and found.layout == expected.layout
            assert found.shape == expected.shape and found.dtype == expected.dtype
    kept = RowValues(given.numbers, given.layout, given.at).select(rows)
    assert isinstance(kept, RowValues) and "values" not in vars(kept)
    filled = given.layout.lengths > 0
    assert torch.equal(given.row_sums()[filled], whole.row_sums()[filled])
    if bool(filled.all()):
        assert torch.equal(given.padded(), whole.padded())


def test_the_number_of_a_row_without_tokens_is_in_its_padding():
    layout = Layout(torch.tensor([0, 0]), torch.tensor([0, 2]), 3)
    rewards = RowValues.on_last_tokens(torch.tensor([4.0, 5.0]), layout)
    assert rewards.padded().tolist() == [[4.0, 0.0, 0.0], [0.0, 5.0, 0.0]]
    assert rewards.row_sums().tolist() == [4.0, 5.0]
    assert rewards.values.tolist() == [0.0, 5.0]


def test_one_number_a_row_takes_its_bytes_on_the_wire_and_shows_changes():
    layout = Layout(torch.zeros(8, dtype=torch.int64), torch.full((8,), 1000), 1000)
    numbers = torch.rand(8)
    column = RowValues(numbers, layout)
    before = column.version
    assert len(pickle.dumps(column)) < 1000
    assert "values" not in vars(column), "nothing of the size of the tokens was made"
    assert column.version == before
    _ = column.values
    assert column.version == before, "making the values is no change of theirs"
    column.values[0] = 7
    assert column.version != before


@pytest.mark.parametrize("at", [None, torch.tensor([1, 0])])
def test_one_number_a_row_can_be_read_in_inference_mode(at):
    column = RowValues(torch.tensor([1.0, 2.0]), Layout(torch.tensor([0, 0]), torch.tensor([2, 1]), 3), at)
    before = column.version
    with torch.inference_mode():
        assert column.values.tolist() == ([1, 1, 2] if at is None else [0, 1, 2])
    assert column.version == before
