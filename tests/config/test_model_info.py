"""What a model's folder says without being opened."""

import json

import pytest

from tests.config.helpers import typed
from verl.config.model_info import count_parameters, model_problems, read_model, tokenizer_size


def write(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 128,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip


FAMILIES = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 32},
    "mistral": {**LLAMA, "model_type": "mistral"},
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 16},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**LLAMA, "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32,
                  "num_experts_per_tok": 2},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_as_the_model_has_them(family, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = read_model(write(tmp_path, **FAMILIES[family]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert count_parameters(facts) == facts.parameters == sum(p.numel() for p in model.parameters())


def test_stored_weights_are_counted_rather_than_guessed(tmp_path):
    header = json.dumps({"a": {"shape": [3, 5]}, "b": {"shape": [7]}, "__metadata__": {"format": "pt"}}).encode()
    path = write(tmp_path, **LLAMA)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert read_model(path).parameters == 22


def test_an_override_counts_as_if_it_stood_in_the_file(tmp_path):
    assert read_model(write(tmp_path, **LLAMA), {"max_position_embeddings": 4096}).context == 4096


def test_an_override_that_is_no_entry_is_refused_before_anything_is_loaded(tmp_path):
    path = write(tmp_path, **{**LLAMA, "max_position_embeddings": 4096})
    config = typed().with_values({"actor_rollout_ref.model.path": path, "critic.model.path": "x/y"})
    for name, words in (("hidden_sise", "mean 'hidden_size'"), ("resid_pdrop", "no entry of LlamaConfig")):
        wrong = config.with_values({"actor_rollout_ref.model.override_config": {name: 0.5}})
        [problem] = model_problems(wrong)
        assert problem.key == "actor_rollout_ref.model.override_config" and words in problem.text
        assert problem.text.startswith(f"actor_rollout_ref.model.override_config.{name}=0.5 is no entry")
    assert not model_problems(config.with_values({"actor_rollout_ref.model.override_config": {"rope_theta": 9.0}}))


def test_what_is_no_model_is_none(tmp_path):
    assert read_model(str(tmp_path)) is None and read_model("Nobody/None") is None
    assert read_model(write(tmp_path, model_type="clip")) is None


def test_the_largest_token_counts_added_ones(tmp_path):
    content = {"model": {"vocab": {"a": 0, "b": 6}}, "added_tokens": [{"id": 9, "content": "<x>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert tokenizer_size(tmp_path) == 10
