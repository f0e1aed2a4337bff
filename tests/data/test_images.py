"""Rows with images: what a model and a rollout engine are given of them, and which rows are refused."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.images import MIXED, asked, image_dataset, image_row, make_tiny_vl_model, picture, png
from verl.data.rl_dataset import DataError, RLHFDataset, collate_fn
from verl.data.vision import open_image, pixels_of, process_image
from verl.protocol import DataProto
from verl.utils.tokenizer import hf_processor, hf_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_vl_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def written(tmp_path):
    def write(rows):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
        return str(tmp_path / "a.parquet")

    return write


@pytest.fixture
def mixed(written):
    return written([image_row(text, images, i) for i, (text, images) in enumerate(MIXED)])


def real_ids(item):
    return item["input_ids"][item["attention_mask"].bool()].tolist()


def test_ids_and_tensors_are_those_of_the_processor(folder, mixed):
    dataset, processor = image_dataset(folder, mixed), hf_processor(folder)
    for number, (text, images) in enumerate(MIXED):
        item = dataset[number]
        rendered, expected = asked(processor, text, images)
        assert real_ids(item) == expected["input_ids"][0].tolist()
        assert item["position_ids"].tolist()[-len(real_ids(item)) :] == list(range(len(real_ids(item))))
        assert item["raw_prompt_ids"] == processor.tokenizer(rendered)["input_ids"]
        assert item["raw_prompt_ids"].count(processor.image_token_id) == len(images)
        assert item["multi_modal_inputs"].keys() == ({"pixel_values", "image_grid_thw"} if images else set())
        for name, tensor in item["multi_modal_inputs"].items():
            assert torch.equal(tensor, expected[name])
        shown = item["multi_modal_data"].get("image", [])
        assert [image.tobytes() for image in shown] == [image.tobytes() for image in images]
        assert "images" not in item and "prompt" not in item


def test_lengths_count_the_tokens_of_images(folder, mixed):
    dataset = image_dataset(folder, mixed)
    lengths = [len(real_ids(dataset[i])) for i in range(len(MIXED))]
    assert dataset.lengths_of(dataset.dataframe).tolist() == lengths
    longest = sorted(lengths)[2]
    kept = image_dataset(folder, mixed, max_prompt_length=longest, filter_overlong_prompts=True)
    assert [len(real_ids(kept[i])) for i in range(len(kept))] == [n for n in lengths if n <= longest]
    strict = image_dataset(folder, mixed, max_prompt_length=longest)
    assert [length for _, length in strict.find_overlong()] == [n for n in lengths if n > longest]


@pytest.mark.parametrize("side, text", [("left", "x" * 60 + "<image>?"), ("right", "<image>" + "x" * 60)])
def test_truncation_cuts_text_and_never_an_image(folder, written, side, text):
    path = written([image_row(text, [picture()]), image_row("x" * 20 + "<image>" + "x" * 20, [picture()] * 1)])
    whole = image_dataset(folder, path, max_prompt_length=200)[0]
    item = image_dataset(folder, path, truncation=side)[0]
    assert real_ids(item) == (real_ids(whole)[-64:] if side == "left" else real_ids(whole)[:64])
    cut = len(real_ids(whole)) - 64
    raw = whole["raw_prompt_ids"]
    assert item["raw_prompt_ids"] == (raw[cut:] if side == "left" else raw[:-cut])
    with pytest.raises(DataError, match=f"row 1: data.truncation={side} cannot cut .* part of an image"):
        image_dataset(folder, path, truncation=side, max_prompt_length=24)[1]


@pytest.mark.parametrize(
    "text, images, shown, held",
    [
        ("<image><image>", [picture()], 2, 1),
        ("text", [picture()], 0, 1),
        ("<image>", [], 1, 0),
        ("<image>", None, 1, 0),
    ],
)
def test_a_row_whose_placeholders_and_images_differ_is_refused_at_the_start(folder, written, text, images, shown, held):
    path = written([image_row("<image>", [picture()]), image_row(text, images)])
    with pytest.raises(DataError, match=rf"a.parquet, row 1:.* {shown} <image> placeholders and the row {held} im"):
        image_dataset(folder, path)


def test_messages_of_a_subclass_are_checked_row_by_row(folder, mixed):
    class Forgetful(RLHFDataset):
        def _build_messages(self, example):
            return [{"role": "user", "content": "I forgot the picture."}]

    dataset = Forgetful(mixed, hf_tokenizer(folder), {"max_prompt_length": 64}, hf_processor(folder))
    assert dataset[1]["multi_modal_data"] == {}
    with pytest.raises(DataError, match="row 0: .* 0 <image> placeholders and the row 1 images"):
        dataset[0]


def test_contents_may_be_lists_of_parts(folder, tmp_path):
    parts = [{"type": "text", "text": "Look: "}, {"type": "image", "text": None}]
    rows = [{"prompt": [{"role": "user", "content": parts}], "images": [png(picture())]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    item = image_dataset(folder, str(tmp_path / "a.parquet"))[0]
    assert real_ids(item) == asked(hf_processor(folder), "Look: <image>", [picture()])[1]["input_ids"][0].tolist()


def test_an_image_that_cannot_be_read_is_named_with_its_row(folder, written):
    broken = image_row("<image>", [picture()])
    broken["images"] = [{"bytes": b"no image", "path": None}]
    dataset = image_dataset(folder, written([image_row("<image>", [picture()]), broken]))
    with pytest.raises(DataError, match=r"a.parquet, row 1: an image cannot be read: .*'images', data.image_key"):
        dataset[1]


def test_images_come_as_bytes_paths_and_pictures(tmp_path):
    expected = picture()
    expected.save(tmp_path / "a.png")
    grey = expected.convert("L")
    for form in (png(expected), {"bytes": None, "path": str(tmp_path / "a.png")}, f"file://{tmp_path}/a.png", expected):
        assert process_image(form).tobytes() == expected.tobytes()
    assert process_image(grey).mode == "RGB" and open_image(png(grey)).size == (56, 56)
    for wrong, text in (({"url": "x"}, "neither bytes nor a path"), (3, "is a int"), ("none.png", "cannot be read")):
        with pytest.raises(ValueError, match=text):
            open_image(wrong)


def test_the_workers_can_make_the_tensors_instead(folder, mixed):
    from verl.workers.model_worker import ImageInputs

    lean = image_dataset(folder, mixed, return_multi_modal_inputs=False)
    batch = DataProto.from_single_dict(collate_fn([lean[i] for i in range(len(MIXED))])).repeat(2)
    assert "multi_modal_inputs" not in batch.non_tensor_batch
    filled = ImageInputs(folder).filled(batch).non_tensor_batch["multi_modal_inputs"]
    full = image_dataset(folder, mixed)
    for row, inputs in enumerate(filled):
        expected = full[row // 2]["multi_modal_inputs"]
        assert inputs.keys() == expected.keys() and all(torch.equal(inputs[k], expected[k]) for k in expected)
    pixels = sum(3 * image.width * image.height for _, images in MIXED for image in images)
    tensors = sum(tensor.nbytes for i in range(len(MIXED)) for tensor in full[i]["multi_modal_inputs"].values())
    assert (lean.image_bytes(), full.image_bytes()) == (pixels // len(MIXED), (pixels + tensors) // len(MIXED))
    assert pixels_of({"image": [picture().convert("L")]}) is None


def test_rows_keep_their_images_on_the_way_to_the_workers(folder, mixed):
    import pickle

    dataset = image_dataset(folder, mixed)
    batch = DataProto.from_single_dict(collate_fn([dataset[i] for i in range(len(MIXED))])).repeat(2, interleave=True)
    order = np.random.RandomState(0).permutation(len(batch))
    batch.reorder(order)
    parts = [pickle.loads(pickle.dumps(part, protocol=5)) for part in batch.chunk(2)]
    back = DataProto.concat(parts)
    for row, source in enumerate(order // 2):
        expected, columns = dataset[int(source)], back.non_tensor_batch
        assert columns["raw_prompt_ids"][row] == expected["raw_prompt_ids"]
        for name, tensor in expected["multi_modal_inputs"].items():
            assert torch.equal(columns["multi_modal_inputs"][row][name], tensor)
        images = [image.tobytes() for image in columns["multi_modal_data"][row].get("image", [])]
        assert images == [image.tobytes() for image in expected["multi_modal_data"].get("image", [])]
