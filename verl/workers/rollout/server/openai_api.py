"""OpenAI's routes over a rollout server: chat and plain completions, whole or as a stream.

A response that a change of weights interrupts keeps its tokens and continues under the new weights.
``system_fingerprint`` has the version of the weights that ended it. ``return_token_ids`` adds the token ids that a
trainer needs.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aiohttp import web

from verl.utils.py_functional import derive_seed
from verl.workers.rollout.base import Completion, Request, SamplingParams
from verl.workers.rollout.server.engine_loop import EngineDied
from verl.workers.rollout.server.messages import refuse_unknown, token_ids

# -- Requests of OpenAI's protocol: supported fields and the sampling parameters they stand for ------------------------


_WHOLE_CONTEXT = 1 << 20  # engines cut it to what their context leaves
_IGNORED = ("user", "store", "metadata", "service_tier")
"""Fields that say nothing about the answer."""
_DEFAULT_ONLY = {
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
_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos")
_EXTRA = ("frequency_penalty", "presence_penalty", "logit_bias")
_COMMON = (
    *("model", "max_tokens", "n", "seed", "stop", "stop_token_ids", "stream", "stream_options", "logprobs"),
    *("return_token_ids", *_NUMBERS, *_EXTRA, *_IGNORED, *_DEFAULT_ONLY),
)
COMPLETION_FIELDS = ("prompt", *_COMMON)
CHAT_FIELDS = ("messages", "max_completion_tokens", "chat_template_kwargs", *_COMMON)


class UnknownModel(ValueError):
    """The request names a model that is not served here."""


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request of one of the two routes."""

    prompts: list[list[int]]
    sampling: SamplingParams
    n: int
    seed: int | None
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool


