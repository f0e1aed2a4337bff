"""Rows with images packed and shared among ranks: their tower's features, at several depths, stay with their tokens."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, Qwen3VLConfig

from tests.support.images import MIXED, image_dataset, image_row, make_batch, make_tiny_vl_model
from tests.support.losses import optim_section, ppo_loss
from tests.support.ranks import run_ranks
from verl.models.attention.packed import check_packable
from verl.models.loader import ModelSpec
from verl.utils.tiny_vl_model import VISION_TOKENS
from verl.workers.engine import MicroBatching, Want, build_engine

IDS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory):
    """A tiny Qwen3-VL, whose layers are given features of two depths of its tower, and rows."""
    root = tmp_path_factory.mktemp("qwen3_vl")
    processor = AutoProcessor.from_pretrained(make_tiny_vl_model(root / "other"))
    tokenizer = processor.tokenizer
    size = {"hidden_size": 64, "intermediate_size": 128}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    vision = {"depth": 2, "num_heads": 2, "patch_size": 14, "out_hidden_size": 64, "num_position_embeddings": 64}
    config = Qwen3VLConfig(
        text_config={**size, **heads, "vocab_size": len(tokenizer), "rope_parameters": rope},
        vision_config={**size, **vision, "deepstack_visual_indexes": [0, 1]},
        tie_word_embeddings=False,
        **dict(zip(IDS, tokenizer.convert_tokens_to_ids(list(VISION_TOKENS)), strict=True)),
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.1, generator=draw)
    model.save_pretrained(root / "model")
    processor.save_pretrained(root / "model")
    path = root / "images.parquet"
    pq.write_table(pa.Table.from_pylist([image_row(text, images) for text, images in MIXED]), path)
    return str(root / "model"), make_batch(image_dataset(str(root / "model"), str(path)))


def step(folder, data, strategy="local", sp_size=1, packed=True):
    spec = ModelSpec(folder, compute_dtype="fp32", remove_padding=packed)
    engine = build_engine(strategy, spec, None, optim_section(), total_steps=9, grad_clip=1.0, sp_size=sp_size)
    data = data[engine.topology.dp_rank :: engine.topology.dp_size]
    scores = engine.infer(data, Want.LOG_PROBS, MicroBatching(size=3)).ragged("log_probs").values
    return scores, engine.train_step(data, ppo_loss(), MicroBatching(size=3))["grad_norm"]


def test_features_of_every_depth_reach_their_tokens(qwen3_vl):
    scores, norm = step(*qwen3_vl, packed=False)
    assert scores.std() > 0.1
    found, packed_norm = step(*qwen3_vl)
    torch.testing.assert_close(found, scores, rtol=1e-4, atol=1e-5)
    assert packed_norm == pytest.approx(norm, rel=2e-5)
    for theirs, their_norm in run_ranks(2, step, *qwen3_vl, "fsdp2", 2):
        torch.testing.assert_close(theirs, scores, rtol=1e-4, atol=1e-5)
        assert their_norm == pytest.approx(norm, rel=2e-5)


def test_a_family_whose_images_see_each_others_tokens_is_refused():
    with torch.device("meta"):
        config = AutoConfig.for_model("gemma3")
        config.text_config.num_hidden_layers = config.vision_config.num_hidden_layers = 1
        config.text_config.layer_types = ["full_attention"]
        model = AutoModelForImageTextToText.from_config(config)
    with pytest.raises(ValueError, match="model_type='gemma3'.*tokens of an image attend to each other"):
        check_packable(model)
