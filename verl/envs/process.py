"""A process that runs environments (`verl.envs.worker`), seen from its host: its start, calls and messages, its end."""

import asyncio
import os
import pickle
import re
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.envs.worker import MAX_PROCESSES
from verl.sandbox.messages import BadFrame, FrameReader, framed, start_child
from verl.sandbox.outcomes import Outcome
from verl.sandbox.pool import stack_of
from verl.sandbox.supervisor import end, outcome_of

if TYPE_CHECKING:
    from verl.envs.host import EnvironmentHost, HostedEnvironment

FORWARD_UP_TO = 256 * 1024
"""Bytes of a process's output that are shown."""

ALONE_MOST = 8
"""Processes for one environment each: in them those run again that were under way when their process ended and may
have been the cause. Further ones wait."""

ABANDONED_MOST = 8
"""Hanging environments after which a process gets no new ones, and ends with the last that it has."""

START_S = 120.0
"""Seconds in which a process must have started."""

ANSWER_S = 5.0
"""Seconds in which a process must answer that it gave up an environment; else it is stuck, and killed."""

WORKER_LOST = "worker_lost"
"""Kind of a failure that another environment of the same process caused."""


_CURRENT_THREAD = re.compile(rb"Current thread 0x([0-9a-f]+)")


class Failed(NamedTuple):
    """A call without an answer."""

    kind: str
    cause: str
    trace: str = ""


def settle(future: asyncio.Future, result: Any) -> None:
    if not future.done():
        future.set_result(result)


class _Output(asyncio.Protocol):
    """What a process prints: the first 256 KiB are shown, and 4 KiB from a fatal error on are kept."""

    def __init__(self, stream: Any):
        self.stream, self.shown, self.last_words = stream, 0, b""

    def data_received(self, data: bytes) -> None:
        words = self.last_words + data
        fatal = words.find(b"Fatal Python error")
        self.last_words = words[-64:] if fatal < 0 else words[fatal : fatal + 4096]
        if self.shown <= FORWARD_UP_TO:
            self.shown += len(data)
            self.stream.write(data.decode("utf-8", "replace"))


