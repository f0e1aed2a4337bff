"""Requests to rollout servers: to the least loaded, or to the one that holds the conversation; the urgent ones first.

One client for all servers of a run, used from one event loop. Knows no engine.
"""

from __future__ import annotations

import asyncio
import heapq
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp

from verl.workers.rollout.base import Completion, Request, empty_completion
from verl.workers.rollout.monitor import Span
from verl.workers.rollout.server.messages import (
    BINARY,
    RolloutServerError,
    allow_many_connections,
    completion_from_json,
    pack,
    request_to_json,
    unpack,
)

_SESSIONS = 100_000  # conversations whose server is remembered
_SPANS = 1_000_000  # requests whose times are kept until `take_spans`
_MAX_NAMED = 4


@dataclass
class Server:
    """A rollout server, as its client knows it."""

    address: str
    number: int
    load: int = 0
    """Requests that have their turn."""
    running: dict[str, Request] = field(default_factory=dict)
    error: RolloutServerError | None = None


@dataclass(order=True)
class _Waiting:
    urgency: int
    arrival: int
    request_id: str = field(compare=False)
    session: str | None = field(compare=False)
    turn: asyncio.Future = field(compare=False)


class RolloutClient:
    """Sends requests to the servers of a run.

    Args:
        addresses: URLs of the servers.
        token: what they want in the header; None: nothing.
        max_running: requests under way at one server at most; the others wait here. None: all go at once.
        timeout_s: seconds one request may take; None: for ever.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        token: str | None = None,
        max_running: int | None = None,
        timeout_s: float | None = None,
    ):
        if not addresses:
            raise ValueError("RolloutClient(addresses=[]): there is no server to ask. Name at least one.")
        self.max_running = max_running
        self._servers = [Server(address.rstrip("/"), number) for number, address in enumerate(addresses)]
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_read=timeout_s)
        self._waiting: list[_Waiting] = []
        self._arrivals = count()
        self._server_of_session: OrderedDict[str, Server] = OrderedDict()
        self._http: aiohttp.ClientSession | None = None
        self._spans: deque[Span] = deque(maxlen=_SPANS)
        self._running: dict[str, tuple[str, float, float]] = {}

    @property
    def num_servers(self) -> int:
        """Servers there are."""
        return len(self._servers)

    def take_spans(self, since: float | None = None) -> list[Span]:
        """Times and servers of the requests that ended since the last call.

        Args:
            since: a time of `time.monotonic`: running requests too, as if they ended now, and no time before it.
        """
        spans = list(self._spans)
        self._spans.clear()
        if since is None:
            return spans
        now = time.monotonic()
        spans += [Span(*began, now) for began in self._running.values()]
        return [
            Span(one.replica, max(since, one.submitted), max(since, one.started), one.ended)
            for one in spans
            if one.ended > since
        ]

    @property
    def num_running(self) -> int:
        """Requests under way."""
        return sum(len(server.running) for server in self._servers)

    @property
    def num_waiting(self) -> int:
        """Requests that wait here for a server with room."""
        return len(self._waiting)

    async def generate(
        self,
        request: Request,
        *,
        request_id: str | None = None,
        session: str | None = None,
        priority: int = 0,
    ) -> Completion:
        """Generate one response. Cancelling the call aborts the request.

        Args:
            request_id: for `abort`; unlike that of any other running request. None: made up.
            session: requests of one session go to one server, which has read their beginning before.
            priority: among the requests that wait, higher ones go first.

        Raises:
            ValueError: the server cannot serve this request; says why.
            RolloutServerError: the server has ended or its engine failed.
        """
        request_id, submitted = request_id or uuid.uuid4().hex, time.monotonic()
        server = await self._acquire_server(request_id, session, priority)
        if server is None:  # aborted while it waited
            return empty_completion(request)
        started = time.monotonic()
        try:
            if any(request_id in other.running for other in self._servers):
                raise ValueError(f"request_id={request_id!r} is in use by a running request. Give each its own.")
            server.running[request_id] = request
            self._running[request_id] = (server.address, submitted, started)
            try:
                body = await self._call(server, "/generate", pack(request_to_json(request, request_id, priority)))
            finally:
                del server.running[request_id], self._running[request_id]
        finally:
            self._release_server(server)
            self._spans.append(Span(server.address, submitted, started, time.monotonic()))
        return completion_from_json(body)

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End these requests, or all that are under way or wait: their `generate` returns the tokens so far."""
        if request_ids is None:
            waiting = [item.request_id for item in self._waiting]
            request_ids = [*waiting, *(request_id for server in self._servers for request_id in server.running)]
        aborted = set(request_ids)
        for item in self._waiting:
            if item.request_id in aborted and not item.turn.done():
                item.turn.set_result(None)
        self._waiting = [item for item in self._waiting if not item.turn.done()]
        heapq.heapify(self._waiting)
        live = [server for server in self._servers if server.error is None]
        by_server = [(server, sorted(aborted & server.running.keys())) for server in live]
        await asyncio.gather(*(self._call(s, "/abort", {"request_ids": ids}) for s, ids in by_server if ids))

    async def health(self) -> list[dict[str, Any]]:
        """The health report of each server."""
        return [await self._call(server, "/health") for server in self._servers]

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    # -- queue and choice of server ------------------------------------------------------------------------------------

    async def _acquire_server(self, request_id: str, session: str | None, priority: int) -> Server | None:
        """Wait for a free slot at a server; None if `abort` came first."""
        turn = self._enqueue(request_id, session, priority)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None and turn.result() is not None:
                self._release_server(turn.result())
            raise

    def _enqueue(self, request_id: str, session: str | None, priority: int) -> asyncio.Future[Server | None]:
        turn: asyncio.Future[Server | None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, _Waiting(-priority, next(self._arrivals), request_id, session, turn))
        self._dispatch_waiting()
        return turn

    def _release_server(self, server: Server) -> None:
        server.load -= 1
        self._dispatch_waiting()

    def _dispatch_waiting(self) -> None:
        """Send waiting requests for which a server has room, the most urgent first."""
        kept: list[_Waiting] = []
        while self._waiting and any(self._has_room(server) for server in self._servers):
            item = heapq.heappop(self._waiting)
            if item.turn.done():  # cancelled
                continue
            try:
                server = self._choose(item.session)
            except RolloutServerError as error:
                item.turn.set_exception(error)
                continue
            if server is None:  # its own server is full
                kept.append(item)
                continue
            server.load += 1
            item.turn.set_result(server)
        for item in kept:
            heapq.heappush(self._waiting, item)

    def _has_room(self, server: Server) -> bool:
        return server.error is not None or self.max_running is None or server.load < self.max_running

    def _choose(self, session: str | None) -> Server | None:
        """The session's server, or the least loaded; None if it is full."""
        if session is not None and session in self._server_of_session:
            self._server_of_session.move_to_end(session)
            server = self._server_of_session[session]
        else:
            live = [server for server in self._servers if server.error is None]
            server = min(live or self._servers, key=lambda server: server.load)
            if session is not None and self._has_room(server):
                self._server_of_session[session] = server
                if len(self._server_of_session) > _SESSIONS:
                    self._server_of_session.popitem(last=False)
        if server.error is not None:
            raise RolloutServerError(str(server.error))
        return server if self._has_room(server) else None

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    async def _call(self, server: Server, path: str, body: Any = None) -> Any:
        """POST a body, packed or to be written as JSON, or GET without one."""
        method = "GET" if body is None else "POST"
        sent = {"data": body, "headers": {"Content-Type": BINARY}} if isinstance(body, bytes) else {"json": body}
        try:
            async with self._session().request(method, server.address + path, **sent) as answer:
                is_packed = answer.content_type == BINARY
                content = unpack(await answer.read()) if is_packed else await answer.json(content_type=None)
                status = answer.status
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError) as error:
            if server.error is None:
                server.error = RolloutServerError(self._failure_message(server, f"{type(error).__name__}: {error}"))
            raise RolloutServerError(str(server.error)) from error
        if status < 400 or path == "/health":
            return content
        message = content["error"]["message"]
        if status < 500:
            raise ValueError(f"The rollout server at {server.address} refused a request: {message}")
        raise RolloutServerError(self._failure_message(server, message))

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            allow_many_connections()
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
            self._http = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
        return self._http

    @staticmethod
    def _failure_message(server: Server, cause: str) -> str:
        last = list(server.running.items())[-_MAX_NAMED:]
        listed = ", ".join(
            f"{request_id} (prompt of {len(request.prompt_ids)} tokens, at most {request.sampling.max_tokens} more)"
            for request_id, request in last
        )
        load = f"It had {len(server.running)} requests under way, the last of them: {listed}." if last else ""
        return f"The rollout server at {server.address} failed: {cause}. {load}".rstrip()
