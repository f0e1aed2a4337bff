import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import make_tiny_model
from verl.models.loader import ModelSpec, empty_model, layer_class_names, load_config, load_model, source_dtype


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def test_a_language_model_has_the_weights_of_its_folder(folder):
    model = load_model(ModelSpec(folder))
    saved = load_file(f"{folder}/model.safetensors")
    for name, tensor in saved.items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_weights_come_in_the_precision_asked_for(folder):
    assert load_model(ModelSpec(folder, param_dtype="bf16")).dtype is torch.bfloat16
    assert load_model(ModelSpec(folder), dtype=torch.float16).dtype is torch.float16
    assert source_dtype(ModelSpec(folder)) is torch.float32
    assert ModelSpec(folder, param_dtype="float32", compute_dtype=None).computed_in is torch.float32


def test_a_new_value_head_depends_on_the_seed_alone(folder):
    spec = ModelSpec(folder, head="value")
    torch.manual_seed(1)
    one = load_model(spec, seed=3)
    torch.manual_seed(2)
    assert torch.equal(one.score.weight, load_model(spec, seed=3).score.weight)
    assert not torch.equal(one.score.weight, load_model(spec, seed=4).score.weight)
    assert one.score.weight.shape == (1, 64)


def test_loading_leaves_the_random_state_alone(folder):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    load_model(ModelSpec(folder, head="value"), seed=3)
    assert torch.equal(torch.rand(3), expected)


def test_no_dropout_unless_the_user_sets_it(tmp_path):
    folder = make_tiny_model(tmp_path, "gpt2", n_embd=64, n_head=4, n_layer=2, n_positions=512)
    rates = {module.p for module in load_model(ModelSpec(folder)).modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.0}
    kept = load_model(ModelSpec(folder, override_config={"resid_pdrop": 0.2}))
    assert 0.2 in {module.p for module in kept.modules() if isinstance(module, torch.nn.Dropout)}


def test_load_false_gives_random_weights_of_the_configs_shape(folder):
    spec = ModelSpec(folder, load=False, override_config={"num_hidden_layers": 1})
    model = load_model(spec, seed=0)
    assert len(model.model.layers) == 1
    assert not torch.equal(model.model.embed_tokens.weight, load_model(ModelSpec(folder)).model.embed_tokens.weight)


def test_a_misspelt_override_is_pointed_out(folder, caplog):
    with caplog.at_level(logging.WARNING):
        load_config(ModelSpec(folder, override_config={"rope_thetaa": 1.0, "hidden_sise": 3}))
    assert "did you mean 'hidden_size'" in caplog.text


def test_missing_weights_are_an_error(folder, tmp_path):
    make_tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights.*model.layers.1.mlp.up_proj.weight"):
        load_model(ModelSpec(str(tmp_path)))


def test_a_folder_without_a_model_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no model"):
        load_model(ModelSpec(str(tmp_path)))


def test_an_empty_model_has_names_and_no_memory(folder):
    empty, full = empty_model(ModelSpec(folder)), load_model(ModelSpec(folder))
    assert {n: p.shape for n, p in empty.named_parameters()} == {n: p.shape for n, p in full.named_parameters()}
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert layer_class_names(empty) == ["Qwen2DecoderLayer"]


def test_softcapped_attention_is_not_left_to_the_kernel_that_drops_it(tmp_path):
    capped, plain = make_tiny_model(tmp_path / "capped", "gemma2"), make_tiny_model(tmp_path / "plain")
    assert load_model(ModelSpec(capped)).config._attn_implementation == "eager"
    assert load_model(ModelSpec(plain)).config._attn_implementation == "sdpa"
    chosen = ModelSpec(plain, override_config={"attn_implementation": "eager"})
    assert load_model(chosen).config._attn_implementation == "eager"