class Process(asyncio.Protocol):
    """A process that runs environments, as its host sees it.

    Args:
        is_shared: False: it is for one environment, and ends with it.
    """

    def __init__(self, host: "EnvironmentHost", is_shared: bool = True):
        self.host, self.is_shared, self.takes_more, self.has_ended = host, is_shared, is_shared, False
        self.environments: dict[int, HostedEnvironment] = {}
        self._unopened: set[int] = set()
        # environments by the thread that they run in
        self._threads: dict[Any, Any] = {}
        self._calls: dict[int, tuple[int, asyncio.Future]] = {}
        self._reader, self._abandoned = FrameReader(), 0
        self._cause: Failed | None = None
        # one order of sets of strings in all processes, or an episode could depend on the process
        env = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "4", **os.environ}
        pipe = subprocess.PIPE
        self.popen, self._channel = start_child("verl.envs.worker", env, stdout=pipe, stderr=pipe)
        self._words = _Output(sys.stderr)
        self._ready = host.loop.create_future()
        self._starting = host.loop.create_task(self._start())

    async def _start(self) -> None:
        loop = self.host.loop
        self._transport, _ = await loop.create_connection(lambda: self, sock=self._channel)
        await loop.connect_read_pipe(lambda: _Output(sys.stdout), self.popen.stdout)
        await loop.connect_read_pipe(lambda: self._words, self.popen.stderr)
        setup = {"memory_mb": self.host.options.memory_mb, "sys_path": list(sys.path)}
        self._transport.write(framed(pickle.dumps(setup)))

    async def is_ready(self) -> None:
        """Wait until it has started; then a call reaches it, or fails with the way it ended."""
        if not self._ready.done():
            done, _ = await asyncio.wait({self._ready}, timeout=START_S)
            if not done:
                await self._end(Failed("start", f"its process has not started within {START_S:g} s"))

    # -- calls ---------------------------------------------------------------------------------------------------------

    def open(self, environment: "HostedEnvironment") -> int:
        number = self.host.next_number()
        self.environments[number] = environment
        self._unopened.add(number)
        return number

    def call(self, number: int, name: str, arguments: tuple) -> asyncio.Future:
        future = self.host.loop.create_future()
        if self.has_ended:
            future.set_result(self._lost(number))
            return future
        if number in self._unopened:
            self._unopened.discard(number)
            environment = self.environments[number]
            self._send(0, number, "open", pickle.dumps((environment.kind, environment.options)))
        request = self.host.next_number()
        self._calls[request] = number, future
        try:
            self._send(request, number, name, pickle.dumps(arguments))
        except Exception as error:  # whatever an object's own __reduce__ raises
            del self._calls[request]
            cause = f"the arguments cannot be sent to its process: {type(error).__name__}: {error}"
            future.set_result(Failed(Outcome.RAISED.value, cause))
        return future

    def _send(self, *request: Any) -> None:
        self._transport.write(framed(pickle.dumps(request)))

    async def abandon(self, number: int) -> str:
        """Give up an environment that does not answer. Returns its stack; kills a process that is stuck."""
        self._calls = {request: call for request, call in self._calls.items() if call[0] != number}
        self._abandoned += 1
        if self._abandoned >= ABANDONED_MOST:
            self.takes_more = False
        answer = None
        if not self.has_ended:
            request, future = self.host.next_number(), self.host.loop.create_future()
            self._calls[request] = number, future
            self._send(request, number, "abandon", b"")
            done, _ = await asyncio.wait({future}, timeout=ANSWER_S)
            self._calls.pop(request, None)
            answer = future.result() if done else None
        if isinstance(answer, str):
            return answer[-4000:]
        named = self._environment_named(number)
        await self._end(Failed(WORKER_LOST, f"its process was stuck and was killed, while {named} did not answer"))
        return ""

    def release(self, number: int) -> None:
        """Forget an environment that is closed."""
        self.environments.pop(number, None)
        if not self.takes_more and not self.environments and not self.has_ended:
            self.host.loop.create_task(self._end(Failed(WORKER_LOST, "its process was not needed any more")))

    def _environment_named(self, number: int) -> str:
        environment = self.environments.get(number)
        return f"{environment.tag!r} (seed {environment.seed})" if environment else "an environment"

    # -- messages and the end ------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._take(message)
        except BadFrame as error:
            cause = f"its process broke the protocol: {error}"
            self.host.loop.create_task(self._end(Failed(Outcome.CRASH.value, cause)))

    def _take(self, message: Any) -> None:
        if not isinstance(message, dict):
            raise BadFrame(f"a message of type {type(message).__name__}")
        if "ready" in message:
            settle(self._ready, None)
            return
        if "thread" in message:
            self._threads[message["thread"]] = message.get("environment")
            return
        # an answer that came too late has no call any more
        _, future = self._calls.pop(message.get("number"), (0, None))
        if future is None:
            return
        if message.get("is_blocked"):
            settle(future, None)
        elif "failure" in message:
            settle(future, _read_failure(message["failure"]))
        else:
            settle(future, message.get("value"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.has_ended:
            self.host.loop.create_task(self._end(None))

    def kill(self) -> None:
        """End the process and all below it, at once."""
        self.has_ended = True
        with suppress(subprocess.TimeoutExpired):
            end(self.popen)

    async def _end(self, cause: Failed | None) -> None:
        """End the process, or learn how it ended (``cause`` None), and fail the calls under way."""
        if self.has_ended:
            return
        self.has_ended, self.takes_more, self._cause = True, False, cause
        await asyncio.wait({self._starting})
        # one that has hung up is ending by itself, and its exit code tells how
        deadline = time.monotonic() + (2.0 if cause is None else 0.0)
        while self.popen.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await self.host.loop.run_in_executor(None, self.kill)
        self.host.forget(self)
        self._transport.close()
        self._cause = cause = cause or self._how_it_ended()
        calls, self._calls = list(self._calls.values()), {}
        in_thread = _CURRENT_THREAD.search(self._words.last_words)
        guilty = self._threads.get(int(in_thread[1], 16)) if in_thread else None
        if guilty is None and len(calls) == 1:
            guilty = calls[0][0]
        for number, future in calls:
            environment = self.environments.get(number)
            # of several under way each will tell when it runs again, alone
            if environment is not None and environment.seed is not None and guilty in (None, number):
                self.host.suspects[environment.tag, environment.seed] += 1
            settle(future, cause if number == guilty else self._lost(number))
        settle(self._ready, None)

    def _lost(self, number: int) -> Failed:
        cause = self._cause or Failed(WORKER_LOST, "its process is ending")
        return Failed(WORKER_LOST, f"{cause.cause} ({len(self.environments)} environments were in it)", cause.trace)

    def _how_it_ended(self) -> Failed:
        code = self.popen.returncode
        outcome = outcome_of(-9 if code is None else code)
        causes = {
            Outcome.MEMORY: f"its process held more than env.memory_mb={self.host.options.memory_mb} MiB",
            Outcome.PROCESSES: f"its process had more than {MAX_PROCESSES} processes at a time",
            Outcome.CRASH: f"its process was ended by signal {-(code or -9)}",
        }
        cause = causes.get(outcome, f"its process ended with exit code {code}")
        kind = Outcome.EXIT if outcome is Outcome.DONE else outcome
        # the thread that failed is written first
        return Failed(kind.value, cause, stack_of(self._words.last_words.partition(b"\n\nThread")[0]))


def _read_failure(value: Any) -> Failed:
    try:
        kind, cause, trace = value
        return Failed(Outcome(kind).value, str(cause), str(trace))
    except (TypeError, ValueError):
        raise BadFrame("a failure without a kind") from None
