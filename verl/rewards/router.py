"""The router of a judge or classifier: an address of this machine, behind which are the servers of ``reward_model``.

Reward functions ask it as they would ask one OpenAI-compatible server, the client of a classifier by `Router.post`. It
limits the requests under way, their rate and that of their tokens, sends each to the server with the fewest, tries
again elsewhere what failed for now, and answers with an error that names the servers when all tries failed. It starts
before there is a server: requests wait for one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from aiohttp import ClientError, ClientResponseError, ClientSession, ClientTimeout, TCPConnector, web

from verl.config.reward import RewardRouterConfig
from verl.rewards.scorers import http_json

logger = logging.getLogger(__name__)

_MOST_BYTES = 256 << 20

_TEXTS = ("messages", "prompt", "input", "text", "input_ids", "tools", "query", "documents")
"""Fields of a request that the model reads."""

_ASKED = ("max_completion_tokens", "max_tokens", "max_new_tokens")
"""Fields that bound the tokens of an answer; the first of them counts."""

_PROMPTS = ("prompt", "text", "input_ids")
"""Fields that may list several prompts, each with answers of its own."""


class Pace:
    """Limits of requests and of tokens a minute: requests begin in turn, and no faster on average.

    What a request takes is estimated when it begins and put right by `correct`, for those that still wait too. A minute
    without requests saves nothing up.

    Args:
        requests: a minute; None: any number.
        tokens: a minute, likewise.
    """

    def __init__(self, requests: float | None, tokens: float | None):
        self.requests, self.tokens = requests, tokens
        self._turns, self._corrected = asyncio.Lock(), asyncio.Event()
        self._next_request = self._next_token = 0.0
        """Times, of the running loop's clock, from which the next request keeps each of the limits."""

    async def turn(self, tokens: int) -> None:
        """Wait until a request of so many tokens may begin."""
        if not (self.requests or self.tokens):
            return
        now = asyncio.get_running_loop().time
        async with self._turns:
            begins = now()
            while (wait_s := max(self._next_request, self._next_token) - now()) > 0:
                self._corrected.clear()
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._corrected.wait(), wait_s)
                    begins = now()
            # when it was due: a loop that wakes late takes nothing from the limits of the next
            begins = max(begins, self._next_request, self._next_token)
            if self.requests:
                self._next_request = begins + 60 / self.requests
            self._take(tokens, begins)

    def correct(self, estimated: int, tokens: int) -> None:
        """Count a request that was begun with ``estimated`` tokens as ``tokens``."""
        self._take(tokens - estimated, asyncio.get_running_loop().time())
        self._corrected.set()

    def _take(self, tokens: int, now: float) -> None:
        if self.tokens:
            start = max(now, self._next_token) if tokens > 0 else self._next_token
            self._next_token = start + 60 * tokens / self.tokens


def estimated_tokens(body: bytes) -> int:
    """Tokens that a request will take: those it asks for, of its text a quarter of the bytes; 0 for what is no JSON."""
    fields = _json(body)
    if not isinstance(fields, dict):
        return 0
    prompts = [fields[name] for name in _PROMPTS if isinstance(fields.get(name), list)]
    several = max((sum(isinstance(prompt, list | str) for prompt in listed) for listed in prompts), default=0)
    answers = max(1, several) * _number(fields, ("n",), 1)
    return sum(_tokens_of(fields.get(name)) for name in _TEXTS) + answers * _number(fields, _ASKED, 0)


def _number(fields: dict[str, Any], names: Sequence[str], default: int) -> int:
    params = fields.get("sampling_params")  # as SGLang's /generate has it
    found = [place[name] for place in (fields, params) if isinstance(place, dict) for name in names if name in place]
    return next((count for count in found if isinstance(count, int)), default)


