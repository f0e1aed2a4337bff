"""Which models can run packed rows, and shared among how many ranks: known by their configs and classes.

What cannot be known that way is found by trying (``verl/workers/engine/model_trial.py``).
"""

from __future__ import annotations

import inspect
from typing import Any

from verl.models.multimodal import is_vision_language

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers, by transformers' names, whose tokens meet in the attention function alone."""

_CARRY_STATE = {
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba"),
    *("mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    *("recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya"),
}
_OWN_ATTENTION = {
    *("bloom", "codegen", "cpmant", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "llama4_text", "mpt"),
    *("nemotron", "prophetnet", "stablelm", "xglm"),
}
_SEE_PACKED = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}
"""Vision-language models whose images change nothing but embeddings and positions of their tokens."""


def check_packable(model: Any, ranks: int = 1) -> None:
    """Refuse a model whose rows would not stay apart, or that ``ranks`` ranks cannot share.

    Raises:
        ValueError: with the reason and the way out.
    """
    config = model.config
    why = _why_not(model, config, config.get_text_config())
    if why:
        raise ValueError(
            f"model.use_remove_padding=true: {type(model).__name__} (model_type={config.model_type!r}) {why}. Set "
            "model.use_remove_padding=false: rows then stand side by side, and their padding costs time alone."
        )
    if ranks > 1:
        _check_shareable(model, config.get_text_config(), ranks)


def _why_not(model: Any, config: Any, text: Any) -> str | None:
    kinds = set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if kinds:
        return f"has layers of the kind {', '.join(sorted(kinds))}, through which rows packed together see each other"
    if text.model_type in _CARRY_STATE:
        return "has layers that carry a state from token to token, through rows packed together too"
    if getattr(text, "attention_chunk_size", None) or getattr(text, "index_topk", None):
        return "attends to chosen parts of a row, which is not built for packed rows"
    if text.model_type in _OWN_ATTENTION or not model._supports_attention_backend:
        return "has an attention of its own, which cannot be told where a row ends"
    if is_vision_language(config) and config.model_type not in _SEE_PACKED:
        return "lets the tokens of an image see each other, or is not known not to"
    takes_more = inspect.signature(type(model.base_model).forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes_more):
        return "takes no further keyword arguments, and so cannot be told where a row ends"
    return None


def _check_shareable(model: Any, text: Any, ranks: int) -> None:
    heads = text.num_attention_heads
    if heads % ranks:
        fits = [size for size in range(2, heads + 1) if heads % size == 0]
        raise ValueError(
            f"ulysses_sequence_parallel_size={ranks}: {type(model).__name__} has num_attention_heads={heads}, which do "
            f"not divide among {ranks} ranks. Use a divisor of {heads} ({', '.join(map(str, fits))}), or 1."
        )
