"""The process in which a user's function runs: loads it, calls it, and reports outcomes.

Started as ``main()`` with the number of an inherited socket. Imports neither torch nor anything else that is slow.
"""

import asyncio
import contextlib
import faulthandler
import inspect
import math
import os
import pickle
import random
import resource
import signal
import socket
import sys
import zlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from verl.sandbox.messages import LONGEST, TOKENIZER, describe, encode, framed, receive, taken_by
from verl.sandbox.outcomes import Failure, Outcome, Scored, scored, scored_batch
from verl.sandbox.supervisor import Limits, enter
from verl.utils.import_utils import load_extern_type


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    payload = receive(channel)
    if payload is None:
        return
    setup = pickle.loads(payload)
    limits: Limits = setup["limits"]
    # of the process only; the pool watches clock and output of each call, `_prepare` limits its CPU seconds
    missing = enter(Limits(None, None, limits.memory_mb, None, limits.processes, limits.network))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    sys.path[:] = setup["sys_path"]
    worker = Worker(channel, limits, setup["max_concurrent"])
    try:
        worker.function = load_extern_type(setup["path"], setup["name"])
    except BaseException as error:
        failure = Failure.of(error)
        worker.send({"failed": type(error).__name__, "cause": str(error), "trace": failure.trace})
        return
    worker.kwargs = setup["reward_kwargs"] | offered_to(worker.function, setup["offered"])
    worker.send({"ready": describe(worker.function), "missing": missing})
    worker.serve()


def offered_to(function: Callable, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the offered arguments that a function takes; the tokenizer is loaded from its folder."""
    if not offered:
        return {}
    try:
        names = taken_by(inspect.signature(function), offered)
    except (TypeError, ValueError):  # builtins may not tell
        return {}
    found = {name: offered[name] for name in names}
    if TOKENIZER in found:
        from verl.utils.tokenizer import hf_tokenizer  # transformers, which no other function needs

        found[TOKENIZER] = hf_tokenizer(found[TOKENIZER])
    return found


class Worker:
    """Calls one function with the arguments that arrive on a channel, and sends the outcomes back."""

    def __init__(self, channel: socket.socket, limits: Limits, max_concurrent: int):
        self.channel, self.limits, self.max_concurrent = channel, limits, max_concurrent
        self.function: Callable[..., Any]
        self.kwargs: dict[str, Any] = {}
        self.folder = os.getcwd()
        self.loop: asyncio.AbstractEventLoop | None = None

    def send(self, message: Any) -> None:
        # before the answer: `Process.read` takes output that is there by then for that of this call
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # the function may have closed it
                stream.flush()
        self.channel.sendall(framed(encode(message)))

    def serve(self) -> None:
        while (payload := receive(self.channel)) is not None:
            timeout_s, calls = pickle.loads(payload)
            if waiting := self._make(calls):
                self.send({"awaiting": True})
                self._await(waiting, timeout_s)

    def _make(self, calls: list[tuple[int, int | None, bytes]]) -> list[tuple[int, int | None, Any]]:
        """Make calls and answer them; returns those whose results are to be awaited."""
        waiting = []
        for number, count, call in calls:
            result = self._call(number, count, call)
            if inspect.isawaitable(result):
                waiting.append((number, count, result))
            else:
                self._answer(number, result)
        return waiting

    def _call(self, number: int, count: int | None, call: bytes) -> Any:
        """Return the outcomes, one a response, or of an async function the awaitable of its result."""
        self._prepare(call)
        try:
            args, kwargs = pickle.loads(call)
            result = self.function(*args, **{**self.kwargs, **kwargs})
            return result if inspect.isawaitable(result) else _judged(result, count)
        except BaseException as error:
            return [Failure.of(error)] * (count or 1)

    def _prepare(self, call: bytes) -> None:
        """Seed the random generators by the call and set its CPU limit, whichever calls came before it."""
        # of the pickled arguments: a call gets the same random numbers in any process and after any calls
        seed = zlib.crc32(call)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy.random")) is not None:
            numpy.seed(seed)
        if self.limits.cpu_s is not None:
            # counted from the start of the process, while the limit is of one call; soft, so that it can be raised
            used = resource.getrusage(resource.RUSAGE_SELF)
            seconds = math.ceil(used.ru_utime + used.ru_stime + self.limits.cpu_s)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))

    def _answer(self, number: int, outcomes: list[Scored | Failure]) -> None:
        with contextlib.suppress(OSError):
            # where the next call expects to be
            os.chdir(self.folder)
        message = {"number": number, "outcomes": [_written(outcome) for outcome in outcomes]}
        try:
            size = len(encode(message))
        except (ValueError, RecursionError, OverflowError) as error:
            size, reason = None, f"TypeError: the function returned what cannot be written down: {error}"
        else:
            reason = f"TypeError: the function returned {size // 2**20} MiB; {LONGEST // 2**20} MiB are the most"
        if size is None or size > LONGEST:
            failure = _written(Failure(Outcome.WRONG_TYPE, reason))
            message["outcomes"] = [failure] * len(outcomes)
        self.send(message)

    def _await(self, waiting: list[tuple[int, int | None, Any]], timeout_s: float) -> None:
        """Wait for calls, and for those that arrive meanwhile."""
        if self.loop is None:  # one for all calls: a session or semaphore that the module keeps stays usable
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        gate = asyncio.Semaphore(self.max_concurrent)

        async def watched(number: int, count: int | None, awaitable: Any, timeout_s: float) -> None:
            async with gate:
                task = asyncio.ensure_future(_guarded(awaitable))
                done, _ = await asyncio.wait({task}, timeout=timeout_s)
            task.cancel()  # no effect on one that is done
            late = Failure(Outcome.TIMEOUT, f"TimeoutError: it was under way for {timeout_s:g} s")
            result = task.result() if done else late
            is_failure = isinstance(result, Failure)
            self._answer(number, [result] * (count or 1) if is_failure else _judged(result, count))

        loop, running, is_idle = self.loop, set[asyncio.Task](), asyncio.Event()
        errors: list[BaseException] = []

        def ended(task: asyncio.Task) -> None:
            running.discard(task)
            if (error := task.exception()) is not None:
                errors.append(error)
            if not running:
                is_idle.set()

        def start(waiting: list[tuple[int, int | None, Any]], timeout_s: float) -> None:
            for one in waiting:
                running.add(task := loop.create_task(watched(*one, timeout_s)))
                task.add_done_callback(ended)

        def more() -> None:
            payload = receive(self.channel)
            if payload is None:  # `serve` finds the same
                loop.remove_reader(self.channel)
                return
            timeout_s, calls = pickle.loads(payload)
            start(self._make(calls), timeout_s)

        async def finish() -> None:
            while running:
                is_idle.clear()
                await is_idle.wait()
            # in the same turn of the loop: what arrives from here on is for `serve`
            loop.remove_reader(self.channel)

        start(waiting, timeout_s)
        loop.add_reader(self.channel, more)
        loop.run_until_complete(finish())
        for error in errors:
            raise error


async def _guarded(awaitable: Coroutine) -> Any:
    try:
        return await awaitable
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # a SystemExit would take the event loop down with it
        return Failure.of(error)


def _judged(result: Any, count: int | None) -> list[Scored | Failure]:
    return [scored(result)] if count is None else scored_batch(result, count)


def _written(outcome: Scored | Failure) -> list:
    if isinstance(outcome, Failure):
        return [outcome.kind.value, outcome.cause, outcome.trace]
    return [outcome.score, outcome.columns]
