"""OpenAI's protocol as JSON: requests of completions and chat completions, answers, tool calls, errors.

Knows no server, no engine and no tokenizer.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.utils.py_functional import excerpt
from verl.workers.rollout.base import PromptLogProbs
from verl.workers.rollout.server.messages import refuse_unknown, token_ids

# -- Requests --------------------------------------------------------------------------------------------------------

MOST_CHOICES = 128
"""Largest ``n`` of a request."""
MOST_RESPONSES = 1024
"""Responses that one request may ask for: its prompts times its ``n``."""

_IGNORED = ("user", "store", "metadata", "service_tier")
"""Fields that say nothing about the answer."""
_DEFAULT_ONLY = {
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "top_logprobs": (None, 0),
}
"""Fields that are accepted only where they ask for nothing."""
_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos")
_EXTRA = ("frequency_penalty", "presence_penalty", "logit_bias")
_COMMON = (
    *("model", "max_tokens", "n", "seed", "stop", "stop_token_ids", "stream", "stream_options", "logprobs"),
    *("return_token_ids", *_NUMBERS, *_EXTRA, *_IGNORED, *_DEFAULT_ONLY),
)
COMPLETION_FIELDS = ("prompt", "prompt_logprobs", *_COMMON)
MOST_TOP_TOKENS = 1024
"""Most likeliest tokens of each place of a prompt that a request may ask for."""
CHAT_FIELDS = (
    *("messages", "max_completion_tokens", "chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls"),
    *_COMMON,
)


class UnknownModel(ValueError):
    """The request names a model that is not served here."""


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request of one of the two routes."""

    prompt: Any = None
    """``prompt`` of a completion, as it was sent."""
    messages: Sequence[dict[str, Any]] = ()
    """Messages of a chat, as `plain_messages` makes them."""
    tools: Sequence[Mapping[str, Any]] = ()
    reads_tool_calls: bool = False
    """Whether the answer is searched for tool calls: there are tools, and ``tool_choice`` is not ``none``."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `verl.workers.rollout.base.SamplingParams` that the request gives."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False


def parse_request(body: Any, is_chat: bool, model: str, allows_template: bool = False) -> ParsedRequest:
    """Read the body of ``/v1/completions`` or ``/v1/chat/completions``.

    Args:
        allows_template: let it bring a chat template.

    Raises:
        UnknownModel: it names another model.
        ValueError: names the field that is unknown, missing or cannot be honoured.
    """
    if not isinstance(body, Mapping):
        raise ValueError(f"The body is a JSON {type(body).__name__}; it must be an object.")
    refuse_unknown(body, CHAT_FIELDS if is_chat else COMPLETION_FIELDS, "The request")
    if body.get("model") not in (None, model):
        raise UnknownModel(f"model={body['model']!r} is not served here; {model!r} is.")
    for name, inert in _DEFAULT_ONLY.items():
        if body.get(name) not in inert:
            raise ValueError(f"{name}={body[name]!r} is not supported here. Leave it out.")
    options = body.get("stream_options") or {}
    refuse_unknown(options, ("include_usage",), "stream_options")
    logprobs = body.get("logprobs")
    if logprobs not in (None, False, True) and logprobs != 0:
        raise ValueError(
            f"logprobs={logprobs!r}: alternatives to sampled tokens are not reported. Use {'true' if is_chat else 0}."
        )
    if body.get("stream") and body.get("prompt_logprobs") is not None:
        raise ValueError("prompt_logprobs come with the whole answer: leave out stream.")
    tools, reads_tool_calls = _tools(body)
    return ParsedRequest(
        prompt=body.get("prompt"),
        messages=plain_messages(body.get("messages")) if is_chat else (),
        tools=tools,
        reads_tool_calls=reads_tool_calls,
        sampling=_sampling(body),
        template_options=template_options(body.get("chat_template_kwargs"), allows_template),
        n=_integer(body, "n", 1, at_least=1, at_most=MOST_CHOICES) or 1,
        seed=_integer(body, "seed", None),
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        logprobs=logprobs is True or (logprobs is not None and not is_chat),
        return_token_ids=bool(body.get("return_token_ids")),
    )


def _tools(body: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], bool]:
    """Return the tools, and whether the model may call them.

    Raises:
        ValueError: a tool is no function with a name, or the choice cannot be honoured.
    """
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if not isinstance(tools, Sequence):
        raise ValueError(f"tools={tools!r} must be a list of functions.")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(
                f"tools[{place}]={tool!r} must be an object such as "
                '{"type": "function", "function": {"name": "...", "parameters": {...}}}.'
            )
        if tool.get("type", "function") != "function":
            raise ValueError(f"tools[{place}].type={tool['type']!r} is not supported here; 'function' is.")
    if choice not in (None, "none", "auto"):
        raise ValueError(
            f"tool_choice={choice!r} cannot be honoured: what the model writes is not constrained. Use 'auto' (the "
            "model decides) or 'none' (its text is not searched for calls), and look at the answer's tool_calls."
        )
    if tools and body.get("parallel_tool_calls") is False:
        raise ValueError(
            "parallel_tool_calls=false cannot be honoured: the model may write several calls. Leave it out, and answer "
            "each call of a turn."
        )
    return list(tools), bool(tools) and choice != "none"


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that the request gives."""
    numbers: dict[str, Any] = {name: body[name] for name in _NUMBERS if body.get(name) is not None}
    for name, value in numbers.items():
        if not isinstance(value, int | float):
            raise ValueError(f"{name}={value!r} must be a number.")
    longest = _integer(body, "max_tokens", None, at_least=1)
    longest = _integer(body, "max_completion_tokens", longest, at_least=1)
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop={body['stop']!r} must be a text or a list of texts, none of them empty.")
    given: dict[str, Any] = {"stop": stop} if stop else {}
    scored = _integer(body, "prompt_logprobs", None, at_most=MOST_TOP_TOKENS)
    if scored is not None:
        given["prompt_log_probs"] = scored
    if body.get("stop_token_ids"):
        given["stop_token_ids"] = tuple(token_ids(body["stop_token_ids"], "stop_token_ids"))
    if extra := {name: body[name] for name in _EXTRA if body.get(name)}:
        given["extra"] = extra
    if longest is not None:
        given["max_tokens"] = longest
    return given | numbers


