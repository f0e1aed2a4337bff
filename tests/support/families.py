"""Tiny models of many families, and what each of them does here: trains padded and packed, generates, takes an adapter.

A verdict is ``right``, ``right: how it was mended``, ``refused: why``, or ``WRONG: what came out``; right means that
log-probs are those of transformers' own model over each row alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.losses import optim_section
from tests.support.tiny_models import join_batch, make_tokenizer
from verl.algorithms.aggregate import PreparedBatch
from verl.models.loader import LoRASpec, ModelSpec
from verl.workers.engine import Engine, Want, build_engine
from verl.workers.rollout.base import Request, SamplingParams
from verl.workers.rollout.hf.rollout import HFRollout
from verl.workers.rollout.weights.sync import sync_weights

SHAPE = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
    **{"num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.15},
}
PROMPTS, RESPONSES = (5, 9, 2), (9, 20, 3)
LONGEST = 64
ROUNDING = 1e-3
"""Largest difference of log-probs, in nats: fp32, 30 tokens, 2 layers."""

_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED = {**_MOE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_MLA = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"v_head_dim": 12, "num_key_value_heads": 4},
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
_GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 2048}
_LINEAR = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
_ROPE = {"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 16, "long_factor": [4.0] * 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**_MOE, "num_local_experts": 4, "num_experts": 4, "num_dense_layers": 1, "sliding_window": 6},
    "apertus": {},
    "arcee": {},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "biogpt": {},
    "bitnet": {},
    "bloom": {},
    "codegen": {**_GPT2, "rotary_dim": 8, "n_ctx": 2048},
    "cohere": {},
    "cohere2": {"sliding_window": 6},
    "cwm": {"bos_token_id": 1, "sliding_window": 6},
    "dbrx": {
        **{"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 2048, "tie_word_embeddings": False},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    },
    "deepseek_v2": {**_SHARED, **_MLA, "first_k_dense_replace": 1},
    "deepseek_v3": {**_SHARED, **_MLA, "first_k_dense_replace": 1},
    "diffllama": {},
    "doge": {"keep_window_size": 2048},
    "dots1": _SHARED,
    "ernie4_5": {},
    "ernie4_5_moe": {**_MOE, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "exaone4": {"sliding_window": 6},
    "falcon": {"new_decoder_architecture": False, "multi_query": True},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "falcon_mamba": {"state_size": 8},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {},
    "gemma2": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {},
    "glm4_moe": {**_SHARED, "first_k_dense_replace": 1},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gpt_neox": {},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 6},
    "gptj": {**_GPT2, "rotary_dim": 8},
    "granite": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        **_MAMBA2,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["mamba", "attention"],
    },
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 16},
    "jamba": {
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama": {},
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 64},
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    "minicpm3": {**_MLA},
    "minimax": {"num_local_experts": 2, "block_size": 8},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ministral": {},
    "mistral": {"sliding_window": 6},
    "mixtral": {"num_local_experts": 4},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 2048, "expansion_ratio": 2},
    "nemotron": {},
    "nemotron_h": {
        **{"hybrid_override_pattern": "M*", "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8},
        **{"mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16},
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 6},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phi3 longrope": {
        "original_max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, **_ROPE},
    },
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2_moe": {**_MOE, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3": {},
    "qwen3_moe": {**_MOE, "num_experts": 4},
    "qwen3_5_text": _LINEAR,
    "qwen3_next": {**_MOE, **_LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {**_SHARED, "first_k_dense_replace": 1},
    "stablelm": {},
    "starcoder2": {"sliding_window": 6},
    "vaultgemma": {"sliding_window": 6},
    "xglm": {"d_model": 64, "attention_heads": 4, "num_layers": 2, "ffn_dim": 128},
    "xlstm": {"num_heads": 4, "chunk_size": 16},
    "zamba2": {
        **{"mamba_d_state": 16, "n_mamba_heads": 8, "mamba_headdim": 16, "chunk_size": 16, "mamba_ngroups": 1},
        **{"layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "attention_hidden_size": 128},
        **{"use_mem_rope": True, "adapter_rank": 8, "attention_head_dim": 32},
    },
}
"""Model type -> entries of its config; nothing but the shared sizes where empty."""


def make_family(folder: str | Path, name: str) -> str:
    """Save a random model of ``FAMILIES[name]`` with sharp predictions, and nothing in its config but its own."""
    import transformers

    kind, text = name.split(" ")[0], make_tokenizer()
    own = type(transformers.AutoConfig.for_model(kind))
    known = own().to_dict().keys() | (getattr(own, "attribute_map", None) or {}).keys()
    ends = {"eos_token_id": text.eos_token_id, "pad_token_id": text.pad_token_id, "bos_token_id": text.eos_token_id}
    shared = {key: value for key, value in SHAPE.items() if key in known}
    config = own(**{"vocab_size": len(text), "tie_word_embeddings": True, **ends, **shared, **FAMILIES[name]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    text.save_pretrained(folder)
    return str(folder)


def judge(folder: str, how: str) -> str:
    """The verdict over the model in ``folder``.

    Args:
        how: one of ``JUDGES``.
    """
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    room = logging.getLogger("verl")
    room.addHandler(handler)
    try:
        found = JUDGES[how](folder)
    except ValueError as error:
        return f"refused: {error}"
    except Exception as error:  # a verdict too: what a user would have seen
        return f"WRONG: {type(error).__name__}: {error}"
    finally:
        room.removeHandler(handler)
    if not found <= ROUNDING:
        return f"WRONG: differs by {found:.1e} nats"
    signs = ("inference mode", "every micro-batch has one row", "with its cache", "leaves out")
    mended = [line for line in dict.fromkeys(lines) if any(sign in line for sign in signs)]
    return "right" + (f": {'; '.join(mended)}" if mended else "")


def _engine(folder: str, **spec: Any) -> Engine:
    spec = ModelSpec(folder, compute_dtype="fp32", gradient_checkpointing=False, max_sequence_length=LONGEST, **spec)
    return build_engine("local", spec, None, optim_section(), total_steps=9, grad_clip=1.0)


def _rows() -> tuple[list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    parts = [[torch.randint(4, 100, (n,), generator=draw) for n in lengths] for lengths in (PROMPTS, RESPONSES)]
    return parts[0], parts[1]


def alone(folder: str, prompt: Tensor, response: Tensor, model: Any = None) -> Tensor:
    """Log-probs of a response by transformers' model itself, over this row alone."""
    import transformers

    if model is None:
        config = transformers.AutoConfig.from_pretrained(folder)
        rope = getattr(config, "rope_parameters", None) or {}
        if "short_factor" in rope:  # a run of longer sequences than the model was trained on knows the long ones only
            config.rope_parameters = {**rope, "short_factor": rope["long_factor"]}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config).eval()
    row = torch.cat([prompt, response])
    with torch.no_grad():
        log_probs = model(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return log_probs.gather(-1, row[1:, None])[-len(response) :, 0]


class _SameAsBefore:
    """A loss that notes how far log-probs of the training pass are from those of inference before it."""

    columns, extra_columns = ("old_log_probs",), ()
    want_entropy, averaged_as_loss = False, None

    def __init__(self) -> None:
        self.apart = 0.0

    def prepare(self, batch: Any, gather: Any) -> PreparedBatch:
        return PreparedBatch(batch)

    def weight(self, columns: Any) -> float:
        return 1.0

    def __call__(self, outputs: Any, columns: Any) -> tuple[Tensor, dict[str, Any]]:
        self.apart = max(self.apart, float((outputs.log_probs.detach() - columns["old_log_probs"].values).abs().max()))
        return outputs.log_probs.sum() * 1e-3, {}


def _trains(folder: str, **spec: Any) -> float:
    engine, (prompts, responses) = _engine(folder, **spec), _rows()
    batch = join_batch(prompts, responses, max(PROMPTS), max(RESPONSES), torch.Generator().manual_seed(0))
    found = engine.infer(batch, Want.LOG_PROBS).ragged("log_probs")
    expected = [alone(folder, *pair) for pair in zip(prompts, responses, strict=True)]
    apart = max(float((one - other).abs().max()) for one, other in zip(found.rows(), expected, strict=True))
    batch.put("old_log_probs", found)
    loss = _SameAsBefore()
    engine.train_step(batch, loss)
    return max(apart, loss.apart)


def _generates(folder: str, lora: LoRASpec | None = None) -> float:
    """Train one step, sync, generate: log-probs of the rollout against those of the engine it got its weights from."""
    engine, (prompts, responses) = _engine(folder, lora=lora), _rows()
    batch = join_batch(prompts, responses, max(PROMPTS), max(RESPONSES), torch.Generator().manual_seed(0))
    engine.train_step(batch, _SameAsBefore())
    limits = {"limit_images": None, "max_num_seqs": 8, "max_num_batched_tokens": 4096, "max_model_len": LONGEST}
    config = {"dtype": "float32", "load_format": "dummy", "prompt_length": 32, "response_length": 32}
    rollout = HFRollout(folder, SimpleNamespace(**limits, **config, gpu_memory_utilization=0.5))
    rollout.wake()
    sync_weights(engine.weights(torch.float32), rollout, version=1)
    sampling = SamplingParams(max_tokens=14, want_log_probs=True, ignore_eos=True)
    # two samples of each prompt, as a group has them
    requests = [Request(tuple(p.tolist()), sampling, seed=i) for i, p in enumerate([*prompts, *prompts])]
    done = rollout.generate(requests, expect_version=1)
    rows = [torch.tensor(completion.token_ids) for completion in done]
    again = join_batch([*prompts, *prompts], rows, max(PROMPTS), 14, torch.Generator().manual_seed(0))
    scored = engine.infer(again, Want.LOG_PROBS).ragged("log_probs").rows()
    return max(
        float((torch.tensor(completion.log_probs) - row).abs().max())
        for completion, row in zip(done, scored, strict=True)
    )


JUDGES: dict[str, Callable[[str], float]] = {
    "padded": _trains,
    "packed": lambda folder: _trains(folder, remove_padding=True),
    "hf": _generates,
    "all-linear": lambda folder: _generates(folder, LoRASpec(4)),
}
"""What is judged -> nats by which log-probs are off. ``hf``: weights synced after a step, then generated."""
