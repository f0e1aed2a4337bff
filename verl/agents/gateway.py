"""Gateway: an HTTP server in the event loop of agent loops, through which agents outside talk to the policy.

A session has a URL of its own that cannot be guessed, ``{address}/session/{id}``. Below it are

    POST v1/chat/completions    OpenAI's, recorded by `verl.agents.session`
    GET  v1/models              OpenAI's
    POST reward                 {"reward": 1.0, "turn": 0 or an answer's id, "info": {"success": 1}, "final": true}
"""

import asyncio
import secrets
import socket
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from verl.agents.base import at_close
from verl.agents.session import Answer, Session, SessionError
from verl.utils.py_functional import is_loopback
from verl.workers.rollout.server.limits import MOST_TEXT_BYTES, Guard, RequestRefused, json_body
from verl.workers.rollout.server.openai_format import (
    END_OF_STREAM,
    STREAM_HEADERS,
    ParsedRequest,
    UnknownModel,
    answer_json,
    assistant_message,
    chat_logprobs,
    error_json,
    event,
    parse_request,
)
from verl.workers.rollout.server.server import own_address

MODEL = "policy"
_REMEMBERED = 100_000
"""Ended sessions kept to tell them from sessions that never were."""

_GATEWAYS: WeakKeyDictionary[asyncio.AbstractEventLoop, "Gateway"] = WeakKeyDictionary()


class Gateway:
    """Sessions of the agents of one event loop. Listens from the first session on.

    Args:
        host: address to listen on; others than loopback ask for a key.
    """

    def __init__(self, host: str = "127.0.0.1"):
        self.host, self.port = host, 0
        self.api_key = None if is_loopback(host) else secrets.token_urlsafe(24)
        self._strangers = Guard(host, self.api_key, "KEY")
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._runner: web.AppRunner | None = None
        self._start = asyncio.Lock()

    @classmethod
    async def of(cls, host: str) -> "Gateway":
        """Return the gateway of the running event loop, which listens; `close_gateway` closes it."""
        loop = asyncio.get_running_loop()
        gateway = _GATEWAYS.get(loop)
        if gateway is None:
            gateway = _GATEWAYS[loop] = cls(host)
        await gateway.start()
        return gateway

    @property
    def address(self) -> str:
        """URL of a gateway that listens."""
        host = self.host if self.host not in ("0.0.0.0", "::") else own_address()
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def start(self) -> None:
        """Listen, unless it does already."""
        async with self._start:
            if self._runner is not None:
                return
            application = web.Application(client_max_size=MOST_TEXT_BYTES, middlewares=[self._guard])
            application.add_routes(
                [
                    web.post("/session/{id}/v1/chat/completions", self._chat),
                    web.get("/session/{id}/v1/models", self._models),
                    web.post("/session/{id}/reward", self._reward),
                    web.route("*", "/{path:.*}", self._unknown),
                ]
            )
            # handlers of agents that hang up are cancelled, and so is what the engine generates for them
            runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
            await runner.setup()
            listener = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.host, 0))
            self.port = listener.getsockname()[1]
            await web.SockSite(runner, listener, backlog=4096).start()
            self._runner = runner

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @contextmanager
    def opened(self, session: Session) -> Iterator[str]:
        """Give a session its URL while the block runs; afterwards its requests are refused."""
        name = secrets.token_urlsafe(24)
        self._sessions[name] = session
        try:
            yield f"{self.address}/session/{name}"
        finally:
            session.end()
            del self._sessions[name]
            self._ended[name] = None
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    # -- routes --------------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuse requests of strangers; answer errors in OpenAI's form."""
        try:
            self._strangers.check(request)
            return await handler(request)
        except RequestRefused as error:
            code = "invalid_api_key" if error.status == 401 else None
            return _refusal(error.status, str(error), code)
        except SessionError as error:
            return _refusal(error.status, str(error), error.code)
        except UnknownModel as error:
            return _refusal(404, str(error), "model_not_found")
        except (ValueError, TypeError, NotImplementedError) as error:  # malformed JSON too
            return _refusal(400, str(error))

    def _session(self, request: web.Request) -> Session:
        name = request.match_info["id"]
        if name in self._ended:
            raise Session.ended_error()
        if name not in self._sessions:
            raise SessionError(404, f"There is no session {name!r}.", "session_not_found")
        return self._sessions[name]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        parsed = parse_request(await json_body(request), is_chat=True, model=MODEL)
        if parsed.template_options:
            raise ValueError(
                "chat_template_kwargs is not supported in a session: all turns are rendered alike. Set "
                "data.apply_chat_template_kwargs."
            )
        answer = await session.chat(parsed)
        decode = session.renderer.decode
        if not parsed.stream:
            body = _body(answer, "chat.completion", [_choice(answer, parsed, decode)], with_usage=True)
            if parsed.return_token_ids:
                body["prompt_token_ids"] = answer.prompt_ids
            return web.json_response(body)
        response = web.StreamResponse(headers=STREAM_HEADERS)
        await response.prepare(request)
        # the turn is complete: that it calls a tool, and how, is known at its end
        await response.write(event(_body(answer, "chat.completion.chunk", [_choice(answer, parsed, decode, True)])))
        if parsed.include_usage:
            await response.write(event(_body(answer, "chat.completion.chunk", [], with_usage=True)))
        await response.write(END_OF_STREAM)
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "verl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        session.take_reward(await json_body(request))
        return web.json_response({"reward": session.reward, "turn_rewards": session.turn_rewards})

    async def _unknown(self, request: web.Request) -> web.Response:
        raise SessionError(
            404,
            f"{request.method} {request.path} is not served here. A session has POST v1/chat/completions, "
            "GET v1/models and POST reward.",
            "not_found",
        )


@at_close
async def close_gateway() -> None:
    """Close the gateway of the running event loop, if it has one."""
    gateway = _GATEWAYS.pop(asyncio.get_running_loop(), None)
    if gateway is not None:
        await gateway.close()


def _refusal(status: int, message: str, code: str | None = None) -> web.Response:
    return web.json_response(error_json(status, message, code=code), status=status)


def _choice(answer: Answer, request: ParsedRequest, decode: Any, is_chunk: bool = False) -> dict[str, Any]:
    message = assistant_message(answer.content, answer.tool_calls, is_chunk)
    choice = {
        "index": 0,
        "delta" if is_chunk else "message": message,
        "finish_reason": answer.finish_reason,
        "logprobs": None,
    }
    ids = answer.completion.token_ids
    if request.return_token_ids:
        choice["token_ids"] = ids
    if request.logprobs:
        choice["logprobs"] = chat_logprobs([decode([token]) for token in ids], answer.completion.log_probs or [])
    return choice


def _body(answer: Answer, kind: str, choices: list[dict[str, Any]], with_usage: bool = False) -> dict[str, Any]:
    usage = (len(answer.prompt_ids), len(answer.completion.token_ids)) if with_usage else None
    return answer_json(kind, answer.id, MODEL, answer.completion.version, choices, usage)
