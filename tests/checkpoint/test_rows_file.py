"""What goes into a file of rows comes out of it, and what cannot go in is named."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from verl.batch.layout import Layout
from verl.batch.ragged import Ragged
from verl.checkpoint.rows_file import check_savable, load_rows, read_metadata, save_rows
from verl.protocol import DataProto


def column_of(*values):
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


@pytest.fixture
def rows():
    layout = Layout(torch.tensor([0, 0]), torch.tensor([1, 2]), 4)
    responses = Ragged(torch.tensor([5, 6, 7]), layout, 9)
    ragged = {"responses": responses, "rollout_log_probs": responses.like(torch.tensor([-1.0, -2.5, -0.125]))}
    dense = {"turns": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), "half": torch.ones(2, dtype=torch.bfloat16)}
    objects = {
        "finish_reason": column_of("stop", "abort"),
        "count": np.array([2, 3], dtype=np.int32),
        "note": column_of({"a": [1], "b": (0.5, "x")}, None),
        "pixels": column_of({"image": [torch.rand(2, 3)]}, {"image": []}),
    }
    return DataProto.from_ragged(ragged, dense, objects, {"pad_token_id": 9, "timing": {"gen": 1.0}})


def test_rows_come_back_as_they_were(rows, tmp_path):
    path = tmp_path / "new" / "rows.safetensors"
    save_rows(path, rows, {"step": 4, "why": ["x"]})
    again, metadata = load_rows(path)
    assert metadata == read_metadata(path) == {"step": 4, "why": ["x"]}
    assert again.meta_info == {"pad_token_id": 9}
    for name in rows.keys():
        assert (
            torch.equal(again.column(name), rows.column(name)) and again.column(name).dtype == rows.column(name).dtype
        )
    assert again.ragged("responses").layout is again.ragged("rollout_log_probs").layout
    for name in ("finish_reason", "count", "note"):
        assert again.non_tensor_batch[name].dtype == rows.non_tensor_batch[name].dtype
        assert list(again.non_tensor_batch[name]) == list(rows.non_tensor_batch[name])
    pixels = [column.non_tensor_batch["pixels"] for column in (again, rows)]
    assert torch.equal(pixels[0][0]["image"][0], pixels[1][0]["image"][0]) and pixels[0][1] == {"image": []}
    assert [file.name for file in path.parent.iterdir()] == ["rows.safetensors"]


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_images_come_back_pixel_by_pixel(mode, rows, tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8), "RGBA").convert(mode)
    rows.non_tensor_batch["multi_modal_data"] = column_of({"image": [image, image]}, {})
    save_rows(tmp_path / "rows.safetensors", rows, {})
    again = load_rows(tmp_path / "rows.safetensors")[0].non_tensor_batch["multi_modal_data"]
    assert [(one.mode, one.size, one.tobytes()) for one in again[0]["image"]] == [
        (mode, image.size, image.tobytes())
    ] * 2
    assert again[1] == {}


@pytest.mark.parametrize("odd", [object(), {1}, {"a": {3: 4}}, [np.int64(3)]])
def test_what_such_a_file_cannot_hold_is_named_and_nothing_is_written(odd, rows, tmp_path):
    rows.non_tensor_batch["tool"] = column_of("fine", odd)
    for save in (lambda: check_savable(rows), lambda: save_rows(tmp_path / "rows.safetensors", rows, {})):
        with pytest.raises(ValueError, match="column 'tool' holds what no such file does: a "):
            save()
    assert not list(tmp_path.iterdir())


def test_a_damaged_or_foreign_file_is_named(rows, tmp_path):
    path = tmp_path / "rows.safetensors"
    save_rows(path, rows, {})
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="rows.safetensors cannot be read.*Delete it"):
        load_rows(path)
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="rows.safetensors holds no rows of a batch"):
        load_rows(path)
