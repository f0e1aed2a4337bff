"""One prompt on its way from the messages of a row to token ids: rendered, tokenized, cut, padded.

Knows tokenizers and chat templates; no rows and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import torch

from verl.utils.dataset.table import DataError
from verl.utils.dataset.vision_utils import EncodedPrompt, ImagePrompts, with_image_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = list[dict[str, Any]] | str


def as_messages(prompt: Any, tokenizer: PreTrainedTokenizerBase, kinds: Sequence[str]) -> Prompt | None:
    """A prompt ready for the chat template: a text becomes a user message, unless there is no template.

    Args:
        kinds: ``image``, ``video``: of what placeholders become parts of their own.

    Returns:
        None where it is neither a text nor a non-empty list.
    """
    if isinstance(prompt, str):
        if not tokenizer.chat_template:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, (list, tuple, np.ndarray)) or not len(prompt):
        return None
    # Parquet gives every message of a column the same fields: those a message does not use are null.
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    return with_image_parts(messages, kinds) if kinds else messages


def render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, prompt_key: str, arguments: Mapping[str, Any]) -> str:
    """The text that the chat template makes of messages; a text is one already.

    Args:
        prompt_key: the column of the prompts, for a message.
        arguments: of the template.

    Raises:
        DataError: the tokenizer has no template.
        jinja2.TemplateError: the template refuses the messages.
    """
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise DataError(
            f"data.prompt_key={prompt_key!r} holds chat messages but the tokenizer "
            f"{tokenizer.name_or_path!r} has no chat template. Use an instruct model, set "
            "actor_rollout_ref.model.custom_chat_template, or write plain text into the column."
        )
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **arguments)


def refusal(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, error: jinja2.TemplateError) -> str:
    """What to say of messages that the chat template refuses."""
    return (
        f"the chat template of {tokenizer.name_or_path!r} refuses the messages with the roles "
        f"{', '.join(str(message.get('role')) for message in prompt)}: {error}"
    )


def encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids. A chat template writes its own special tokens; for plain text the tokenizer adds them."""
    special = not tokenizer.chat_template
    return tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]


def encode_many(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """:func:`encode` for many texts, past the wrapper's bookkeeping where that provably gives the same ids."""
    if not texts:
        return []
    first = encode(texts[:1], tokenizer)  # also resets truncation and padding left behind by earlier calls
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast"):
        return first + (encode(texts[1:], tokenizer) if len(texts) > 1 else [])
    special = not tokenizer.chat_template
    ids = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)]
    return ids if ids[0] == first[0] else encode(texts, tokenizer)


def said(prompt: Prompt) -> str:
    """What the messages of a prompt say, without who says it."""
    if isinstance(prompt, str):
        return prompt
    contents = (message.get("content") or "" for message in prompt)
    texts = (c if isinstance(c, str) else "".join(part.get("text") or "" for part in c) for c in contents)
    return "\n".join(texts)


def truncate(ids: list[int], max_length: int, side: str) -> list[int]:
    """Cut token ids to ``max_length``: ``left`` keeps the end, ``right`` the start, ``middle`` half of each."""
    if len(ids) <= max_length:
        return ids
    if side == "left":
        return ids[-max_length:]
    if side == "right":
        return ids[:max_length]
    if side == "middle":
        head = max_length // 2
        return ids[:head] + ids[len(ids) - (max_length - head) :]
    raise ValueError(f"data.truncation={side!r} is not a way to truncate: use 'error', 'left', 'right' or 'middle'.")


def fitted(
    prompt: EncodedPrompt, limit: int, truncation: str, shown: ImagePrompts | None, where: Callable[[], str]
) -> EncodedPrompt:
    """The prompt, cut to ``limit`` tokens as ``data.truncation`` says; an image is never cut.

    Args:
        where: names the row, for a message.

    Raises:
        DataError: it is longer, and may or can not be cut.
    """
    length = len(prompt.ids)
    if length <= limit:
        return prompt
    if truncation == "error":
        raise DataError(
            f"{where()}: the prompt has {length} tokens, more than data.max_prompt_length={limit}. Raise it, or set "
            "data.filter_overlong_prompts=True to leave such rows out, or data.truncation to left, right or middle to "
            "cut them."
        )
    if not prompt.inputs:
        ids = truncate(prompt.ids, limit, truncation)
        return EncodedPrompt(ids, ids, {})
    try:
        return shown.truncate(prompt, truncate(list(range(length)), limit, truncation))
    except ValueError as error:
        raise DataError(
            f"{where()}: data.truncation={truncation} cannot cut this prompt of {length} tokens to "
            f"data.max_prompt_length={limit}: {error}. Raise the length, set data.filter_overlong_prompts=True, or "
            "give smaller images."
        ) from error


def left_padded(ids: list[int], width: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, torch.Tensor]:
    """``input_ids``, ``attention_mask`` and ``position_ids`` of one prompt, (width,) int64 each."""
    start = width - len(ids)
    pad = tokenizer.pad_token_id
    columns = torch.zeros(3, width, dtype=torch.int64)
    columns[0, :start] = tokenizer.eos_token_id if pad is None else pad
    columns[0, start:] = torch.tensor(ids, dtype=torch.int64)
    columns[1, start:] = 1
    columns[2, start:] = torch.arange(len(ids))
    return dict(zip(("input_ids", "attention_mask", "position_ids"), columns, strict=True))
