"""Attention of packed rows, registered with transformers by name; no model code is patched.

A model passes its keyword arguments on to every layer, so that a layer gets the boundaries of the rows (``packing``)
and the part of the sequence this rank has (``shard``), in the forward pass and in recomputation. Since no mask goes
by this name, transformers builds none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from verl.models.attention.kernels import AttentionOptions, Packing, attend
from verl.models.attention.sequence_parallel import (
    SequenceShard,
    heads_to_tokens,
    slice_language_model,
    tokens_to_heads,
)
from verl.models.multimodal import is_vision_language

NAME = "verl_packed"
"""Value of the model's ``attn_implementation``."""


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    packing: Packing | None = None,
    shard: SequenceShard | None = None,
    record: Callable[[AttentionOptions], None] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, as transformers calls it; returns (1, T, H, Dv).

    Args:
        query: (1, H, T, D); with ``shard``, of the tokens this rank has. So are (1, Hkv, T, .) ``key`` and ``value``.
        record: where given, is called with the layer's options.
    """
    # vision towers and encoders attend both ways
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    has_own_mask = (
        kwargs.get("position_bias") is not None or attention_mask is not None or query.shape[2] != key.shape[2]
    )
    if packing is None or dropout or not causal or has_own_mask:
        raise ValueError(_unsupported_reason(module, packing, dropout, causal))
    options = AttentionOptions(
        query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap or None, s_aux
    )
    if record is not None:
        record(options)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if shard is None:
        return attend(q, k, v, packing, options)[None], None
    kv_heads, ranks = k.shape[1], shard.size
    if kv_heads % ranks:  # repeat keys and values as often as needed for each rank to get those of its queries
        times = ranks // kv_heads if ranks % kv_heads == 0 else q.shape[1] // kv_heads
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    q, k, v = (tokens_to_heads(x, shard.group) for x in (q, k, v))
    if s_aux is not None:
        options = options._replace(sinks=s_aux.chunk(shard.size)[shard.rank])
    return heads_to_tokens(attend(q, k, v, packing, options), shard.group)[None], None


def _unsupported_reason(module: nn.Module, packing: Packing | None, dropout: float, causal: bool) -> str:
    if packing is None:
        reason = "did not receive the packing of the rows: its model does not pass keyword arguments on to its layers"
    elif dropout:
        reason = f"drops attention weights at a rate of {dropout}, which makes two passes differ: set it to 0"
    elif not causal:
        reason = "is not causal, and packed rows need causal attention"
    else:
        reason = "has a mask, a position bias or a cache of its own, which packed rows cannot have"
    return f"{type(module).__name__} {reason}. Or set model.use_remove_padding=false."


def use_packed_attention(model: Any) -> None:
    """Switch the text layers of ``model`` to this attention; its vision tower keeps its own."""
    from transformers import AttentionInterface

    if NAME not in AttentionInterface():  # compiled layers call another form of it
        AttentionInterface.register(NAME, packed_attention_forward)
    if is_vision_language(model.config):
        model.set_attn_implementation({"text_config": NAME})
        slice_language_model(model)
    else:
        model.set_attn_implementation(NAME)


# -- models that support packed rows and sequence parallelism, by their configs and classes ---------------------------

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""Layer types, by transformers' names, that mix tokens in the attention function only."""

_RECURRENT = {
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba"),
    *("mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    *("recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya"),
}
_OWN_ATTENTION = {
    *("bloom", "codegen", "cpmant", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "llama4_text", "mpt"),
    *("nemotron", "prophetnet", "stablelm", "xglm"),
}
_PACKABLE_VISION_MODELS = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}
"""Vision-language models whose images change only embeddings and positions of their tokens."""


def check_packable(model: Any, ranks: int = 1) -> None:
    """Refuse a model that would mix packed rows, or whose sequences cannot be sharded over ``ranks`` ranks.

    Raises:
        ValueError: with the reason and the option to change.
    """
    config = model.config
    reason = _not_packable_reason(model, config, config.get_text_config())
    if reason:
        raise ValueError(
            f"model.use_remove_padding=true: {type(model).__name__} (model_type={config.model_type!r}) {reason}. Set "
            "model.use_remove_padding=false: rows are then padded, which costs time only."
        )
    if ranks > 1:
        _check_sequence_parallel(model, config.get_text_config(), ranks)


def _not_packable_reason(model: Any, config: Any, text: Any) -> str | None:
    # linear attention, convolutions and Mamba layers carry state over the boundary of a row
    kinds = set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if kinds:
        return f"has layers of type {', '.join(sorted(kinds))}, which mix rows that are packed together"
    if text.model_type in _RECURRENT:
        return "has recurrent layers, which carry a state from one packed row into the next"
    if getattr(text, "attention_chunk_size", None) or getattr(text, "index_topk", None):
        return "has chunked or sparse attention, which is not supported for packed rows"
    if text.model_type in _OWN_ATTENTION or not model._supports_attention_backend:
        return "has its own attention code, which does not support row boundaries"
    if is_vision_language(config) and config.model_type not in _PACKABLE_VISION_MODELS:
        return "may let the tokens of an image attend to each other"
    # row boundaries travel as keyword arguments
    parameters = inspect.signature(type(model.base_model).forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return "takes no further keyword arguments, so row boundaries cannot be passed to its layers"
    return None


def _check_sequence_parallel(model: Any, text: Any, ranks: int) -> None:
    heads = text.num_attention_heads
    if heads % ranks:
        # whole heads are exchanged
        divisors = [size for size in range(2, heads + 1) if heads % size == 0]
        raise ValueError(
            f"ulysses_sequence_parallel_size={ranks}: {type(model).__name__} has num_attention_heads={heads}, which do "
            f"not divide among {ranks} ranks. Use a divisor of {heads} ({', '.join(map(str, divisors))}), or 1."
        )
