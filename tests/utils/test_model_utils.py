"""Small leaves: model sizes, precisions, devices, operation counts, the tiny model."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from verl.telemetry.metric import FlopsCounter, get_device_flops
from verl.utils import device
from verl.utils.model import compute_position_id_with_mask, get_model_size, update_model_config
from verl.utils.tiny_model import make_tiny_model, make_tokenizer
from verl.utils.torch_functional import PrecisionType


def test_positions_count_real_tokens():
    mask = torch.tensor([[0, 0, 1, 1, 1, 0]])
    assert compute_position_id_with_mask(mask).tolist() == [[0, 0, 0, 1, 2, 2]]


def test_nested_config_entries_can_be_overridden():
    inner = SimpleNamespace(size=1)
    config = SimpleNamespace(inner=inner, name="a")
    update_model_config(config, {"inner": {"size": 2}, "name": "b"})
    assert inner.size == 2 and config.inner is inner and config.name == "b"


def test_model_size_finds_its_unit():
    assert get_model_size(torch.nn.Linear(999, 2)) == (2.0, "K")
    with pytest.raises(ValueError, match="scale='X'"):
        get_model_size(torch.nn.Linear(1, 1), "X")


@pytest.mark.parametrize("name", ["bf16", "bfloat16", torch.bfloat16, "torch.bfloat16"])
def test_precisions_have_many_names_and_one_dtype(name):
    assert PrecisionType.to_dtype(name) is torch.bfloat16 and PrecisionType.is_bf16(name)


def test_an_unknown_precision_names_the_known_ones():
    assert PrecisionType.to_str(torch.float16) == "fp16"
    with pytest.raises(ValueError, match="use one of fp32, bf16"):
        PrecisionType.to_dtype("int3")


def test_a_forced_device_is_checked(monkeypatch):
    monkeypatch.setenv("VERL_FORCE_DEVICE", "cpu")
    assert device.get_device_name() == "cpu" and device.get_nccl_backend() == "gloo" and device.get_device_id() == 0
    assert device.get_torch_device() is torch.cpu
    monkeypatch.setenv("VERL_FORCE_DEVICE", "abacus")
    with pytest.raises(ValueError, match="choose 'cpu' or 'cuda'"):
        device.get_device_name()


def test_operations_of_one_token_are_six_a_weight(tmp_path):
    config = AutoConfig.for_model("llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=100,
                                  num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert FlopsCounter(config).flops_per_token() == 6 * matrices
    achieved, _ = FlopsCounter(config).estimate_flops([10, 20], delta_time=2.0)
    assert achieved == pytest.approx((6 * matrices * 30 + 12 * 2 * 64 * 500) / 2e12)


def test_an_unknown_device_promises_infinitely_much(monkeypatch):
    monkeypatch.setenv("VERL_FORCE_DEVICE", "cpu")
    assert get_device_flops() == float("inf")


@pytest.mark.parametrize("kind, size", [("char", 100), ("byte", 260)])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_the_tiny_model_opens_with_transformers(tmp_path, kind, size, family):
    folder = make_tiny_model(tmp_path, family, tokenizer=kind)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert len(tokenizer) == size == model.config.vocab_size
    assert tokenizer.pad_token_id != tokenizer.eos_token_id == model.generation_config.eos_token_id
    chat = [{"role": "user", "content": "What is 3 + 5?\n Say it  twice."}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text == "<|im_start|>user\nWhat is 3 + 5?\n Say it  twice.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=True) == ""


def test_digits_are_a_tenth_of_the_character_vocabulary():
    tokenizer = make_tokenizer()
    assert sum(tokenizer.decode([token]).isdigit() for token in range(len(tokenizer))) == 10


def test_the_seed_decides_the_weights(tmp_path):
    weights = []
    for seed in (0, 0, 1):
        folder = make_tiny_model(tmp_path / str(len(weights)), seed=seed)
        weights.append(AutoModelForCausalLM.from_pretrained(folder).model.embed_tokens.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
