"""Families of models give packed the logits and gradients they give padded, or are refused by name."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.losses import optim_section, ppo_loss
from tests.support.tiny_models import make_batch, make_tiny_model
from verl.models.attention.kernels import Packing
from verl.models.attention.packed import NAME, check_packable, use_packed_attention
from verl.models.attention.sequence_parallel import SequenceShard
from verl.models.loader import ModelSpec, load_config, load_model
from verl.workers.engine import MicroBatching, Want, build_engine

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "cohere2": {"sliding_window": 6},
    "deepseek_v3": {
        **EXPERTS,
        **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 8, "qk_nope_head_dim": 8},
        **{"qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        "first_k_dense_replace": 1,
    },
    "exaone4": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6},
    "glm4": {},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2},
    "gpt_neox": {},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 6},
    "granite": {},
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "phi3": {},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "smollm3": {},
    "starcoder2": {"sliding_window": 6},
}
LENGTHS = (9, 1, 14, 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_packed_what_it_gives_padded(family, tmp_path):
    folder = make_tiny_model(tmp_path, family, initializer_range=0.15, **FAMILIES[family])
    model = load_model(ModelSpec(folder, gradient_checkpointing=False))
    rows = [torch.randint(4, 100, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    expected, gradients = logits_and_gradients(model, real, input_ids=padded)
    check_packable(model)
    use_packed_attention(model)
    ids, positions = torch.cat(rows)[None], torch.cat([torch.arange(length) for length in LENGTHS])[None]
    inputs = {"input_ids": ids, "position_ids": positions, "packing": Packing.of_lengths(LENGTHS)}
    found, packed_gradients = logits_and_gradients(model, torch.ones_like(ids).bool(), **inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    for one, other in zip(packed_gradients, gradients, strict=True):
        assert (one - other).abs().max() <= 2e-5 * largest


def logits_and_gradients(model, real, **inputs):
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits[real]
    pull = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    (logits * pull).sum().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ["gemma2", "qwen2"])
def test_the_name_does_not_reach_saved_configs(family, tmp_path):
    model = load_model(ModelSpec(make_tiny_model(tmp_path, family)))
    use_packed_attention(model)
    assert model.config._attn_implementation == NAME
    model.config.save_pretrained(tmp_path / "saved")
    assert NAME not in (tmp_path / "saved" / "config.json").read_text()


# -- refusals -----------------------------------------------------------------------------------------------------

SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
REFUSED = {
    "bamba": ({"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]}, "linear_attention"),
    "bloom": ({}, "its own attention code"),
    "falcon_h1": ({"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}, "layers of type hybrid"),
    "granitemoehybrid": (
        {"num_local_experts": 2, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16},
        "linear_attention",
    ),
    "jamba": ({"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}, "linear_attention"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    "llama4_text": ({"num_local_experts": 2}, "chunked_attention"),
    "mamba": ({}, "linear_attention"),
    "minimax": ({"num_local_experts": 2}, "linear_attention"),
    "nemotron": ({"num_key_value_heads": 2}, "its own attention code"),
    "qwen3_5_text": ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    "qwen3_next": ({"num_experts": 4, "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    "stablelm": ({}, "its own attention code"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_mixes_positions_otherwise_is_refused_by_name(family):
    changes, why = REFUSED[family]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SMALL, **changes}))
    with pytest.raises(ValueError, match=f"model_type='{family}'.*{why}.*Set model.use_remove_padding=false"):
        check_packable(model)


def test_ranks_that_cannot_share_a_model_are_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
    check_packable(model, 2)
    why = r"num_attention_heads=4, which do not divide among 3 ranks. Use a divisor of 4 \(2, 4\)"
    with pytest.raises(ValueError, match=why):
        check_packable(model, 3)


def engine_for(folder, **spec):
    spec = ModelSpec(folder, compute_dtype="fp32", remove_padding=True, **spec)
    return build_engine("local", spec, None, optim_section(), total_steps=9, grad_clip=1.0)


@pytest.mark.parametrize(
    "family, changes, why",
    [
        ("minimax", {"num_local_experts": 2, "block_size": 8}, "does not score rows packed together as it scores each"),
        ("bloom", {}, "does not pass its rows' lengths"),
        ("stablelm", {}, "did not receive the packing of the rows"),
    ],
)
def test_a_model_of_no_known_name_is_found_out_by_trying(family, changes, why, tmp_path, monkeypatch):
    monkeypatch.setattr("verl.workers.engine.engine.check_packable", lambda model, ranks: None)
    with pytest.raises(ValueError, match=f"(?s){why}.*model.use_remove_padding=false"):
        engine_for(make_tiny_model(tmp_path, family, **changes))


@pytest.mark.parametrize(
    "family, changes, lost",
    [("mistral", {"sliding_window": 64}, "sliding_window"), ("gemma2", {}, "attn_logit_softcapping")],
)
def test_a_window_or_cap_that_does_not_reach_the_attention_is_found_out(family, changes, lost, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "verl.models.attention.packed.AttentionOptions", lambda scale, window, softcap, sinks: _Plain(scale)
    )
    monkeypatch.setattr("verl.workers.engine.model_check._check_rows_independent", lambda *args: None)
    with pytest.raises(ValueError, match=f"does not pass its {lost}="):
        engine_for(make_tiny_model(tmp_path, family, **changes))


class _Plain:
    window = softcap = sinks = None

    def __init__(self, scale):
        self.scale = scale


def test_dropout_in_attention_is_refused(tmp_path):
    engine = engine_for(make_tiny_model(tmp_path), override_config={"attention_dropout": 0.1})
    with pytest.raises(ValueError, match=r"Qwen2Attention drops attention weights at a rate of 0.1.*set it to 0"):
        engine.train_step(make_batch(2), ppo_loss(), MicroBatching(size=2))
    engine.infer(make_batch(2), Want.LOG_PROBS)


def test_router_logits_that_no_loss_would_read_are_refused(tmp_path):
    folder = make_tiny_model(tmp_path, "qwen3_moe", num_experts=4, **EXPERTS)
    with pytest.raises(ValueError, match="output_router_logits=true: the auxiliary loss"):
        load_config(ModelSpec(folder, override_config={"output_router_logits": True}))


# -- shares of a sequence -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shares_hold_every_cell_once_and_join_in_order(size):
    positions = torch.tensor([3, 4, 5, 5, 5, 11, 7, 0])  # of shared prompts: some repeat, out of order
    shares = [SequenceShard.of(positions, 12, None, rank, size) for rank in range(size)]
    tokens = torch.arange(12)
    seen = [shard.slice_of(tokens)[shard.positions] for shard in shares]
    assert [len(part) for part in seen] == list(shares[0].counts)
    assert all(torch.equal(part, positions[shard.local_index]) for part, shard in zip(seen, shares, strict=True))
    assert all(torch.equal(torch.cat(seen)[shard.gather_index], positions) for shard in shares)
