"""Critics and reward models: of any causal family, with the head that is stored, read as the model itself reads it."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, BartConfig, BertConfig, BertForTokenClassification

from tests.support.images import make_tiny_vl_model
from tests.support.losses import optim_section, value_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_batch, make_tiny_model
from verl.checkpoint.checkpoint_manager import CheckpointManager
from verl.models.heads import score_layer, stores_head, value_class
from verl.models.loader import ModelSpec, load_model
from verl.workers.engine import Want, build_engine

GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512}


@pytest.mark.parametrize("family", ["granite", "olmo2", "opt"])
def test_a_family_without_a_token_classifier_gets_one(family, tmp_path):
    make_tiny_model(tmp_path, family)
    saved = load_file(tmp_path / "model.safetensors")
    model = load_model(ModelSpec(str(tmp_path), head="value"))
    body = f"{model.base_model_prefix}."
    own = model.state_dict()
    assert own.keys() - {"score.weight", "score.bias"} == {name for name in saved if name.startswith(body)}
    assert all(torch.equal(own[name], saved[name]) for name in saved if name.startswith(body))
    assert model.score.weight.shape == (1, 64)


def test_a_critic_with_such_a_head_trains_is_exported_and_read_back(tmp_path):
    make_tiny_model(tmp_path / "model", "granite")
    spec = ModelSpec(str(tmp_path / "model"), "value", compute_dtype="fp32")
    engine = build_engine("local", spec, None, optim_section(), total_steps=3, grad_clip=1.0)
    data = make_batch(4)
    first = engine.train_step(data, value_loss())
    assert engine.train_step(data, value_loss())["critic/vf_loss"] < first["critic/vf_loss"]
    CheckpointManager(engine, None, save_contents=["hf_model"]).save(tmp_path / "saved")
    exported = tmp_path / "saved" / "huggingface"
    assert AutoConfig.from_pretrained(exported).architectures == ["GraniteForTokenClassification"]
    assert stores_head(exported)
    again = build_engine("local", ModelSpec(str(exported), "value", compute_dtype="fp32"))
    expected = engine.infer(data, Want.VALUES).ragged("values").values
    torch.testing.assert_close(again.infer(data, Want.VALUES).ragged("values").values, expected)


def values_of(strategy, folder):
    engine = build_engine(strategy, ModelSpec(str(folder), "value", compute_dtype="fp32"), seed=3)
    return engine.infer(make_batch(4), Want.VALUES).ragged("values").values


def test_such_a_head_is_sharded_like_any_weight(tmp_path):
    make_tiny_model(tmp_path, "olmo2")
    expected = values_of("local", tmp_path)
    for theirs in run_ranks(2, values_of, "fsdp2", tmp_path):
        torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family, head", [("qwen2", "sequence"), ("llama", "token"), ("gpt2", "sequence")])
def test_a_critic_starts_from_the_head_of_a_reward_model(family, head, tmp_path):
    make_tiny_model(tmp_path, family, head=head, seed=1, **(GPT2 if family == "gpt2" else {}))
    saved = load_file(tmp_path / "model.safetensors")
    [head] = [tensor for name, tensor in saved.items() if name in ("score.weight", "classifier.weight")]
    model = load_model(ModelSpec(str(tmp_path), head="value"), seed=7)
    assert torch.equal(score_layer(model).weight, head)
    assert stores_head(tmp_path)


def test_a_reward_model_without_its_head_is_refused(tmp_path):
    make_tiny_model(tmp_path, head="sequence")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"holds no weights of its head, \['score.weight'\].*trained reward model"):
        load_model(ModelSpec(str(tmp_path), head="reward"))


def test_a_language_model_stores_no_head_and_a_hub_id_cannot_be_looked_into(tmp_path):
    make_tiny_model(tmp_path)
    assert stores_head(tmp_path) is False and stores_head("some/hub-id") is None


def test_a_model_that_sees_later_tokens_is_no_critic(tmp_path):
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=1
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BertForTokenClassification(config)
        for parameter in model.bert.encoder.parameters():
            parameter.data *= 20  # attention that matters
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="at the 6th token when more tokens follow"):
        build_engine("local", ModelSpec(str(tmp_path), "value", compute_dtype="fp32"))


def test_a_vision_language_model_is_no_critic(tmp_path):
    make_tiny_vl_model(tmp_path)
    with pytest.raises(ValueError, match="is a vision-language model.*without a critic"):
        load_model(ModelSpec(str(tmp_path), head="value"))


def test_an_encoder_with_a_decoder_is_no_critic():
    with pytest.raises(ValueError, match="'bart', to whose body no head can be added"):
        value_class("some/bart", BartConfig())
