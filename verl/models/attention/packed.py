"""The attention of models that run packed rows: registered with transformers by name, no model is changed.

A model hands its keyword arguments down to every layer, so that a layer is told how the rows lie (``packing``) and
which part of the sequence this rank has (``share``), in the forward pass and when it is recomputed. Since no mask goes
by this name, transformers builds none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from verl.models.attention.packing import Packing
from verl.models.attention.sequence_parallel import (
    SequenceShare,
    heads_to_tokens,
    slice_language_model,
    tokens_to_heads,
)
from verl.models.attention.varlen_kernels import Scoring, attend
from verl.models.multimodal import is_vision_language

NAME = "verl_packed"
"""What the model's ``attn_implementation`` is set to."""


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
    share: SequenceShare | None = None,
    note: Callable[[Scoring], None] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, as transformers calls it; returns (1, T, H, Dv).

    Args:
        query: (1, H, T, D); with ``share``, of the tokens this rank has. So are (1, Hkv, T, .) ``key`` and ``value``.
        note: where given, is told what the layer asks for.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    others = kwargs.get("position_bias") is not None or attention_mask is not None or query.shape[2] != key.shape[2]
    if packing is None or dropout or not causal or others:
        raise ValueError(_cannot(module, packing, dropout, causal))
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap or None, s_aux)
    if note is not None:
        note(scoring)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if share is None:
        return attend(q, k, v, packing, scoring)[None], None
    q, k, v = (tokens_to_heads(x, share.group) for x in (q, *_enough_heads(k, v, q.shape[1], share.size)))
    if s_aux is not None:
        scoring = scoring._replace(sinks=s_aux.chunk(share.size)[share.rank])
    return heads_to_tokens(attend(q, k, v, packing, scoring), share.group)[None], None


def _enough_heads(k: Tensor, v: Tensor, heads: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Repeat the heads of keys and values until each rank gets those of its queries, and no further."""
    if k.shape[1] % ranks == 0:
        return k, v
    times = ranks // k.shape[1] if ranks % k.shape[1] == 0 else heads // k.shape[1]
    return k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


def _cannot(module: nn.Module, packing: Packing | None, dropout: float, causal: bool) -> str:
    if packing is None:
        what = "was not told how the rows lie: its model does not hand keyword arguments down"
    elif dropout:
        what = f"drops attention weights at a rate of {dropout}, which makes two passes differ: set it to 0"
    elif not causal:
        what = "looks ahead, and only causal attention runs on packed rows"
    else:
        what = "has a mask, a position bias or a cache of its own, which packed rows cannot have"
    return f"{type(module).__name__} {what}. Or set model.use_remove_padding=false."


def use_packed_attention(model: Any) -> None:
    """Switch the layers of ``model`` that read text to this attention; its vision tower keeps its own."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention_forward)
    if is_vision_language(model.config):
        model.set_attn_implementation({"text_config": NAME})
        slice_language_model(model)
    else:
        model.set_attn_implementation(NAME)


# -- Which models can run packed rows, and shared among how many ranks: known by their configs and classes -----------


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
