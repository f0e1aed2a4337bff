"""OpenAI's routes over a rollout server: chat and plain completions, whole or as a stream.

What a response had drawn when the weights changed is kept; it goes on under the new ones. ``system_fingerprint`` tells
the version of the weights that ended it. ``return_token_ids`` adds the token ids that a trainer needs.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from verl.utils.seeding import derive_seed
from verl.workers.rollout.base import Completion, Request
from verl.workers.rollout.engine_loop import EngineDied
from verl.workers.rollout.openai_fields import UnknownModel, Wanted, understand
from verl.workers.rollout.text_stream import TextStream


class OpenAIRoutes:
    """``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions`` of a `RolloutServer` that has a tokenizer."""

    def __init__(self, server: Any):
        self.server, self.tokenizer = server, server.tokenizer
        self._drawn_without_seed = 0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat_completions),
        ]

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": self.server.name, "object": "model", "created": 0, "owned_by": "verl"}
        return web.json_response({"object": "list", "data": [model]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, is_chat=False)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, is_chat=True)

    async def _answer(self, request: web.Request, is_chat: bool) -> web.StreamResponse:
        try:
            wanted = understand(await request.json(), is_chat, self.server.name, self.tokenizer)
            answer = _Answer(self, wanted, is_chat)
            return await (answer.stream(request) if wanted.stream else answer.whole())
        except UnknownModel as error:
            return self.server.error_response(404, str(error))
        except (ValueError, TypeError, NotImplementedError) as error:  # malformed JSON too
            return self.server.error_response(400, str(error))
        except EngineDied as error:
            return self.server.error_response(500, str(error))

    def seeds(self, wanted: Wanted, count: int) -> list[int]:
        """One for each choice: from the request's seed, or new ones."""
        if wanted.seed is not None:
            return [wanted.seed if k == 0 else derive_seed(wanted.seed, "choice", k) for k in range(count)]
        self._drawn_without_seed += count
        first = self._drawn_without_seed
        return [derive_seed(self.server.seed, "unseeded", first + k) for k in range(count)]

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class _Answer:
    """One request: its choices, n to each prompt, and the JSON they are told in."""

    def __init__(self, routes: OpenAIRoutes, wanted: Wanted, is_chat: bool):
        self.routes, self.wanted, self.is_chat = routes, wanted, is_chat
        prompts = [prompt for prompt in wanted.prompts for _ in range(wanted.n)]
        seeds = routes.seeds(wanted, len(prompts))
        self.requests = [Request(tuple(p), wanted.sampling, seed) for p, seed in zip(prompts, seeds, strict=True)]
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.num_drawn = 0

    async def whole(self) -> web.Response:
        tasks = [asyncio.ensure_future(self._choice(index)) for index in range(len(self.requests))]
        try:
            choices = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        kind = "chat.completion" if self.is_chat else "text_completion"
        body = self._envelope(kind, choices) | {"usage": self._usage()}
        if self.wanted.return_token_ids:
            body["prompt_token_ids"] = self.wanted.prompts[0]
        return web.json_response(body)

    async def _choice(self, index: int) -> dict[str, Any]:
        pieces = [piece async for piece in self._pieces(index)]
        _, completion, reason = pieces[-1]
        return self._told(index, "".join(text for text, _, _ in pieces), completion, reason)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        pieces: asyncio.Queue[Any] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._feed(index, pieces)) for index in range(len(self.requests))]
        try:
            first = await pieces.get()
            if isinstance(first, Exception):  # nothing was sent yet: it can be told as an error
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
            await _send(response, self._envelope(kind, [item]))
            open_choices -= item["finish_reason"] is not None
            if not open_choices:
                break
            item = await pieces.get()
        if self.wanted.include_usage:
            await _send(response, self._envelope(kind, []) | {"usage": self._usage()})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()

    async def _feed(self, index: int, pieces: asyncio.Queue[Any]) -> None:
        told = 0
        try:
            async for text, completion, reason in self._pieces(index):
                if text or reason or not told:
                    news = _after(completion, told)
                    pieces.put_nowait(self._told(index, text, news, reason, is_chunk=True))
                    told = len(completion.token_ids)
        except (ValueError, TypeError, NotImplementedError, EngineDied) as error:
            pieces.put_nowait(error)

    async def _pieces(self, index: int) -> AsyncIterator[tuple[str, Completion, str | None]]:
        """(further text, all tokens so far, why it ended or None)."""
        text, taken = TextStream(self.routes.decode, self.wanted.sampling.stop), 0
        watch = self.wanted.stream or bool(self.wanted.sampling.stop)
        async with aclosing(self.routes.server.follow(self.requests[index], watch=watch, survives=True)) as follow:
            async for completion, ended in follow:
                piece = text.add(completion.token_ids[taken:], is_last=ended)
                taken = len(completion.token_ids)
                reason = "stop" if text.is_stopped else completion.finish_reason if ended else None
                self.num_drawn += taken if reason else 0
                yield piece, completion, reason
                if reason:
                    return

    # -- JSON ----------------------------------------------------------------------------------------------------------

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        server = self.routes.server
        return {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": server.name,
            "system_fingerprint": f"version-{server.loop.version}",
            "choices": choices,
        }

    def _usage(self) -> dict[str, int]:
        read = sum(map(len, self.wanted.prompts))
        return {"prompt_tokens": read, "completion_tokens": self.num_drawn, "total_tokens": read + self.num_drawn}

    def _told(
        self, index: int, text: str, drawn: Completion, reason: str | None, is_chunk: bool = False
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": self._logprobs(drawn)}
        if not self.is_chat:
            choice["text"] = text
        else:
            choice["delta" if is_chunk else "message"] = {"role": "assistant", "content": text}
        if self.wanted.return_token_ids:
            choice["token_ids"] = drawn.token_ids
        return choice

    def _logprobs(self, drawn: Completion) -> dict[str, Any] | None:
        if not self.wanted.logprobs:
            return None
        tokens = [self.routes.tokenizer.decode([token]) for token in drawn.token_ids]
        if not self.is_chat:
            return {"tokens": tokens, "token_logprobs": drawn.log_probs, "top_logprobs": None, "text_offset": None}
        told = zip(tokens, drawn.log_probs, strict=True)
        return {"content": [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in told]}


def _after(completion: Completion, start: int) -> Completion:
    return Completion(completion.token_ids[start:], completion.log_probs[start:], completion.finish_reason)


async def _send(response: web.StreamResponse, content: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(content)}\n\n".encode())
