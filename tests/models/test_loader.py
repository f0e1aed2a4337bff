import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.images import make_tiny_vl_model
from tests.support.tiny_models import make_tiny_model
from verl.models.loader import LoRASpec, ModelSpec, empty_model, load_config, load_model, source_dtype, stored_model
from verl.utils.exit_codes import ExitCode, exit_code


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
    assert ModelSpec(folder, param_dtype="float32", compute_dtype=None).compute_torch_dtype is torch.float32


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


@pytest.mark.parametrize(
    ("family", "overrides", "words"),
    [
        ("qwen2", {"hidden_sise": 3}, "override_config.hidden_sise=3 is no entry of Qwen2Config.*mean 'hidden_size'"),
        ("qwen2", {"rope_thetaa": 1.0, "zzz": 1}, "rope_thetaa=1.0 is no entry.*zzz=1 is no entry.*Leave it out"),
        ("qwen2", {"classifier_dropout": 0.1}, "classifier_dropout=0.1 is no entry"),
        ("gpt2", {"n_layers": 1}, "n_layers=1 is no entry of GPT2Config.*mean 'n_layer'"),
        ("qwen2", {"moe_config": {"freeze_moe_router": True}}, "moe_config=.*is no entry"),
    ],
)
def test_an_override_that_is_no_entry_of_the_models_config_is_refused(tmp_path, family, overrides, words):
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512} if family == "gpt2" else {}
    spec = ModelSpec(make_tiny_model(tmp_path, family, **sizes), override_config=overrides)
    with pytest.raises(ValueError, match=words):
        load_config(spec)


def test_an_entry_of_a_nested_config_is_named_with_its_place(tmp_path):
    folder = make_tiny_vl_model(tmp_path)
    with pytest.raises(ValueError, match="num_hidden_layers=1 is no entry.*Write it as text_config.num_hidden_layers"):
        load_config(ModelSpec(folder, override_config={"num_hidden_layers": 1}))
    config = load_config(ModelSpec(folder, override_config={"text_config": {"attention_dropout": 0.25}}))
    assert config.text_config.attention_dropout == 0.25


def test_aliases_and_sections_that_ask_for_nothing_are_entries_too(tmp_path, folder):
    gpt2 = make_tiny_model(tmp_path, "gpt2", n_embd=64, n_head=4, n_layer=2, n_positions=512)
    assert load_config(ModelSpec(gpt2, override_config={"num_hidden_layers": 1})).n_layer == 1
    nothing = {"model_config": {}, "moe_config": {"freeze_moe_router": False}}
    load_config(ModelSpec(folder, override_config=nothing))
    critic = ModelSpec(folder, "value", override_config={"classifier_dropout": 0.5})
    assert load_config(critic).classifier_dropout == 0.5


MOVED = {"rope_theta": 77.0}


def test_rotary_entries_of_older_config_files_reach_the_model(tmp_path, folder):
    plain = load_config(ModelSpec(folder)).rope_parameters
    moved = load_config(ModelSpec(folder, override_config={"rope_theta": 77.0}))
    assert moved.rope_parameters == {**plain, "rope_theta": 77.0}
    scaled = load_config(ModelSpec(folder, override_config={"rope_scaling": {"type": "linear", "factor": 2.0}}))
    assert scaled.rope_parameters == {**plain, "rope_type": "linear", "factor": 2.0}
    positions = [load_model(ModelSpec(folder, override_config=o)).model.rotary_emb.inv_freq for o in ({}, MOVED)]
    assert not torch.equal(*positions)
    two_kinds = make_tiny_model(tmp_path, "gemma3_text", sliding_window=6, query_pre_attn_scalar=16)
    before = load_config(ModelSpec(two_kinds)).rope_parameters
    after = load_config(ModelSpec(two_kinds, override_config=MOVED)).rope_parameters
    assert after["full_attention"]["rope_theta"] == 77.0 and after["sliding_attention"] == before["sliding_attention"]


def test_missing_weights_are_an_error(folder, tmp_path):
    make_tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights.*model.layers.1.mlp.up_proj.weight"):
        load_model(ModelSpec(str(tmp_path)))
    with pytest.raises(ValueError, match=r"lacks 1 weights.*model.layers.1.mlp.up_proj.weight"):
        stored_model(ModelSpec(str(tmp_path)))


def test_weights_that_are_not_finite_are_an_error(tmp_path):
    make_tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="model.norm.weight has 1 NaN and 0 infinite of 64 numbers") as caught:
        load_model(ModelSpec(str(tmp_path)))
    assert exit_code(caught.value) is ExitCode.CHECKPOINT


def test_a_folder_without_a_model_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no model"):
        load_model(ModelSpec(str(tmp_path)))


def test_an_empty_model_has_names_and_no_memory(folder):
    empty, full = empty_model(ModelSpec(folder)), load_model(ModelSpec(folder))
    assert {n: p.shape for n, p in empty.named_parameters()} == {n: p.shape for n, p in full.named_parameters()}
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_softcapped_attention_is_not_left_to_the_kernel_that_drops_it(tmp_path):
    capped, plain = make_tiny_model(tmp_path / "capped", "gemma2"), make_tiny_model(tmp_path / "plain")
    assert load_model(ModelSpec(capped)).config._attn_implementation == "eager"
    assert load_model(ModelSpec(plain)).config._attn_implementation == "sdpa"
    chosen = ModelSpec(plain, override_config={"attn_implementation": "eager"})
    assert load_model(chosen).config._attn_implementation == "eager"


STORED = [
    ("qwen2", {}, {"head": "value"}),
    ("qwen2", {"tie_word_embeddings": True}, {"lora": LoRASpec(4), "param_dtype": "bf16"}),
    ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 16}, {}),
]


@pytest.mark.parametrize("family, entries, options", STORED)
def test_rows_of_the_files_are_those_of_the_loaded_model(tmp_path, family, entries, options):
    spec = ModelSpec(make_tiny_model(tmp_path, family, **entries), **options)
    whole = load_model(spec, seed=3)
    load_model(ModelSpec(spec.path)).save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / "model.safetensors").unlink()
    model, files = stored_model(spec, seed=3)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.is_meta == (name in files) and parameter.requires_grad == expected[name].requires_grad
        if name in files:
            middle, end = len(parameter) // 2, len(parameter)
            pieces = [files.rows(name, *ends, parameter.dtype) for ends in ((0, 0), (0, middle), (middle, end))]
            parameter = torch.cat(pieces)
        assert torch.equal(parameter, expected.pop(name)), name
    assert not expected
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers.pop(name), buffer) for name, buffer in whole.named_buffers()) and not buffers
