"""Adapters on modules: which layers get one, what they start from, what they leave unchanged, and their files."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.support.families import make_family
from tests.support.tiny_models import make_tiny_model
from verl.models.loader import LoRASpec, ModelSpec, load_model
from verl.models.lora import adapter_layers, adapter_off, merge_adapter, scaled_adapter, write_adapter

IDS = torch.arange(4, 20).view(2, 8)
FAMILIES = {
    "qwen2": {},
    "llama": {"tie_word_embeddings": False},
    "gpt2": {"head_dim": None},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = {}

    def make(family="qwen2"):
        if family not in folders:
            folders[family] = make_tiny_model(tmp_path_factory.mktemp(family), family, **FAMILIES[family])
        return folders[family]

    return make


def adapted(folder, head="lm", **options):
    return load_model(ModelSpec(folder, head, lora=LoRASpec(**{"rank": 4, "alpha": 6.0, **options})), seed=3).eval()


def shifted(model):
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model


def trained(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters() if parameter.requires_grad]


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_adapter_changes_nothing(family, folder_of):
    plain = AutoModelForCausalLM.from_pretrained(folder_of(family), dtype=torch.float32).eval()
    assert torch.equal(logits(adapted(folder_of(family))), logits(plain))


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_compute_what_the_adapter_computes(family, folder_of):
    model = shifted(adapted(folder_of(family)))
    plain = AutoModelForCausalLM.from_pretrained(folder_of(family), dtype=torch.float32).eval()
    before = logits(plain)
    weights = dict(merge_adapter(model, model.state_dict().items()))
    assert weights.keys() == plain.state_dict().keys()
    plain.load_state_dict(weights)
    assert (logits(model) - logits(plain)).abs().max() < 1e-5
    assert (logits(model) - before).abs().max() > 0.01


def test_an_adapter_sent_with_its_scale_in_b_makes_the_same_sum(folder_of):
    model = shifted(adapted(folder_of()))
    parts = dict(scaled_adapter(model, trained(model)))
    whole = dict(merge_adapter(model, model.state_dict().items()))
    for name, layer in adapter_layers(model).items():
        delta = parts[f"{name}.lora_B.weight"] @ parts[f"{name}.lora_A.weight"]
        torch.testing.assert_close(layer.base_layer.weight + delta, whole[f"{name}.weight"])
    assert len(parts) == 2 * len(adapter_layers(model))


def test_switched_off_the_model_is_the_one_below_bit_for_bit(folder_of):
    model = shifted(adapted(folder_of()))
    plain = AutoModelForCausalLM.from_pretrained(folder_of(), dtype=torch.float32).eval()
    with_adapter = logits(model)
    with adapter_off(model):
        assert torch.equal(logits(model), logits(plain))
    assert torch.equal(logits(model), with_adapter) and not torch.equal(with_adapter, logits(plain))
    assert all(parameter.requires_grad for name, parameter in model.named_parameters() if "lora_" in name)


def test_only_adapters_are_trained_and_of_a_critic_the_head(folder_of):
    names = {name.split(".")[-3] for name, _ in trained(adapted(folder_of()))}
    assert names == {"lora_A", "lora_B"}
    critic = {name for name, _ in trained(adapted(folder_of(), "value"))}
    assert {name for name in critic if "lora_" not in name} == {"score.weight", "score.bias"}


def test_the_start_depends_on_the_seed_and_the_layer_alone(folder_of):
    one, other = adapted(folder_of()), adapted(folder_of(), target_modules=("v_proj", "up_proj"))
    ours, theirs = dict(trained(one)), dict(trained(other))
    assert theirs.keys() < ours.keys()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.items())
    first = [tensor for name, tensor in ours.items() if "lora_A" in name and tensor.shape[1] == 64]
    assert all(0.9 / 8 < tensor.abs().max() <= 1 / 8 for tensor in first)  # 1 / sqrt(64)
    assert len({tuple(tensor.flatten().tolist()) for tensor in first}) == len(first)


@pytest.mark.parametrize(
    "target, exclude, expected",
    [
        ("all-linear", None, 14),
        (("q_proj", "v_proj"), None, 4),
        ("q_proj", None, 2),
        (r".*layers\.1\..*", None, 7),
        (("model.layers.0.mlp.up_proj",), None, 1),
        ("all-linear", ("mlp.down_proj",), 12),
        ("all-linear", r".*\.mlp\..*", 8),
    ],
)
def test_targets_are_names_ends_of_names_or_patterns(target, exclude, expected, folder_of):
    model = adapted(folder_of(), target_modules=target, exclude_modules=exclude)
    assert len(adapter_layers(model)) == expected


@pytest.mark.parametrize(
    "options, message",
    [
        ({"target_modules": ("q_prj",)}, "target_modules: 'q_prj' names no linear layer.*q_proj, k_proj, v_proj"),
        ({"target_modules": ("q_proj", "lm_head")}, "'lm_head' names no linear layer"),
        ({"exclude_modules": ("*vision",)}, r"exclude_modules: '\*vision' names no linear layer"),
        ({"exclude_modules": (".*",)}, "leaves no layer to train"),
    ],
)
def test_an_impossible_name_is_an_error_that_lists_the_names_there_are(options, message, folder_of):
    with pytest.raises(ValueError, match=message):
        adapted(folder_of(), **options)


@pytest.mark.parametrize("head, auto", [("lm", AutoModelForCausalLM), ("value", AutoModelForTokenClassification)])
def test_peft_reads_what_is_written(head, auto, folder_of, tmp_path):
    model = shifted(adapted(folder_of(), head))
    write_adapter(model, trained(model), tmp_path, folder_of())
    options = {"num_labels": 1} if head == "value" else {}
    theirs = PeftModel.from_pretrained(auto.from_pretrained(folder_of(), dtype=torch.float32, **options), tmp_path)
    assert (logits(theirs.eval()) - logits(model)).abs().max() < 1e-6
    assert theirs.peft_config["default"].lora_alpha == 6.0


def test_training_goes_on_from_a_written_adapter(folder_of, tmp_path):
    model = shifted(adapted(folder_of()))
    write_adapter(model, trained(model), tmp_path, folder_of())
    again = adapted(folder_of(), adapter_path=str(tmp_path))
    assert torch.equal(logits(again), logits(model))
    assert trained(again)
    for options, message in (
        ({"rank": 8}, r"lora_rank=8 is not that of .*Set model.lora_rank=4"),
        ({"alpha": 16}, "lora_alpha=16"),
        ({"target_modules": ("q_proj",)}, "differ in 24 tensors"),
    ):
        with pytest.raises(ValueError, match=message):
            adapted(folder_of(), adapter_path=str(tmp_path), **options)
    with pytest.raises(ValueError, match="holds no adapter_config.json"):
        adapted(folder_of(), adapter_path=str(tmp_path / "nothing"))


def test_a_written_adapter_is_the_same_file_every_time(folder_of, tmp_path):
    model = adapted(folder_of())
    for name in ("one", "other"):
        write_adapter(model, trained(model), tmp_path / name, folder_of())
    one, other = ((tmp_path / name / "adapter_config.json").read_text() for name in ("one", "other"))
    assert one == other
    assert all(name.startswith("base_model.model.") for name in load_file(tmp_path / "one/adapter_model.safetensors"))


@pytest.mark.parametrize(
    "family, target, why",
    [
        ("mamba", "out_proj", r"'out_proj' names no .*\(.*mixer.out_proj is not called: MambaMixer passes its weight"),
        ("deepseek_v3", "experts.down_proj", r"is many matrices in one tensor, as fused experts are\)\. There are q_"),
        ("phimoe", "router", r"is a PhimoeTopKRouter, which computes more than a matrix product\)\. There are q_proj"),
    ],
)
def test_a_layer_that_an_adapter_cannot_change_is_refused_with_what_there_is_instead(family, target, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        adapted(make_family(tmp_path, family), target_modules=(target,))


def test_a_mixtures_dense_and_shared_layers_get_their_adapters(tmp_path):
    names = adapter_layers(adapted(make_family(tmp_path, "deepseek_v3")))
    assert {"model.layers.0.mlp.gate_proj", "model.layers.1.mlp.shared_experts.up_proj"} <= names.keys()
    assert not any(name.endswith("experts") for name in names)
