"""A client in the engine's own process: requests enter between two steps, so which ends when is always the same."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from itertools import count
from typing import Any

from verl.workers.rollout.base import Completion, Request, RolloutEngine


class EngineClient:
    """Draws over submit, step and abort of an engine that is awake and synced.

    Args:
        engine: a real one.
        max_running: requests in the engine at most; the others wait, higher priority first.
    """

    def __init__(self, engine: RolloutEngine, max_running: int | None = None) -> None:
        self.engine = engine
        self.max_running = max_running
        self.num_steps = 0
        self._waiting: list[tuple[int, int, str, Request]] = []
        self._arrivals = count()
        self._answers: dict[str, asyncio.Future[Completion]] = {}
        self._request_ids: dict[int, str] = {}
        self._pump: asyncio.Task | None = None

    async def generate(
        self, request: Request, *, request_id: str | None = None, session: str | None = None, priority: int = 0
    ) -> Completion:
        request_id = request_id or f"unnamed {next(self._arrivals)}"
        assert request_id not in self._answers
        self._answers[request_id] = answer = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-priority, next(self._arrivals), request_id, request))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.ensure_future(self._step_until_empty())
        return await answer

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        names = set(self._answers if request_ids is None else request_ids)
        for item in [item for item in self._waiting if item[2] in names]:
            self._waiting.remove(item)
            self._answer(item[2], Completion([], [] if item[3].sampling.want_log_probs else None, "abort"))
        heapq.heapify(self._waiting)
        request_ids = [request_id for request_id, name in self._request_ids.items() if name in names]
        self._end(self.engine.abort(request_ids))

    async def health(self) -> list[dict[str, Any]]:
        return [{"version": self.engine.version}]

    async def close(self) -> None:
        """There is nothing to close."""

    num_servers = 1

    def take_spans(self) -> list:
        """Its clock would not be the same in two runs."""
        return []

    async def _step_until_empty(self) -> None:
        while self._waiting or self._request_ids:
            await asyncio.sleep(0)
            while self._waiting and (self.max_running is None or len(self._request_ids) < self.max_running):
                *_, name, request = heapq.heappop(self._waiting)
                self._request_ids[self.engine.submit(request, self.engine.version)] = name
            self._end(self.engine.step())
            self.num_steps += 1
            for _ in range(5):  # let those who were answered go on before the next step
                await asyncio.sleep(0)

    def _end(self, completions: dict[int, Completion]) -> None:
        for request_id, completion in completions.items():
            self._answer(self._request_ids.pop(request_id), completion)

    def _answer(self, name: str, completion: Completion) -> None:
        self._answers.pop(name).set_result(completion)
