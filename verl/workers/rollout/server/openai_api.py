"""OpenAI's routes over a rollout server: chat and plain completions, whole or as a stream.

A response that a change of weights interrupts keeps its tokens and continues under the new weights.
``system_fingerprint`` has the version of the weights that ended it. ``return_token_ids`` adds the token ids that a
trainer needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any

from aiohttp import web

from verl.utils.py_functional import derive_seed
from verl.workers.rollout.base import Completion, Request, SamplingParams
from verl.workers.rollout.server.limits import json_body
from verl.workers.rollout.server.messages import sampling_from_json, token_ids
from verl.workers.rollout.server.openai_format import (
    END_OF_STREAM,
    STREAM_HEADERS,
    ParsedRequest,
    answer_json,
    assistant_message,
    chat_logprobs,
    check_responses,
    event,
    named_calls,
    new_id,
    parse_request,
    prompt_logprobs,
    tool_calls_json,
)

_WHOLE_CONTEXT = 1 << 20  # engines cut it to what their context leaves

# -- Prompts and sampling of a request ---------------------------------------------------------------------------------


def prompts_of(parsed: ParsedRequest, is_chat: bool, tokenizer: Any) -> list[list[int]]:
    """Return the token ids of a request's prompts.

    Raises:
        ValueError: a prompt has no tokens, or the chat template refuses the messages or shows no tools.
    """
    if is_chat:
        return [_chat_prompt(parsed, tokenizer)]
    prompt = parsed.prompt
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


def _chat_prompt(parsed: ParsedRequest, tokenizer: Any) -> list[int]:
    options = {**parsed.template_options, "add_generation_prompt": True, "tokenize": True, "return_dict": False}
    tools = [dict(tool) for tool in parsed.tools] or None

    def render(tools: Any) -> list[int]:
        return list(tokenizer.apply_chat_template([dict(m) for m in parsed.messages], tools=tools, **options))

    try:
        prompt = render(tools)
        is_shown = tools is None or prompt != render(None)
    except Exception as error:  # templates raise what they like
        raise ValueError(f"messages: the chat template refused them ({type(error).__name__}: {error}).") from error
    if not is_shown:
        raise ValueError(
            "tools: the model's chat template does not show them, so the model could not know of them. Set "
            "actor_rollout_ref.model.custom_chat_template to one that does, or describe them in a message."
        )
    return prompt


def _sampling(parsed: ParsedRequest, is_chat: bool, tokenizer: Any) -> SamplingParams:
    given = {"max_tokens": _WHOLE_CONTEXT if is_chat else 16, **parsed.sampling}
    given["stop_token_ids"] = tuple(dict.fromkeys([tokenizer.eos_token_id, *given.get("stop_token_ids", ())]))
    return sampling_from_json({"want_log_probs": True, **given})


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
        self._rendering = ThreadPoolExecutor(1, "verl-prompts")

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            web.post("/v1/completions", partial(self._answer, is_chat=False)),
            web.post("/v1/chat/completions", partial(self._answer, is_chat=True)),
        ]

    async def close(self, application: web.Application) -> None:
        """End the thread that reads prompts."""
        self._rendering.shutdown(wait=False)

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": self.server.name, "object": "model", "created": 0, "owned_by": "verl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _answer(self, request: web.Request, is_chat: bool) -> web.StreamResponse:
        allows_template = self.server.allows_client_templates
        parsed = parse_request(await json_body(request), is_chat, self.server.name, allows_template)
        if parsed.tools and self.server.parse_tool_calls is None:
            raise ValueError("tools are not supported here: this server has no parser of tool calls.")
        # in a thread, and one at a time: a long text must not keep the other requests waiting
        prompts = await asyncio.get_running_loop().run_in_executor(
            self._rendering, prompts_of, parsed, is_chat, self.tokenizer
        )
        check_responses(len(prompts), parsed.n)
        answer = _OpenAIResponse(self, parsed, is_chat, prompts)
        return await (answer.stream(request) if parsed.stream else answer.whole())

    def seeds(self, parsed: ParsedRequest, count: int) -> list[int]:
        """One for each choice: from the request's seed, or new ones."""
        if parsed.seed is not None:
            return [parsed.seed if k == 0 else derive_seed(parsed.seed, "choice", k) for k in range(count)]
        # no two requests without a seed may share their random numbers
        self._num_unseeded += count
        first = self._num_unseeded
        return [derive_seed(self.server.seed, "unseeded", first + k) for k in range(count)]

    @cached_property
    def decode_token(self) -> Callable[[int], str]:
        """The text of one token, remembered."""
        return lru_cache(maxsize=1 << 20)(lambda token: self.tokenizer.decode([token]))

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class _OpenAIResponse:
    """One request: its choices, n to each prompt, and their JSON."""

    def __init__(self, routes: OpenAIRoutes, parsed: ParsedRequest, is_chat: bool, prompts: list[list[int]]):
        self.routes, self.parsed, self.is_chat, self.prompts = routes, parsed, is_chat, prompts
        self.sampling = _sampling(parsed, is_chat, routes.tokenizer)
        repeated = [prompt for prompt in prompts for _ in range(parsed.n)]
        seeds = routes.seeds(parsed, len(repeated))
        self.requests = [Request(tuple(p), self.sampling, seed) for p, seed in zip(repeated, seeds, strict=True)]
        self.id = new_id("chatcmpl" if is_chat else "cmpl")
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
            body["prompt_token_ids"] = self.prompts[0]
        return web.json_response(body)

    async def _choice(self, index: int, is_chunk: bool = False) -> dict[str, Any]:
        pieces = [piece async for piece in self._pieces(index)]
        _, completion, reason = pieces[-1]
        return self._choice_json(index, "".join(text for text, _, _ in pieces), completion, reason, is_chunk)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=STREAM_HEADERS)
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
                await response.write(event({"error": {"message": str(item), "type": "server_error"}}))
                break
            await response.write(event(self._response_json(kind, [item])))
            open_choices -= item["finish_reason"] is not None
            if not open_choices:
                break
            item = await pieces.get()
        if self.parsed.include_usage:
            await response.write(event(self._response_json(kind, [], with_usage=True)))
        await response.write(END_OF_STREAM)
        await response.write_eof()

    async def _feed(self, index: int, pieces: asyncio.Queue[Any]) -> None:
        num_sent = 0
        try:
            if self.parsed.reads_tool_calls:
                # whether text is the beginning of a call is known at its end
                pieces.put_nowait(await self._choice(index, is_chunk=True))
                return
            async for text, completion, reason in self._pieces(index):
                if text or reason or not num_sent:
                    log_probs = completion.log_probs and completion.log_probs[num_sent:]
                    new = replace(completion, token_ids=completion.token_ids[num_sent:], log_probs=log_probs)
                    pieces.put_nowait(self._choice_json(index, text, new, reason, is_chunk=True))
                    num_sent = len(completion.token_ids)
        except Exception as error:  # whatever it is: the answer's end waits for this piece
            pieces.put_nowait(error)

    async def _pieces(self, index: int) -> AsyncIterator[tuple[str, Completion, str | None]]:
        """(further text, all tokens so far, why it ended or None)."""
        text, taken = TextStream(self.routes.decode, self.sampling.stop), 0
        watch = self.parsed.stream or bool(self.sampling.stop)
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
        server, num_read = self.routes.server, sum(map(len, self.prompts))
        usage = (num_read, self.num_generated) if with_usage else None
        return answer_json(kind, self.id, server.name, server.loop.version, choices, usage)

    def _choice_json(
        self, index: int, text: str, part: Completion, reason: str | None, is_chunk: bool = False
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self.is_chat:
            calls: list[dict[str, Any]] = []
            if self.parsed.reads_tool_calls:
                text, found = self.routes.server.parse_tool_calls(part.token_ids, text, self.parsed.tools)
                text, found = named_calls(text, found)
                calls = tool_calls_json(found)
                choice["finish_reason"] = "tool_calls" if calls else reason
            choice["delta" if is_chunk else "message"] = assistant_message(text, calls, is_chunk)
        else:
            choice["text"] = text
        if self.parsed.return_token_ids:
            choice["token_ids"] = part.token_ids
        if part.prompt_log_probs is not None:
            prompt = self.prompts[index // self.parsed.n]
            choice["prompt_logprobs"] = prompt_logprobs(prompt, part.prompt_log_probs, self.routes.decode_token)
        if self.parsed.logprobs:
            tokens = [self.routes.tokenizer.decode([token]) for token in part.token_ids]
            log_probs = part.log_probs or []
            if self.is_chat:
                choice["logprobs"] = chat_logprobs(tokens, log_probs)
            else:
                lists = {"tokens": tokens, "token_logprobs": log_probs, "top_logprobs": None, "text_offset": None}
                choice["logprobs"] = lists
        return choice