def _integer(
    body: Mapping[str, Any], name: str, default: int | None, at_least: int | None = None, at_most: int | None = None
) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or (at_least is not None and value < at_least):
        raise ValueError(f"{name}={value!r} must be an integer{f' of at least {at_least}' if at_least else ''}.")
    if at_most is not None and value > at_most:
        raise ValueError(f"{name}={value} is more than the {at_most} that one request may ask for. Send several.")
    return value


def template_options(given: Any, allows_template: bool = False) -> dict[str, Any]:
    """``chat_template_kwargs`` of a request: named values that the model's own chat template may read.

    Args:
        allows_template: let a client send a template. It is a program: one with nested loops runs for ever.

    Raises:
        ValueError: it is no such object, brings a template, or decides what the server does.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(
            f'chat_template_kwargs={excerpt(given, 60)} must be an object such as {{"enable_thinking": false}}.'
        )
    for name, value in (given or {}).items():
        if name == "chat_template" and allows_template:
            continue
        if name == "chat_template":
            raise ValueError(
                "chat_template_kwargs.chat_template: templates of clients are not run. Set "
                "actor_rollout_ref.model.custom_chat_template for the run, or send token ids to /v1/completions."
            )
        if name in _DECIDED_HERE:
            raise ValueError(f"chat_template_kwargs.{name} is decided by the server. Leave it out.")
        if value is not None and not isinstance(value, str | bool | int | float):
            raise ValueError(
                f"chat_template_kwargs.{name}={excerpt(value, 60)} must be a text, a number, true or false."
            )
    return dict(given or {})


_DECIDED_HERE = (
    "conversation", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)  # fmt: skip
"""Arguments of transformers' ``apply_chat_template``."""


def check_responses(num_prompts: int, n: int) -> None:
    """Raise ValueError if a request asks for more responses than `MOST_RESPONSES`."""
    if num_prompts * n > MOST_RESPONSES:
        raise ValueError(
            f"{num_prompts} prompts with n={n} are {num_prompts * n} responses; one request may ask for "
            f"{MOST_RESPONSES}. Send several."
        )


