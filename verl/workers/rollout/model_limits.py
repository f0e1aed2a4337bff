"""What a model's folder says about generation: how long a sequence may be, what ends it, what a cached token costs."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import GenerationConfig

logger = logging.getLogger(__name__)


def longest_sequence(config: Any, model_config: Any) -> int:
    """Tokens a prompt and its response may have together.

    Args:
        config: ``actor_rollout_ref.rollout``.
        model_config: the model's Hugging Face config.

    Raises:
        ValueError: more than the model's context was asked for.
    """
    context = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    named = config.max_model_len
    wanted = named or config.prompt_length + config.response_length
    if context is not None and wanted > context:
        key = "rollout.max_model_len" if named else "data.max_prompt_length + data.max_response_length"
        raise ValueError(
            f"{key}={wanted} is more than the model's context of {context} tokens. Lower it, or raise "
            "model.override_config.max_position_embeddings if the model can do more."
        )
    return wanted


def check_prompt(length: int, max_model_len: int) -> None:
    """Refuse a prompt that leaves no room for a response."""
    if not 0 < length < max_model_len:
        raise ValueError(
            f"A prompt of {length} tokens does not fit: it must have at least one and leave room "
            f"for one more within max_model_len={max_model_len}. Check data.max_prompt_length, "
            "data.filter_overlong_prompts and rollout.max_model_len."
        )


def stop_tokens(folder: str, model_config: Any) -> set[int]:
    """End-of-sequence tokens of the folder's generation config, or of its model config."""
    try:
        found = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        found = None
    if found is None:
        found = getattr(model_config.get_text_config(decoder=True), "eos_token_id", None)
    if found is None:
        logger.warning("%s names no end-of-sequence token: responses end at stop_token_ids or max_tokens.", folder)
        return set()
    return {found} if isinstance(found, int) else set(found)


def cached_bytes_per_token(model_config: Any, dtype: torch.dtype) -> int:
    """Bytes that keys and values of one token take in all layers."""
    text = model_config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    if not heads:  # a state of fixed size in place of keys and values: as much as the hidden states, not to be nothing
        return 2 * text.num_hidden_layers * text.hidden_size * dtype.itemsize
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * size * dtype.itemsize
