"""Rows with videos in the training engines: log-probs of transformers' own forward, gradients that do not depend on the
cut, ranks that hold images, videos, both or nothing."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.models.test_multimodal import a_step, expected_scores, spec
from tests.support.images import SHOWN, image_dataset, make_batch, make_tiny_vl_model, video_row
from tests.support.ranks import run_ranks
from verl.workers.engine import MicroBatching, Want, build_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_vl_model(tmp_path_factory.mktemp("model"), initializer_range=0.1)


@pytest.fixture(scope="module")
def batch(folder, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("data") / "a.parquet")
    pq.write_table(pa.Table.from_pylist([video_row(*shown) for shown in SHOWN]), path)
    return make_batch(image_dataset(folder, path, max_prompt_length=96))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("split", [MicroBatching(size=5), MicroBatching(size=2)], ids=str)
def test_scores_are_those_of_transformers_with_each_row_alone(folder, batch, split, packed):
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    log_probs, entropies = expected_scores(model, batch)
    scored = build_engine("local", spec(folder, remove_padding=packed)).infer(
        batch, Want.LOG_PROBS | Want.ENTROPY, split
    )
    assert (scored.ragged("log_probs").values - log_probs).abs().max() < 1e-5
    assert (scored.ragged("entropy").values - entropies).abs().max() < 1e-4


def test_the_gradient_does_not_depend_on_how_rows_are_cut(folder, batch):
    whole, one_by_one = (a_step("local", spec(folder), batch, cut) for cut in (MicroBatching(), MicroBatching(size=1)))
    assert whole[0] == pytest.approx(one_by_one[0], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("rows", [[slice(0, 1), slice(1, 2)], [slice(2, 3), slice(3, 5)], [slice(0, 4), slice(4, 5)]])
def test_ranks_may_hold_images_videos_or_none(folder, batch, rows):
    """A rank walks through the tower once for images and once for videos, if only with a dummy."""
    data = batch[rows[0].start : rows[1].stop]
    metrics, _, log_probs = a_step("local", spec(folder), data, MicroBatching())
    shares = [slice(part.start - rows[0].start, part.stop - rows[0].start) for part in rows]
    results = run_ranks(2, a_step, "fsdp2", spec(folder), data, MicroBatching(size=2), shares)
    for theirs, _, _ in results:
        assert theirs == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(torch.cat([result[2] for result in results]), log_probs, rtol=1e-3, atol=1e-3)


def test_placeholders_and_videos_must_agree(folder, batch):
    other = batch[torch.arange(len(batch))]
    other.non_tensor_batch["multi_modal_inputs"] = batch.non_tensor_batch["multi_modal_inputs"][::-1].copy()
    with pytest.raises(ValueError, match="row 0 has 0 image tokens and its images have 4 features"):
        build_engine("local", spec(folder)).infer(other, Want.LOG_PROBS, MicroBatching())
