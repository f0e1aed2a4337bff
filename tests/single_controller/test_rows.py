"""What happens to a batch before it is split and after it is joined."""

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller.base.decorator import Padding, drop_padding, keep_columns, pad_rows


def batch(count=3, packed=False):
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 1, 1, 0, 0]])[:count]
    tensors = {"attention_mask": mask, "prompts": torch.ones(count, 2), "responses": torch.ones(count, 3)}
    tensors |= {"response_mask": mask[:, 2:].clone(), "x": torch.arange(count)}
    data = DataProto.from_dict(tensors, {"uid": np.arange(count)}, {"step": 1})
    return data.packed() if packed else data


@pytest.mark.parametrize("packed", [False, True])
def test_padding_rows_repeat_the_first_and_train_nothing(packed):
    (padded,), _, padding = pad_rows((batch(packed=packed),), {}, 4)
    assert padding == Padding(real=3, padded=4)
    assert padded.column("x").tolist() == [0, 1, 2, 0]
    assert padded.column("response_mask").tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert padded.column("attention_mask")[3].tolist() == [0, 1, 1, 1, 0]


def test_a_mask_that_came_alone_is_zeroed_too():
    data = batch().select(["response_mask"], [])
    (padded,), _, _ = pad_rows((data,), {}, 2)
    assert padded.column("response_mask").sum(-1).tolist() == [2, 3, 1, 0]
    assert data.column("response_mask").sum(-1).tolist() == [2, 3, 1]


def test_a_batch_smaller_than_the_parts_is_repeated_as_often_as_needed():
    (padded,), _, padding = pad_rows((batch(count=1),), {}, 4)
    assert padding == (1, 4) and padded.column("x").tolist() == [0, 0, 0, 0]


def test_an_even_batch_is_left_alone():
    data = batch()
    (same,), _, padding = pad_rows((data,), {}, 3)
    assert same is data and padding is None


def test_batches_of_one_call_must_have_as_many_rows():
    with pytest.raises(ValueError, match=r"\[2, 3\] rows"):
        pad_rows((batch(),), {"other": batch(count=2)}, 2)


def test_only_a_result_with_the_padded_row_count_is_cut():
    assert drop_padding(batch(), Padding(2, 3)).column("x").tolist() == [0, 1]
    assert len(drop_padding(batch(), Padding(3, 4))) == 3
    assert drop_padding([1, 2, 3], Padding(2, 3)) == [1, 2, 3]
    assert len(drop_padding(batch(), None)) == 3


def test_columns_that_are_not_read_stay_behind():
    data = batch()
    kept = keep_columns(data, ("x", "uid", "absent"))
    assert kept.keys() == ["x"] and list(kept.non_tensor_batch) == ["uid"] and kept.meta_info == {"step": 1}
    everything = keep_columns(data, None)
    assert everything is not data and everything.keys() == data.keys()
