"""Rows with videos: read in every form, shown where the prompt says so, as transformers' own processor shows them."""

import builtins
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoProcessor

from tests.support.images import SHOWN, asked, film, image_dataset, make_tiny_vl_model, picture, png, video_row
from verl.data.rl_dataset import DataError, RLHFDataset, collate_fn
from verl.data.vision import Video, process_video
from verl.protocol import DataProto
from verl.utils.tiny_model import make_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_vl_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def written(tmp_path):
    def write(rows):
        path = str(tmp_path / "a.parquet")
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path

    return write


def test_prompts_with_videos_are_what_transformers_makes_of_them(folder, written):
    path = written([video_row(*shown, index=i) for i, shown in enumerate(SHOWN)])
    dataset, processor = image_dataset(folder, path, max_prompt_length=96), AutoProcessor.from_pretrained(folder)
    for number, (text, images, videos) in enumerate(SHOWN):
        row, (rendered, oracle) = dataset[number], asked(processor, text, images, videos)
        assert row["input_ids"][row["attention_mask"].bool()].tolist() == oracle["input_ids"][0].tolist()
        assert row["raw_prompt_ids"] == processor.tokenizer(rendered)["input_ids"]
        expected = {k: v for k, v in oracle.items() if k not in ("input_ids", "attention_mask", "mm_token_type_ids")}
        assert row["multi_modal_inputs"].keys() == expected.keys()
        assert all(torch.equal(row["multi_modal_inputs"][name], expected[name]) for name in expected)
        held = row["multi_modal_data"]
        assert len(held.get("video", ())) == len(videos) and len(held.get("image", ())) == len(images)
    seconds = dataset[3]["multi_modal_inputs"]["second_per_grid_ts"]
    assert seconds.tolist() == [1.0, 1.0] and dataset[0]["multi_modal_inputs"]["second_per_grid_ts"].tolist() == [0.5]


def test_lengths_count_the_tokens_of_videos(folder, written):
    path = written([video_row(*shown) for shown in SHOWN])
    lengths = [int(image_dataset(folder, path, max_prompt_length=96)[i]["attention_mask"].sum()) for i in range(5)]
    limit = sorted(lengths)[2]
    kept = image_dataset(folder, path, max_prompt_length=limit, filter_overlong_prompts=True)
    assert len(kept) == sum(length <= limit for length in lengths) < 5


def test_a_video_is_not_cut(folder, written):
    path = written([video_row(*SHOWN[0])])
    with pytest.raises(DataError, match="row 0: .*part of an image would be cut off"):
        image_dataset(folder, path, max_prompt_length=20, truncation="left")[0]


def test_workers_make_the_same_tensors(folder, written):
    from verl.trainer.ppo.experience import keep_model_inputs
    from verl.workers.model_worker import ImageInputs

    path = written([video_row(*shown) for shown in SHOWN])
    full, lean = (
        image_dataset(folder, path, max_prompt_length=96, return_multi_modal_inputs=made) for made in (True, False)
    )
    batch = DataProto.from_single_dict(collate_fn([lean[i] for i in range(5)]))
    sent = batch.select()
    keep_model_inputs(sent)  # as pixels, once a step
    assert "multi_modal_data" not in sent.non_tensor_batch and "multi_modal_data" in batch.non_tensor_batch
    for rows in (batch, sent):
        for row, inputs in enumerate(ImageInputs(folder).filled(rows).non_tensor_batch["multi_modal_inputs"]):
            expected = full[row]["multi_modal_inputs"]
            assert inputs.keys() == expected.keys() and all(torch.equal(inputs[k], expected[k]) for k in expected)


FRAMES = [picture(seed=1), picture(seed=2)]
FORMS = {
    "pictures": FRAMES,
    "bytes": [png(frame) for frame in FRAMES],
    "frames": {"frames": [png(frame)["bytes"] for frame in FRAMES], "fps": 2.0, "path": None},
    "array": np.stack([np.asarray(frame) for frame in FRAMES]),
    "video": {"video": FRAMES},
    "read": Video(tuple(FRAMES)),
}


@pytest.mark.parametrize("form", FORMS)
def test_videos_come_as_frames_of_many_kinds(form):
    found = process_video(FORMS[form])
    assert [frame.tobytes() for frame in found.frames] == [frame.tobytes() for frame in FRAMES] and found.fps == 2.0


WRONG = {
    "no frames": ([], "has no frames"),
    "sizes": ([picture(28), picture(56)], "have 2 sizes"),
    "number": (3, "a video is a int"),
    "fields": ({"url": "x"}, "with the fields url has no frames"),
    "frame": ([b"nothing"], "a frame of a video: an image cannot be read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_video_is_said(case):
    value, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        process_video(value)


def test_without_its_package_a_video_file_is_refused_with_the_way_out(monkeypatch, tmp_path):
    real = builtins.__import__
    monkeypatch.setattr(
        builtins,
        "__import__",
        lambda name, *a, **k: (_ for _ in ()).throw(ImportError) if name == "av" else real(name, *a, **k),
    )
    with pytest.raises(ValueError, match="without PyAV: pip install av, or write its frames"):
        process_video({"path": str(tmp_path / "a.mp4")})


def test_a_video_file_is_read_at_the_wanted_rate(tmp_path):
    av = pytest.importorskip("av")
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for frame in film(20, 64, 48, 10, 1).frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    for form in (str(path), path.read_bytes(), {"path": f"file://{path}", "bytes": None}):
        found = process_video(form)
        assert (len(found.frames), found.fps, found.frames[0].size) == (4, 2.0, (64, 48))
    assert len(process_video({"video": str(path), "fps": 5.0}).frames) == 10
    assert process_video({"video": str(path), "fps": 5.0, "max_frames": 2}).fps == 1.0
    with pytest.raises(ValueError, match="a video file cannot be read"):
        process_video(io.BytesIO(b"no video").getvalue())


def test_bad_rows_are_named(folder, written):
    one = (2, 28, 28, 2.0, 1)
    with pytest.raises(
        DataError, match="row 1: the prompt has 2 <video> placeholders and the row 1 videos in 'videos'"
    ):
        image_dataset(folder, written([video_row("<video>", [], [one]), video_row("<video><video>", [], [one])]))
    broken = video_row("<video>", [], [one]) | {"videos": [{"frames": [{"bytes": b"x", "path": None}], "fps": 2.0}]}
    dataset = image_dataset(folder, written([video_row("<video>", [], [one]), broken]))
    with pytest.raises(DataError, match=r"a.parquet, row 1: a frame of a video: .*'videos', data.video_key"):
        dataset[1]


def test_a_model_of_text_refuses_videos(written):
    path = written([video_row("<video>", [], [(2, 28, 28, 2.0, 1)]) | {"images": []}])
    with pytest.raises(NotImplementedError, match="row 0 has 'videos' .data.video_key.*does not support videos"):
        RLHFDataset(path, make_tokenizer(), {"max_prompt_length": 64})


def test_without_the_column_the_word_stays_a_word(folder, written):
    row = video_row("Write <video> here.", [], [])
    del row["videos"]
    row = image_dataset(folder, written([row]))[0]
    assert "multi_modal_inputs" in row and row["multi_modal_data"] == {}
