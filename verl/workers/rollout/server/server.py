"""A rollout engine behind HTTP: requests come one by one, and are generated in one running batch.

The application runs in a thread with an event loop of its own, the engine in another (`engine_loop.py`): while the
engine computes a step, requests are taken in and answered. Start it with the engine at rest, let it serve with
`resume`, and take the engine back with `pause` before its weights or its memory change.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import count
from typing import Any

from aiohttp import web

from verl.utils.py_functional import derive_seed, is_loopback
from verl.workers.rollout.base import Completion, Request, RolloutEngine, empty_completion
from verl.workers.rollout.server.engine_loop import Broadcast, EngineDied, EngineLoop, Event
from verl.workers.rollout.server.limits import MOST_BYTES, Guard, RequestRefused, check_request, json_body
from verl.workers.rollout.server.messages import (
    BINARY,
    allow_many_connections,
    completion_to_json,
    pack,
    request_from_json,
)
from verl.workers.rollout.server.openai_api import OpenAIRoutes
from verl.workers.rollout.server.openai_format import UnknownModel, error_json

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' text format
_PREFIX = "verl_rollout_"
_HELP = {
    "requests": "Requests that ended.",
    "generated_tokens": "Tokens generated.",
    "prompt_tokens": "Tokens of prompts.",
    "steps": "Steps of the engine.",
    "seconds": "Seconds spent generating.",
    "running": "Requests submitted and not ended.",
    "version": "Version of the weights held; -1 while there is none.",
}


class RolloutServer:
    """Serves one rollout engine.

    Args:
        engine: anything with `submit`, `step` and `abort`.
        version: of the weights it holds; None: the server starts paused, as it does anyway until `resume`.
        host: address to listen on. Others than loopback need a ``token``.
        port: 0 takes a free one.
        token: requests must carry it as ``Authorization: Bearer TOKEN``; None asks for nothing.
        name: the model's, as ``/v1/models`` gives it.
        tokenizer: for the OpenAI routes, which speak text; None leaves them out.
        seed: of responses whose request names none; the n-th takes seed + n.
        broadcast: to the other tensor-parallel ranks of the engine.
        parse_tool_calls: (token ids, text, tools) of an answer -> (text without calls, tool calls), for requests with
            tools; None: they are refused.

    Raises:
        ValueError: ``host`` is open to others and there is no token.
    """

    allows_client_templates = False
    """Let requests bring a chat template (``chat_template_kwargs.chat_template``), a program that runs here. For a
    subclass that ``rollout.agent.custom_async_server`` names."""

    def __init__(
        self,
        engine: RolloutEngine,
        version: int | None = None,
        host: str = "127.0.0.1",
        *,
        port: int = 0,
        token: str | None = None,
        name: str = "policy",
        tokenizer: Any = None,
        seed: int = 0,
        broadcast: Broadcast | None = None,
        parse_tool_calls: Callable[..., tuple[str, Sequence[Any]]] | None = None,
    ):
        if not token and not is_loopback(host):
            raise ValueError(
                f"host={host!r} can be reached from other machines, and there is no token: everybody could use the "
                "server. Give a token, or bind 127.0.0.1."
            )
        self.engine, self.name, self.tokenizer, self.seed = engine, name, tokenizer, seed
        self.parse_tool_calls = parse_tool_calls
        self.host, self.port = host, port
        self.loop = EngineLoop(engine, self._deliver, broadcast)
        self._guard = Guard(host, token)
        self._numbers = count()
        self._events: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._open: dict[int, asyncio.Queue[Event]] = {}
        self._ids: dict[str, int] = {}  # request id -> number
        if version is not None:
            self.loop.resume(version)

    # -- start and stop ------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """The URL of a started server."""
        host = self.host if self.host not in ("0.0.0.0", "::") else own_address()
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def start(self) -> str:
        """Listen; returns the address.

        Raises:
            OSError: the port is taken, or the host is not this machine's.
        """
        allow_many_connections()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._listen, args=(started,), name="verl-rollout-server", daemon=True)
        self._thread.start()
        started.result()
        self.loop.start()
        return self.address

    def stop(self) -> None:
        """End both threads. Requests under way are answered with an error."""
        self.loop.stop()
        if self._events is not None and self._thread is not None and self._thread.is_alive():
            self._events.call_soon_threadsafe(self._finished.set)
            self._thread.join(timeout=10)

    def pause(self) -> None:
        """Take no further step, abort what runs, and return when the engine is free for others.

        Requests that wait are kept for `resume`; responses of the OpenAI routes continue then from where they were.
        """
        self.loop.pause()

    def resume(self, version: int) -> None:
        """Serve with weights of this version."""
        self.loop.resume(version)

    def _listen(self, started: Future[None]) -> None:
        """The application's thread."""
        self._events = asyncio.new_event_loop()
        asyncio.set_event_loop(self._events)
        self._finished = asyncio.Event()
        try:
            self._events.run_until_complete(self._serve(started))
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
        finally:
            self._events.close()

    async def _serve(self, started: Future[None]) -> None:
        runner = web.AppRunner(self.application(), access_log=None, handler_cancellation=True)
        await runner.setup()
        listener = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.host, self.port))
            self.port = listener.getsockname()[1]
            await web.SockSite(runner, listener, backlog=4096, shutdown_timeout=0.5).start()
            started.set_result(None)
            await self._finished.wait()
        finally:
            # asyncio drops, without closing it, a connection that it accepted just before the listener is closed; its
            # client would wait for ever. Accept no more, and give the last one the turns it needs to be known.
            asyncio.get_running_loop().remove_reader(listener)
            for _ in range(3):
                await asyncio.sleep(0)
            await runner.cleanup()
            listener.close()

    def application(self) -> web.Application:
        """The routes. A subclass may add its own."""
        application = web.Application(client_max_size=MOST_BYTES, middlewares=[self._guarded])
        application.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort", self._abort),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
            ]
        )
        if self.tokenizer is not None:
            openai = OpenAIRoutes(self)
            application.add_routes(openai.routes())
            application.on_cleanup.append(openai.close)
        return application

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Callable) -> web.StreamResponse:
        """Refuse requests of strangers, and answer what goes wrong in OpenAI's form."""
        try:
            self._guard.check(request)
            return await handler(request)
        except (RequestRefused, UnknownModel) as error:
            return self.error_response(getattr(error, "status", 404), str(error))
        except (ValueError, TypeError, NotImplementedError) as error:
            return self.error_response(400, str(error))
        except EngineDied as error:
            return self.error_response(500, str(error))
        except (web.HTTPException, ConnectionError):
            raise
        except Exception as error:
            logger.exception("a request to %s failed", request.path)
            return self.error_response(500, f"The server failed: {type(error).__name__}: {error}")

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(self, request: Request, priority: int = 0, request_id: str | None = None) -> Completion:
        """One completion; in the application's thread. Cancelling it aborts the request.

        Raises:
            ValueError: the request cannot be served, or its id is in use.
            EngineDied: the engine failed; says how.
        """
        async with aclosing(self.stream_completion(request, priority, request_id, watch=False)) as completions:
            async for completion, ended in completions:
                if ended:
                    return completion
        raise AssertionError("a request ended without an event")

    async def stream_completion(
        self,
        request: Request,
        priority: int = 0,
        request_id: str | None = None,
        watch: bool = True,
        continue_after_pause: bool = False,
    ) -> AsyncGenerator[tuple[Completion, bool], None]:
        """As `generate`, but yields (completion so far, whether it is the end) as tokens come.

        Args:
            watch: yield before the end, if the engine reports its tokens so far.
            continue_after_pause: a response that `pause` interrupted waits for `resume` and continues with the weights
                held then.
        """
        before, part, is_end = empty_completion(request), request, False
        while not is_end:
            completion = before
            async with aclosing(self._events_of(part, priority, request_id, watch)) as events:
                async for event in events:
                    assert event.completion is not None
                    completion = _concatenated(before, event.completion)
                    is_end = event.ended and not (continue_after_pause and event.is_paused)
                    if is_end or not event.ended:
                        yield completion, is_end
            before, part = completion, _rest(request, completion)

    async def _events_of(
        self, request: Request, priority: int, request_id: str | None, watch: bool
    ) -> AsyncGenerator[Event, None]:
        if request_id is not None and request_id in self._ids:
            raise ValueError(f"request_id={request_id!r} is in use by a running request. Give each its own.")
        check_request(request, self.engine)
        number = next(self._numbers)
        events: asyncio.Queue[Event] = asyncio.Queue()
        self._open[number] = events
        if request_id is not None:
            self._ids[request_id] = number
        self.loop.submit(number, request, priority, watch)
        ended = False
        try:
            while not ended:
                event = await events.get()
                ended = event.ended
                if event.error is not None:
                    raise event.error
                yield event
        finally:
            self._open.pop(number, None)
            if request_id is not None:
                self._ids.pop(request_id, None)
            # the client has hung up, or the task was cancelled
            if not ended:
                self.loop.abort([number])

    def _deliver(self, events: list[Event]) -> None:
        """From the engine's thread: pass events to the requests that wait for them."""

        def route() -> None:
            for event in events:
                if event.number in self._open:
                    self._open[event.number].put_nowait(event)

        with suppress(RuntimeError):  # the application has ended
            if self._events is not None:
                self._events.call_soon_threadsafe(route)

    # -- routes --------------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.Response:
        rollout_request, request_id, priority = request_from_json(await json_body(request, MOST_BYTES, BINARY))
        completion = await self.generate(rollout_request, priority, request_id)
        answer = completion_to_json(completion, self.loop.version)
        if request.content_type == BINARY:
            return web.Response(body=pack(answer), content_type=BINARY)
        return web.json_response(answer)

    async def _abort(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        try:
            if body.get("all"):
                self.loop.abort()
            else:
                self.loop.abort([self._ids[name] for name in body["request_ids"] if name in self._ids])
        except (KeyError, AttributeError, TypeError, ValueError):
            return self.error_response(400, 'The body must be {"request_ids": [...]} or {"all": true}.')
        return web.json_response({})

    async def _health(self, request: web.Request) -> web.Response:
        state = {"name": self.name, "engine": type(self.engine).__name__, **self.loop.state()}
        return web.json_response(state, status=200 if state["error"] is None else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=prometheus_text(self.engine).encode(), headers={"Content-Type": CONTENT_TYPE})

    @staticmethod
    def error_response(status: int, message: str, kind: str | None = None) -> web.Response:
        """An error in the form OpenAI's clients read."""
        return web.json_response(error_json(status, message, kind), status=status)


def _concatenated(before: Completion, more: Completion) -> Completion:
    """A completion and the one that continued it, as one."""
    if not before.token_ids:
        return more
    log_probs = None if more.log_probs is None else before.log_probs + more.log_probs
    return replace(more, token_ids=before.token_ids + more.token_ids, log_probs=log_probs)


def _rest(request: Request, done: Completion) -> Request:
    """The request for the remaining tokens of a partial response."""
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(done.token_ids))
    if not done.token_ids:
        return request
    # another stream: the tokens so far have used the beginning of the request's own
    seed = derive_seed(request.seed, "continued", len(done.token_ids))
    return replace(request, prompt_ids=(*request.prompt_ids, *done.token_ids), sampling=sampling, seed=seed)