def used_tokens(content: bytes) -> int | None:
    """Tokens that an answer says it took, as OpenAI's API (``usage``) and SGLang's (``meta_info``) do, else None."""
    answer = _json(content)
    found = [
        _counted(one.get("usage")) or _counted(one.get("meta_info"))
        for one in (answer if isinstance(answer, list) else [answer])
        if isinstance(one, dict)
    ]
    counts = [count for count in found if count is not None]
    return sum(counts) if counts else None


def _counted(usage: Any) -> int | None:
    if not isinstance(usage, dict):
        return None
    if isinstance(usage.get("total_tokens"), int):
        return usage["total_tokens"]
    names = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens")
    parts = [usage[name] for name in names if isinstance(usage.get(name), int)]
    return sum(parts) if parts else None


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _tokens_of(value: Any) -> int:
    """Token ids count as they are; images and other data in URLs do not count, the server knows their tokens."""
    if isinstance(value, str):
        return 0 if value.startswith("data:") else -(-len(value.encode()) // 4)
    if isinstance(value, dict):
        return sum(map(_tokens_of, value.values()))
    if isinstance(value, list):
        return sum(map(_tokens_of, value))
    return int(isinstance(value, int) and not isinstance(value, bool))


class Router:
    """Passes requests on to servers.

    Args:
        options: ``reward_model.router``.
        urls: of servers that run already.

    Attributes:
        address: ``HOST:PORT/SECRET``, to which paths such as ``/v1/chat/completions`` are appended. Whoever knows it
            may use the servers: their key stays here.
    """

    def __init__(self, options: RewardRouterConfig, urls: Sequence[str] = ()):
        self.options = options
        self._secret = secrets.token_urlsafe(12)
        self._urls: list[str] = []
        self._running: dict[str, int] = {}
        self._models: dict[str, str] = {}
        self._key: str | None = None
        self._pace = Pace(options.requests_per_minute, options.tokens_per_minute)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="verl-reward-router", daemon=True)
        self._thread.start()
        self.port: int = self._call(self._start())
        self.address = f"127.0.0.1:{self.port}/{self._secret}"
        if urls:
            self.use(urls, os.environ.get(options.api_key_env))

    def use(self, urls: Sequence[str], key: str | None) -> None:
        """Send requests to these servers from now on, with this key."""

        async def use() -> None:
            self._urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
            self._running, self._key = dict.fromkeys(self._urls, 0), key
            self._models.clear()
            self._has_servers.set()

        self._call(use())

    def close(self) -> None:
        """Stop listening; may be called twice."""
        if self._loop.is_closed():
            return
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30.0)

    async def _start(self) -> int:
        self._has_servers, self._gate = asyncio.Event(), asyncio.Semaphore(self.options.max_concurrent)
        timeout = ClientTimeout(total=self.options.timeout_s)
        self._session = ClientSession(connector=TCPConnector(limit=0), timeout=timeout)
        app = web.Application(client_max_size=_MOST_BYTES)
        app.router.add_route("*", f"/{self._secret}/{{path:.*}}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return self._runner.addresses[0][1]

    async def _stop(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await self._runner.cleanup()
        await self._session.close()

    def post(self, path: str, body: Any) -> Future[tuple[int, bytes, str]]:
        """Send JSON to a path of the servers: status, content and its type, as a client of `address` gets them."""
        sent = self._answer("POST", path, {}, json.dumps(body).encode(), "application/json")
        return asyncio.run_coroutine_threadsafe(sent, self._loop)

    async def _pass_on(self, request: web.Request) -> web.Response:
        body, kind = await request.read(), request.headers.get("Content-Type", "application/json")
        path = request.match_info["path"]
        status, content, kind = await self._answer(request.method, path, request.query, body, kind)
        return web.Response(status=status, body=content, headers={"Content-Type": kind})

    async def _answer(
        self, method: str, path: str, query: Mapping[str, str], body: bytes, kind: str
    ) -> tuple[int, bytes, str]:
        """Status, content and its type, of the first server that answers; 502 when all tries failed."""
        causes: list[str] = []
        wanted: str | None = None
        counts_tokens = self.options.tokens_per_minute is not None
        tokens = estimated_tokens(body) if counts_tokens else 0
        async with self._gate:
            for attempt in range(self.options.tries):
                if attempt:
                    # another server may take it before the one that has answered would
                    await asyncio.sleep(http_json.pause_s(attempt, wanted if len(self._urls) == 1 else None))
                wanted = None
                await self._has_servers.wait()
                await self._pace.turn(tokens)
                # of those with the fewest requests, another one at each try
                fewest = sorted(self._urls, key=lambda url: self._running[url])
                url = fewest[attempt % len(fewest)] if attempt else fewest[0]
                self._running[url] += 1
                try:
                    status, content, answers, wanted = await self._send(url, method, path, query, body, kind)
                except (ClientError, asyncio.TimeoutError, OSError) as error:
                    late = isinstance(error, asyncio.TimeoutError)
                    causes.append(f"{url}: {f'no answer in {self.options.timeout_s:g} s' if late else repr(error)}")
                    continue
                finally:
                    self._running[url] = max(0, self._running.get(url, 1) - 1)
                if counts_tokens and (used := used_tokens(content)) is not None:
                    self._pace.correct(tokens, used)
                if status not in http_json.RETRIED:
                    return status, content, answers
                causes.append(f"{url}: status {status}: {content[:300].decode(errors='replace')}")
        message = (
            f"the servers of reward_model ({', '.join(self._urls)}) did not answer {path} in {len(causes)} "
            f"tries; the last: {causes[-1]}. Look at the server's log, and raise "
            "reward_model.router.timeout_s or .tries if it is slow."
        )
        logger.warning("%s", message)
        answer = {"error": {"message": message, "type": "reward_servers"}}
        return 502, json.dumps(answer).encode(), "application/json"

    async def _send(
        self, url: str, method: str, path: str, query: Mapping[str, str], body: bytes, kind: str
    ) -> tuple[int, bytes, str, str | None]:
        """Status, content, its type and ``Retry-After`` of one server's answer."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        if body:
            headers["Content-Type"] = kind
        try:
            body = await self._with_model(url, path, body)
        except ClientResponseError as error:
            refusal = {"error": {"message": f"{url}/v1/models: {error.message}", "type": "reward_servers"}}
            return error.status, json.dumps(refusal).encode(), "application/json", None
        target = f"{url}/{path}"
        async with self._session.request(method, target, params=query, data=body or None, headers=headers) as answer:
            content, kind = await answer.read(), answer.headers.get("Content-Type", "application/json")
            return answer.status, content, kind, answer.headers.get("Retry-After")

    async def _with_model(self, url: str, path: str, body: bytes) -> bytes:
        """The body, with the server's name of its model where it names none."""
        if not path.startswith(("v1/", "classify", "pooling")) or not body:
            return body
        try:
            fields = json.loads(body)
        except ValueError:
            return body  # the server says what is wrong with it
        if not isinstance(fields, dict) or fields.get("model"):
            return body
        if url not in self._models:
            self._models[url] = self.options.model or await self._listed(url)
        return json.dumps({**fields, "model": self._models[url]}).encode()

    async def _listed(self, url: str) -> str:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        async with self._session.get(f"{url}/v1/models", headers=headers) as answer:
            answer.raise_for_status()
            found = await answer.json(content_type=None)
        return str(found["data"][0]["id"]) if found.get("data") else ""


_ROUTERS: dict[str, Router] = {}
"""The router of a run, by what it was made of; one at a time."""


def router_of(section: Any) -> Router | None:
    """The router of ``reward_model``, started if there is none; None: no server judges."""
    if not section.asks_servers:
        return None
    key = repr((os.getpid(), section.urls, section.router, dict(section.rollout), section.model.path))
    if key not in _ROUTERS:
        close_router()
        _ROUTERS[key] = Router(section.router, section.urls)
    return _ROUTERS[key]


def close_router() -> None:
    """Stop the router of a run that ends."""
    while _ROUTERS:
        _ROUTERS.popitem()[1].close()