# -- Messages --------------------------------------------------------------------------------------------------------


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: content is text, arguments of tool calls are objects.

    Keys without a value are left out.

    Raises:
        ValueError: they are none, or hold what a template has no text for, such as an image.
    """
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not messages or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError('messages must be a list of objects such as {"role": "user", "content": "..."}.')
    return [_plain_message(place, message) for place, message in enumerate(messages)]


def _plain_message(place: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{place}].role={message.get('role')!r} must be a text such as 'user'.")
    plain = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    plain["content"] = _text(message.get("content"))
    calls = message.get("tool_calls") or ()
    if calls:
        plain["tool_calls"] = [_plain_call(place, call) for call in calls]
    return plain


def _plain_call(place: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"messages[{place}].tool_calls: {call!r} must be an object such as "
            '{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{...}"}}.'
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            # as an object: templates write it as JSON themselves, and would quote a text
            parsed = json.loads(arguments)
            arguments = parsed if isinstance(parsed, Mapping) else arguments
        except ValueError:
            pass  # the model's broken arguments, as it wrote them
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _text(content: Any) -> str:
    """Return the content of a message: a text, or parts that are all text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise ValueError("messages: content must be a text or a list of parts of the type 'text'.")


# -- Answers ---------------------------------------------------------------------------------------------------------


def new_id(kind: str) -> str:
    """Return the id of an answer or a tool call: ``kind``, a dash or underscore, a random number."""
    return f"{kind}{'_' if kind == 'call' else '-'}{uuid.uuid4().hex}"


def named_calls(content: str, calls: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return an answer's text and its calls, less those that name no tool: an agent reads them as text."""
    nameless = [call.raw for call in calls if not call.name]
    return "\n".join(filter(None, [content, *nameless])), [call for call in calls if call.name]


def tool_calls_json(calls: Sequence[Any]) -> list[dict[str, Any]]:
    """Return tool calls in OpenAI's form.

    Args:
        calls: with ``name``, ``arguments`` (None: they are no JSON object) and ``raw``, the text of the call.
    """
    return [
        {
            "id": getattr(call, "id", "") or new_id("call"),
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": call.raw if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False),
            },
        }
        for call in calls
    ]


def assistant_message(content: str, calls: Sequence[Mapping[str, Any]] = (), is_chunk: bool = False) -> dict[str, Any]:
    """Return the message (or the delta of a stream) of an answer; ``calls`` as of `tool_calls_json`."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)] if is_chunk else list(calls)
    return message


def prompt_logprobs(
    prompt: Sequence[int], scored: PromptLogProbs, decode: Callable[[int], str]
) -> list[dict[str, Any] | None]:
    """Return a prompt's log-probs as vLLM's servers give them: of each token but the first {id: {logprob, rank,
    decoded_token}}, of itself and of the likeliest ones. The rank of a token that is not among these is not known.
    """
    found: list[dict[str, Any] | None] = [None]
    for token, own, ids, values in zip(prompt[1:], scored.log_probs, scored.top_ids, scored.top_log_probs, strict=True):
        ranks = {i: (value, rank) for rank, (i, value) in enumerate(zip(ids, values, strict=True), 1)}
        entries = {token: ranks.get(token, (own, None))} | ranks
        found.append(
            {
                str(i): {"logprob": value, "rank": rank, "decoded_token": decode(i)}
                for i, (value, rank) in entries.items()
            }
        )
    return found


def chat_logprobs(tokens: Sequence[str], log_probs: Sequence[float]) -> dict[str, Any]:
    """Return the log-probs of an answer's tokens in OpenAI's form for chats."""
    pairs = zip(tokens, log_probs, strict=True)
    return {"content": [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]}


def answer_json(
    kind: str, answer_id: str, model: str, version: int | None, choices: Sequence[Mapping[str, Any]], usage: Any = None
) -> dict[str, Any]:
    """Return the body of an answer.

    Args:
        kind: such as ``chat.completion``.
        version: of the weights that ended it.
        usage: (tokens read, tokens generated); None: not told.
    """
    body = {
        "id": answer_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"version-{version}",
        "choices": list(choices),
    }
    if usage is not None:
        read, generated = usage
        body["usage"] = {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}
    return body


def error_json(status: int, message: str, kind: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error in the form that OpenAI's clients read."""
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def event(content: Any) -> bytes:
    """Return one event of a stream."""
    return f"data: {json.dumps(content)}\n\n".encode()


END_OF_STREAM = b"data: [DONE]\n\n"
STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
