"""Clients of rollout servers where agent loops run in processes: the driver's, and that of each process.

Requests of all processes wait in the driver's one queue, which lends a slot of a server for each: it goes to the most
urgent request, whichever process has it. Tokens go between process and server, not through the driver.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from verl.workers.rollout.monitor import Span
from verl.workers.rollout.server.client import RolloutClient, Server
from verl.workers.rollout.server.messages import RolloutServerError

if TYPE_CHECKING:
    from verl.agents.workers import AgentLoopWorkers, Link, SentSample


class BorrowingClient(RolloutClient):
    """The client of a process to which the driver lends slots of the servers, one for each request.

    Args:
        tell: sends the driver a message, a method of `WorkersClient` and its arguments.
    """

    def __init__(self, addresses: Sequence[str], token: str | None, tell: Callable[..., None]):
        super().__init__(addresses, token)
        self._tell = tell
        self._keys = count(1)
        self._asked: dict[int, tuple[str, asyncio.Future]] = {}
        """Requests that wait for a slot, by key: id, and the future of the server's number."""
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._asked)

    def take(self, key: int, number: int | None, error: str | None) -> None:
        """Use the slot that was lent for a request, or give it back if that was aborted or cancelled meanwhile.

        Args:
            number: of the server; None: the driver aborted the request.
            error: why there is no server for it.
        """
        _, turn = self._asked.pop(key, ("", None))
        if turn is None or turn.done():
            if number is not None:
                self._release_server(self._servers[number])
        elif error is not None:
            turn.set_exception(RolloutServerError(error))
        else:
            turn.set_result(None if number is None else self._servers[number])

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """As `RolloutClient.abort`."""
        ids = None if request_ids is None else set(request_ids)
        for request_id, turn in self._asked.values():
            if (ids is None or request_id in ids) and not turn.done():
                turn.set_result(None)
        await super().abort(ids)

    async def close(self) -> None:
        """Close the connections; what waits for a slot fails."""
        self._is_closed = True
        for _, turn in self._asked.values():
            if not turn.done():
                turn.set_exception(self._closed_error())
        await super().close()

    def _enqueue(self, request_id: str, session: str | None, priority: int) -> asyncio.Future[Server | None]:
        if self._is_closed:
            raise self._closed_error()
        key, turn = next(self._keys), asyncio.get_running_loop().create_future()
        self._asked[key] = request_id, turn
        turn.add_done_callback(partial(self._withdraw, key))
        self._tell("borrow", key, request_id, session, priority)
        return turn

    def _withdraw(self, key: int, _: asyncio.Future) -> None:
        """Tell the driver if a request needs no slot any more for which none has come yet."""
        if self._asked.pop(key, None) is not None:
            self._tell("withdraw", key)

    def _release_server(self, server: Server) -> None:
        self._tell("give_back", server.number, server.error and str(server.error))

    @staticmethod
    def _closed_error() -> RolloutServerError:
        return RolloutServerError("the rollout servers of this request are no longer there: others take their place")


def shifted(spans: Iterable[Span], seconds: float) -> list[Span]:
    """Return spans on another clock."""
    return [Span(one.replica, one.submitted + seconds, one.started + seconds, one.ended + seconds) for one in spans]


class WorkersClient(RolloutClient):
    """The driver's client of rollout servers to which other processes send requests, too.

    Args:
        workers: the processes.
        addresses, token, max_running: as `RolloutClient`; with ``max_running`` it lends the slots to the processes.
        server_set: number of these servers: those that were started again have another.
    """

    def __init__(
        self,
        workers: "AgentLoopWorkers",
        addresses: Sequence[str],
        token: str,
        max_running: int | None,
        server_set: int,
    ):
        super().__init__(addresses, token, max_running)
        self.workers, self.server_set = workers, server_set
        self._asked: dict[tuple[Link, int], asyncio.Future[Server | None]] = {}
        """Turns of requests of processes that wait, by process and key."""
        self._lent: Counter[tuple[Link, int]] = Counter()
        """Slots by process and number of the server."""

    # what a process says

    def on_borrow(self, link: "Link", key: int, request_id: str, session: str | None, priority: int) -> None:
        """Lend a slot for a request when it has its turn."""
        self._asked[link, key] = turn = self._enqueue(request_id, session, priority)
        turn.add_done_callback(partial(self._lend, link, key))

    def on_withdraw(self, link: "Link", key: int) -> None:
        """Forget a request; a slot that is on its way comes back with `on_give_back`."""
        if (turn := self._asked.get((link, key))) is not None:
            turn.cancel()

    def on_give_back(self, link: "Link", number: int, failure: str | None) -> None:
        """Take a slot back.

        Args:
            failure: of the server, of which the other processes learn so.
        """
        server = self._servers[number]
        if failure is not None and server.error is None:
            server.error = RolloutServerError(failure)
        self._lent[link, number] -= 1
        self._release_server(server)

    def reclaim(self, link: "Link") -> None:
        """Take back all slots of a process that has ended; `_lend` lends it no more."""
        for server in self._servers:
            for _ in range(self._lent.pop((link, server.number), 0)):
                self._release_server(server)

    def _lend(self, link: "Link", key: int, turn: "asyncio.Future[Server | None]") -> None:
        del self._asked[link, key]
        if turn.cancelled():
            return
        error = turn.exception()
        server = turn.result() if error is None else None
        if server is not None and link.is_lost:
            self._release_server(server)
            return
        if server is not None:
            self._lent[link, server.number] += 1
        link.notify("lend", self.server_set, key, server and server.number, error and str(error))

    # what a scheduler asks for

    async def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """As `RolloutClient.abort`; samples that other processes run are stopped, by what is ``running``."""
        ids = None if request_ids is None else list(request_ids)
        await super().abort(ids)
        if ids:
            await self.workers.all("stop", ids)  # those of a process that is lost begin again, and are stopped then

    def take_spans(self, since: float | None = None) -> list[Span]:
        """As `RolloutClient.take_spans`, of all processes. Not from the event loop."""
        shift = time.time() - time.monotonic()
        asked = self.workers.all("spans", None if since is None else since + shift)
        found = self.workers.wait_for(asked)
        return [*super().take_spans(since), *(span for spans in found for span in shifted(spans, -shift))]

    async def hold(self) -> None:
        """Have samples with a gate send no request until `release`."""
        self.workers.released = None
        await self.workers.all("hold")

    async def release(self, version: int) -> None:
        """Let requests be sent again, under the weights of ``version``."""
        self.workers.released = version
        await self.workers.all("release", version)

    async def fetch_logs(self, samples: Mapping[str, "SentSample"], interrupts: bool = False) -> None:
        """Bring the progress logs of samples that run to their newest state.

        Args:
            samples: by id.
            interrupts: end their requests first; they wait for `release`.
        """
        if interrupts:
            self.workers.released = None
        for logs in await self.workers.all("logs", interrupts):
            for sample_id, log in logs.items():
                if (sample := samples.get(sample_id)) is not None and sample.running is not None:
                    sample.log.turns, sample.log.replies.replies = log.turns, log.replies.replies
