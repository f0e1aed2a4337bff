"""Requests in OpenAI's words: which fields are understood, what they mean for an engine, and errors in their form.

Fields that would change the answer and are not built are refused by name, like fields nobody knows: an agent must not
believe that something was honoured which was not. Knows a tokenizer, no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.messages import refuse_unknown, token_ids

_WHOLE_CONTEXT = 1 << 20  # engines cut it to what their context leaves
_IGNORED = ("user", "store", "metadata", "service_tier")
"""Fields that say nothing about the answer."""
_INERT = {
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none"),
    "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
}
"""Fields that are accepted only where they ask for nothing."""
_NUMBERS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False}
_EXTRA = ("frequency_penalty", "presence_penalty", "logit_bias")
_COMMON = (
    *("model", "max_tokens", "n", "seed", "stop", "stop_token_ids", "stream", "stream_options", "logprobs"),
    *("return_token_ids", *_NUMBERS, *_EXTRA, *_IGNORED, *_INERT),
)
COMPLETION_FIELDS = ("prompt", *_COMMON)
CHAT_FIELDS = ("messages", "max_completion_tokens", "chat_template_kwargs", *_COMMON)


class UnknownModel(ValueError):
    """The request names a model that is not served here."""


@dataclass(frozen=True)
class Wanted:
    """A request, understood."""

    prompts: list[list[int]]
    sampling: SamplingParams
    n: int
    seed: int | None
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool


def understand(body: Any, is_chat: bool, model: str, tokenizer: Any) -> Wanted:
    """Read the body of ``/v1/completions`` or ``/v1/chat/completions``.

    Raises:
        UnknownModel: it names another model.
        ValueError: names the field that is unknown, missing or cannot be honoured.
    """
    if not isinstance(body, Mapping):
        raise ValueError(f"The body is a JSON {type(body).__name__}; it must be an object.")
    refuse_unknown(body, CHAT_FIELDS if is_chat else COMPLETION_FIELDS, "The request")
    if body.get("model") not in (None, model):
        raise UnknownModel(f"model={body['model']!r} is not served here; {model!r} is.")
    for name, inert in _INERT.items():
        if body.get(name) not in inert:
            raise ValueError(f"{name}={body[name]!r} is not supported here. Leave it out.")
    options = body.get("stream_options") or {}
    refuse_unknown(options, ("include_usage",), "stream_options")
    logprobs = body.get("logprobs")
    if logprobs not in (None, False, True) and logprobs != 0:
        raise ValueError(
            f"logprobs={logprobs!r}: alternatives to the drawn tokens are not reported. Use {'true' if is_chat else 0}."
        )
    return Wanted(
        prompts=[_chat_prompt(body, tokenizer)] if is_chat else _prompts(body.get("prompt"), tokenizer),
        sampling=_sampling(body, tokenizer, default_max_tokens=_WHOLE_CONTEXT if is_chat else 16),
        n=_integer(body, "n", 1, at_least=1),
        seed=_integer(body, "seed", None),
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        logprobs=logprobs is True or (logprobs is not None and not is_chat),
        return_token_ids=bool(body.get("return_token_ids")),
    )


def _sampling(body: Mapping[str, Any], tokenizer: Any, default_max_tokens: int) -> SamplingParams:
    longest = _integer(body, "max_tokens", None, at_least=1)
    longest = _integer(body, "max_completion_tokens", longest, at_least=1)
    numbers = {name: default if body.get(name) is None else body[name] for name, default in _NUMBERS.items()}
    for name, value in numbers.items():
        if not isinstance(value, int | float):
            raise ValueError(f"{name}={value!r} must be a number.")
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop={body['stop']!r} must be a text or a list of texts, none of them empty.")
    stop_ids = token_ids(body["stop_token_ids"], "stop_token_ids") if body.get("stop_token_ids") else []
    return SamplingParams(
        max_tokens=default_max_tokens if longest is None else longest,
        stop_token_ids=tuple(dict.fromkeys([tokenizer.eos_token_id, *stop_ids])),
        stop=stop,
        extra={name: body[name] for name in _EXTRA if body.get(name)},
        want_log_probs=True,
        **numbers,
    )


def _integer(body: Mapping[str, Any], name: str, default: int | None, at_least: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or (at_least is not None and value < at_least):
        raise ValueError(f"{name}={value!r} must be an integer{f' of at least {at_least}' if at_least else ''}.")
    return value


def _prompts(prompt: Any, tokenizer: Any) -> list[list[int]]:
    """A text, a list of token ids, or a list of either."""
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, Sequence) or not prompt:
        raise ValueError("prompt must be a text, a list of token ids, or a list of texts or of lists of token ids.")
    if isinstance(prompt[0], int):
        prompt = [prompt]
    found = [tokenizer.encode(one) if isinstance(one, str) else token_ids(one, "prompt") for one in prompt]
    if not all(found):
        raise ValueError("prompt: a text of no tokens cannot be continued.")
    return found


def _chat_prompt(body: Mapping[str, Any], tokenizer: Any) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, Sequence) or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise ValueError('messages must be a list of objects such as {"role": "user", "content": "..."}.')
    plain = [{**message, "content": _text(message.get("content"))} for message in messages]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    try:
        return list(tokenizer.apply_chat_template(plain, **(body.get("chat_template_kwargs") or {}), **options))
    except Exception as error:  # templates raise what they like
        raise ValueError(f"messages: the chat template refused them ({type(error).__name__}: {error}).") from error


def _text(content: Any) -> str:
    """The content of a message: a text, or parts that are all text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise ValueError("messages: content must be a text or a list of parts of the type 'text'.")