def parse_request(body: Any, is_chat: bool, model: str, tokenizer: Any) -> ParsedRequest:
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
    return ParsedRequest(
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
    numbers: dict[str, Any] = {name: body[name] for name in _NUMBERS if body.get(name) is not None}
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
    # one prompt of token ids, not several prompts
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


# -- Text of a response as its tokens come, cut at stop texts. Knows a decoding function, no tokenizer -----------------


_UNFINISHED = "\ufffd"  # what an incomplete character decodes to


class TextStream:
    """One response.

    Args:
        decode: token ids -> text.
        stop: texts at which the response ends; they are not part of it.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()):
        self.is_stopped = False
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        self._context = self._read = 0  # text of ids[:read] is taken; ids[context:read] tell how the next one reads
        self._pending = ""  # may be the begin of a stop text

    def add(self, token_ids: Sequence[int], is_last: bool = False) -> str:
        """Take further tokens; returns the text that is sure to stand. Nothing comes after a stop text."""
        if self.is_stopped:
            return ""
        self._ids += token_ids
        text = self._pending + self._new_text(is_last)
        ends = [found for stop in self._stop if (found := text.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            return text[: min(ends)]
        # hold back the longest end of the text that begins a stop text
        begins = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        kept = 0 if is_last else max(begins, default=0)
        self._pending = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _new_text(self, is_last: bool) -> str:
        before = self._decode(self._ids[self._context : self._read])
        whole = self._decode(self._ids[self._context :])
        if whole.endswith(_UNFINISHED) and not is_last:
            return ""
        self._context, self._read = self._read, len(self._ids)
        return whole[len(before) :]


class OpenAIRoutes:
    """``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions`` of a `RolloutServer` that has a tokenizer."""

    def __init__(self, server: Any):
        self.server, self.tokenizer = server, server.tokenizer
        self._num_unseeded = 0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            web.post("/v1/completions", partial(self._answer, is_chat=False)),
            web.post("/v1/chat/completions", partial(self._answer, is_chat=True)),
        ]

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": self.server.name, "object": "model", "created": 0, "owned_by": "verl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _answer(self, request: web.Request, is_chat: bool) -> web.StreamResponse:
        try:
            parsed = parse_request(await request.json(), is_chat, self.server.name, self.tokenizer)
            answer = _OpenAIResponse(self, parsed, is_chat)
            return await (answer.stream(request) if parsed.stream else answer.whole())
        except UnknownModel as error:
            return self.server.error_response(404, str(error))
        except (ValueError, TypeError, NotImplementedError) as error:  # malformed JSON too
            return self.server.error_response(400, str(error))
        except EngineDied as error:
            return self.server.error_response(500, str(error))

    def seeds(self, parsed: ParsedRequest, count: int) -> list[int]:
        """One for each choice: from the request's seed, or new ones."""
        if parsed.seed is not None:
            return [parsed.seed if k == 0 else derive_seed(parsed.seed, "choice", k) for k in range(count)]
        # no two requests without a seed may share their random numbers
        self._num_unseeded += count
        first = self._num_unseeded
        return [derive_seed(self.server.seed, "unseeded", first + k) for k in range(count)]

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class _OpenAIResponse:
    """One request: its choices, n to each prompt, and their JSON."""

    def __init__(self, routes: OpenAIRoutes, parsed: ParsedRequest, is_chat: bool):
        self.routes, self.parsed, self.is_chat = routes, parsed, is_chat
        prompts = [prompt for prompt in parsed.prompts for _ in range(parsed.n)]
        seeds = routes.seeds(parsed, len(prompts))
        self.requests = [Request(tuple(p), parsed.sampling, seed) for p, seed in zip(prompts, seeds, strict=True)]
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.num_generated = 0

    async def whole(self) -> web.Response:
        tasks = [asyncio.ensure_future(self._choice(index)) for index in range(len(self.requests))]
        try:
            choices = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        kind = "chat.completion" if self.is_chat else "text_completion"
        body = self._response_json(kind, choices, with_usage=True)
        if self.parsed.return_token_ids:
            body["prompt_token_ids"] = self.parsed.prompts[0]
        return web.json_response(body)

    async def _choice(self, index: int) -> dict[str, Any]:
        pieces = [piece async for piece in self._pieces(index)]
        _, completion, reason = pieces[-1]
        return self._choice_json(index, "".join(text for text, _, _ in pieces), completion, reason)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        pieces: asyncio.Queue[Any] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._feed(index, pieces)) for index in range(len(self.requests))]
        try:
            first = await pieces.get()
            if isinstance(first, Exception):  # nothing was sent yet: an error response is still possible
                raise first
            await response.prepare(request)
            await self._send_all(response, pieces, first)
        finally:
            for task in tasks:
                task.cancel()
        return response

    async def _send_all(self, response: web.StreamResponse, pieces: asyncio.Queue[Any], item: Any) -> None:
        kind, open_choices = "chat.completion.chunk" if self.is_chat else "text_completion", len(self.requests)
        while True:
            if isinstance(item, Exception):
                await _send(response, {"error": {"message": str(item), "type": "server_error"}})
                break
            await _send(response, self._response_json(kind, [item]))
            open_choices -= item["finish_reason"] is not None
            if not open_choices:
                break
            item = await pieces.get()
        if self.parsed.include_usage:
            await _send(response, self._response_json(kind, [], with_usage=True))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()

    async def _feed(self, index: int, pieces: asyncio.Queue[Any]) -> None:
        num_sent = 0
        try:
            async for text, completion, reason in self._pieces(index):
                if text or reason or not num_sent:
                    log_probs = completion.log_probs and completion.log_probs[num_sent:]
                    new = replace(completion, token_ids=completion.token_ids[num_sent:], log_probs=log_probs)
                    pieces.put_nowait(self._choice_json(index, text, new, reason, is_chunk=True))
                    num_sent = len(completion.token_ids)
        except (ValueError, TypeError, NotImplementedError, EngineDied) as error:
            pieces.put_nowait(error)

    async def _pieces(self, index: int) -> AsyncIterator[tuple[str, Completion, str | None]]:
        """(further text, all tokens so far, why it ended or None)."""
        text, taken = TextStream(self.routes.decode, self.parsed.sampling.stop), 0
        watch = self.parsed.stream or bool(self.parsed.sampling.stop)
        async with aclosing(
            self.routes.server.stream_completion(self.requests[index], watch=watch, continue_after_pause=True)
        ) as completions:
            async for completion, ended in completions:
                piece = text.add(completion.token_ids[taken:], is_last=ended)
                taken = len(completion.token_ids)
                reason = "stop" if text.is_stopped else completion.finish_reason if ended else None
                self.num_generated += taken if reason else 0
                yield piece, completion, reason
                if reason:
                    return

    # -- JSON ----------------------------------------------------------------------------------------------------------

    def _response_json(self, kind: str, choices: list[dict[str, Any]], with_usage: bool = False) -> dict[str, Any]:
        server, num_read = self.routes.server, sum(map(len, self.parsed.prompts))
        body = {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": server.name,
            "system_fingerprint": f"version-{server.loop.version}",
            "choices": choices,
        }
        if with_usage:
            total = num_read + self.num_generated
            usage = {"prompt_tokens": num_read, "completion_tokens": self.num_generated, "total_tokens": total}
            body["usage"] = usage
        return body

    def _choice_json(
        self, index: int, text: str, part: Completion, reason: str | None, is_chunk: bool = False
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self.is_chat:
            choice["delta" if is_chunk else "message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if self.parsed.return_token_ids:
            choice["token_ids"] = part.token_ids
        if self.parsed.logprobs:
            tokens = [self.routes.tokenizer.decode([token]) for token in part.token_ids]
            log_probs = part.log_probs or []
            if self.is_chat:
                content = [
                    {"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []}
                    for token, log_prob in zip(tokens, log_probs, strict=True)
                ]
                choice["logprobs"] = {"content": content}
            else:
                lists = {"tokens": tokens, "token_logprobs": log_probs, "top_logprobs": None, "text_offset": None}
                choice["logprobs"] = lists
        return choice


async def _send(response: web.StreamResponse, content: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(content)}\n\n".encode())