def own_address() -> str:
    """The address by which other machines of the cluster know this one: on Ray the node's, else the default route's."""
    ray = sys.modules.get("ray")  # loaded where this process is on Ray
    if ray is not None and ray.is_initialized():
        return ray.util.get_node_ip_address()
    with suppress(OSError):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("8.8.8.8", 80))  # a datagram socket only looks up the route
            return probe.getsockname()[0]
    return "127.0.0.1"


# -- Metrics as Prometheus reads them ----------------------------------------------------------------------------------


def prometheus_text(engine: RolloutEngine) -> str:
    """The answer to ``GET /metrics``: verl's counters of the engine, then the engine's own metrics."""
    labels = {"engine": engine.monitor.engine}
    version = -1 if engine.version is None else engine.version
    own = render(engine.monitor.totals() | engine.totals(), "counter", labels)
    return own + render({"running": engine.num_running, "version": version}, "gauge", labels) + engine.prometheus()


def render(values: Mapping[str, float], kind: str, labels: Mapping[str, str]) -> str:
    """``values`` as metrics of one ``kind``, counter or gauge, under verl's prefix."""
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    quoted = ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items())
    lines = []
    for name, value in values.items():
        full = _PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name) + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {full} {_HELP.get(name, name)}", f"# TYPE {full} {kind}", f"{full}{{{quoted}}} {value:.17g}"]
    return "".join(f"{line}\n" for line in lines)
