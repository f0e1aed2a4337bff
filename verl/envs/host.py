"""Environments that may hang, crash or run away, behind an asynchronous interface: in killable processes or in threads.

    host = EnvironmentHost.of(config.env)
    environment = await host.open("FrozenLake", tag_config)
    answer = await environment.reset(seed, task)
    answer = await environment.step("right")
    await environment.close()

With ``env.num_workers=0`` each environment has a thread of this process. With more, it has a thread of one of that many
processes (`verl.envs.worker`), which are killed and started again when they are stuck, and end with this one.
"""

import asyncio
import atexit
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

from verl.envs.process import ALONE_MOST, WORKER_LOST, Failed, Process, settle
from verl.envs.worker import (
    Answer,
    EnvironmentThread,
    Threads,
    WrongAnswer,
    checked,
    coroutine,
    locate,
)
from verl.sandbox.outcomes import Failure, Outcome
from verl.utils.exit_codes import ExitCode

CLOSE_S = 5.0
"""Seconds in which an environment must close."""


class EnvironmentFailure(RuntimeError):
    """An environment did not begin an episode, or did not answer an action; the episode cannot go on.

    Attributes:
        kind: an `Outcome` (``timeout``, ``raised``, ``memory``, ``exit``, ``crash``, ``wrong_type``, ``not_finite``,
            ...), or ``worker_lost``: its process ended, and it may not have been the cause.
        cause: the message without the seed, the same for all episodes that fail in one way.
    """

    exit_class = ExitCode.DATA

    def __init__(self, kind: str, message: str, cause: str | None = None):
        super().__init__(message)
        self.kind, self.cause = kind, cause or message

    def __reduce__(self):
        return type(self), (self.kind, str(self), self.cause)


class EnvironmentHost:
    """Runs environments for one event loop.

    Args:
        options: the section ``env`` (`verl.config.env.EnvConfig`).
    """

    def __init__(self, options: Any):
        self.options = options
        self.loop = asyncio.get_running_loop()
        steps = options.max_concurrent_steps
        self.gate: Any = asyncio.Semaphore(steps) if steps else nullcontext()
        self.threads = Threads("environment")
        self._workers: list[Process | None] = [None] * options.num_workers
        self._alone = asyncio.Semaphore(ALONE_MOST)
        # those that have not ended yet, also those that get no environment any more
        self._processes: set[Process] = set()
        # seeds of environments that were under way when their process ended, by tag
        self.suspects: Counter[tuple[str, int]] = Counter()
        self._warned: set[tuple[str, str]] = set()
        self._number = 0
        _OPEN.add(self)

    @staticmethod
    def of(options: Any) -> "EnvironmentHost":
        """Return the host of the running event loop for these options."""
        loop = asyncio.get_running_loop()
        for key, host in list(_HOSTS.items()):
            if host.loop.is_closed():
                host.close()
                del _HOSTS[key]
        names = ("num_workers", "max_concurrent_steps", "reset_timeout", "step_timeout", "memory_mb")
        key = (id(loop), os.getpid(), *(getattr(options, name) for name in names))
        if key not in _HOSTS:
            _HOSTS[key] = EnvironmentHost(options)
        return _HOSTS[key]

    async def open(self, tag: str, tag_config: Any) -> "HostedEnvironment":
        """Return an environment of a tag (`verl.config.env.EnvTagConfig`). It is made by its first reset.

        Raises:
            ValueError: its type is not known, or cannot be found by other processes.
        """
        kind = locate(tag_config.type) if self.options.num_workers else tag_config.type
        return HostedEnvironment(self, tag, kind, dict(tag_config.kwargs))

    def close(self) -> None:
        """End all processes and idle threads. May be called twice."""
        _OPEN.discard(self)
        for process in self._processes:
            process.kill()
        self._workers = [None] * len(self._workers)
        self._processes.clear()
        self.threads.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the living processes."""
        return [process.popen.pid for process in self._processes]

    async def place(self, tag: str, seed: int) -> "Process | _InThreads":
        """Return what runs the next episode: the process with the fewest environments, or this one."""
        if not self._workers:
            return _InThreads(self)
        if self.suspects[tag, seed] > 0:
            self.suspects[tag, seed] -= 1
            await self._alone.acquire()
            return self._started(is_shared=False)
        loads = [len(one.environments) if one and one.takes_more else 0 for one in self._workers]
        place = loads.index(min(loads))
        process = self._workers[place]
        if process is None or not process.takes_more:
            process = self._workers[place] = self._started()
        return process

    def _started(self, is_shared: bool = True) -> Process:
        process = Process(self, is_shared)
        self._processes.add(process)
        return process

    def forget(self, process: "Process") -> None:
        """Drop a process that has ended."""
        if process in self._processes and not process.is_shared:
            self._alone.release()
        self._processes.discard(process)
        self._workers = [None if one is process else one for one in self._workers]

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def warn_of(self, tag: str, names: tuple[str, ...]) -> None:
        """Say once what of an environment's ``info`` is left out."""
        fresh = [name for name in names if (tag, name) not in self._warned]
        self._warned |= {(tag, name) for name in fresh}
        if fresh:
            warnings.warn(
                f"environment {tag!r}: info has {', '.join(map(repr, fresh))}, which is neither a finite number nor a "
                "bool nor a short text, and is left out.",
                stacklevel=2,
            )


_HOSTS: dict[tuple, EnvironmentHost] = {}
_OPEN: weakref.WeakSet[EnvironmentHost] = weakref.WeakSet()


@atexit.register
def close_hosts(loop: asyncio.AbstractEventLoop | None = None) -> None:
    """End the processes of every host, or of the hosts of one event loop."""
    for host in list(_OPEN):
        if loop is None or host.loop is loop:
            host.close()
    for key, host in list(_HOSTS.items()):
        if loop is None or host.loop is loop:
            del _HOSTS[key]


class HostedEnvironment:
    """One environment of an `EnvironmentHost`.

    A call that is cancelled goes on, and calling again with the same action waits for its answer: an environment that
    outlives a cancelled episode is asked nothing twice.
    """

    def __init__(self, host: EnvironmentHost, tag: str, kind: str, options: dict[str, Any]):
        self.host, self.tag, self.kind, self.options = host, tag, kind, options
        self.seed: int | None = None
        self._place: Process | _InThreads | None = None
        self._number = 0
        self._under_way: tuple[tuple, asyncio.Task] | None = None
        self._failure: EnvironmentFailure | None = None

    async def reset(self, seed: int, task: Mapping[str, Any] | None = None) -> Answer:
        """Begin an episode.

        Raises:
            EnvironmentFailure: it did not within ``env.reset_timeout``, raised, or its process ended.
        """
        self.seed = int(seed)
        return await self._call("reset", (self.seed, dict(task or {})), self.host.options.reset_timeout, ("reset",))

    async def step(self, action: str) -> Answer:
        """Answer the policy's text.

        Raises:
            EnvironmentFailure: it did not within ``env.step_timeout``, raised, or its process ended.
        """
        return await self._call("step", (action,), self.host.options.step_timeout, ("step", action))

    async def frame(self) -> str | None:
        """Return how the environment looks; None: it does not tell."""
        return await self._call("frame", (), self.host.options.step_timeout, ("frame",))

    async def close(self) -> None:
        """Let the environment close. One that raises or takes longer than 5 s is left to itself, with a warning."""
        place, self._place = self._place, None
        if self._under_way is not None:
            self._under_way[1].cancel()
            self._under_way = None
        if place is None:
            return
        if self._failure is None:
            future = place.call(self._number, "close", ())
            try:
                done, _ = await asyncio.wait({future}, timeout=CLOSE_S)
                failed = future.result() if done else await self._give_up(place, CLOSE_S, "its close")
            finally:
                place.release(self._number)
            if isinstance(failed, Failed) and failed.kind != WORKER_LOST:
                text = f"close failed, {failed.kind}: {failed.cause}\n{failed.trace}".strip()
                warnings.warn(f"environment {self.tag!r} (seed {self.seed}): {text}", stacklevel=2)
        else:
            place.release(self._number)

    async def _call(self, name: str, arguments: tuple, seconds: float, key: tuple) -> Any:
        if self._failure is not None:
            raise self._failure
        if self._under_way is None or self._under_way[0] != key:
            if self._under_way is not None:
                self._under_way[1].cancel()
            task = asyncio.ensure_future(self._answer(name, arguments, seconds))
            # an episode that was cancelled may never come back for it
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._under_way = key, task
        # when this raises because it is cancelled, the call stays under way
        answer = await asyncio.shield(self._under_way[1])
        self._under_way = None
        return answer

    async def _answer(self, name: str, arguments: tuple, seconds: float) -> Any:
        if self._place is None:
            if name != "reset":
                raise EnvironmentFailure("closed", f"environment {self.tag!r}: {name} before reset.")
            # before the gate: an environment that waits for its place must not keep others from their steps
            self._place = await self.host.place(self.tag, self.seed or 0)
            self._number = self._place.open(self)
        await self._place.is_ready()
        async with self.host.gate:
            future = self._place.call(self._number, name, arguments)
            done, _ = await asyncio.wait({future}, timeout=seconds)
            if done:
                result = future.result()
            else:
                result = await self._give_up(self._place, seconds, f"env.{name}_timeout")
        if not isinstance(result, Failed):
            try:
                return self._taken(name, result)
            except WrongAnswer as error:
                result = Failed(Outcome.WRONG_TYPE.value, str(error))
        cause = f"{name} failed, {result.kind}: {result.cause}\n{result.trace}".strip()
        self._failure = EnvironmentFailure(
            result.kind, f"environment {self.tag!r} (seed {self.seed}): {cause}", f"environment {self.tag!r}: {cause}"
        )
        raise self._failure

    async def _give_up(self, place: "Process | _InThreads", seconds: float, limit: str) -> Failed:
        self._failure = EnvironmentFailure("closed", f"environment {self.tag!r} has failed.")
        stack = await place.abandon(self._number)
        return Failed(Outcome.TIMEOUT.value, f"no answer within {seconds:g} s ({limit})", stack)

    def _taken(self, name: str, result: Any) -> Any:
        """The value of a call; from a process it is a message, which is checked again."""
        if name == "frame":
            return result if isinstance(result, str) else None
        if not isinstance(result, Answer):
            result = _answer_from(result, is_reset=name == "reset")
        self.host.warn_of(self.tag, result.dropped)
        return result


def _answer_from(value: Any, is_reset: bool) -> Answer:
    try:
        observation = value["messages"] if value["text"] is None else value["text"]
        middle = () if is_reset else (value["reward"], value["terminated"], value["truncated"])
        answer = checked((observation, *middle, value["info"]), is_reset, value["state_id"])
        dropped = tuple(map(str, value["dropped"]))
    except (KeyError, TypeError) as error:
        if isinstance(error, WrongAnswer):
            raise
        raise WrongAnswer(f"the process sent what is no answer: {error!r}") from None
    return Answer(**{**vars(answer), "dropped": dropped})


# -- In this process --------------------------------------------------------------------------------------------------


class _InThreads:
    """One environment in a thread of this process."""

    def __init__(self, host: EnvironmentHost):
        self.host = host
        self._thread: EnvironmentThread

    def open(self, environment: HostedEnvironment) -> int:
        loop = self.host.loop

        def submit(awaitable: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(coroutine(awaitable), loop)

        self._thread = EnvironmentThread(self.host.threads, environment.kind, environment.options, submit)
        return 0

    async def is_ready(self) -> None:
        pass

    def call(self, number: int, name: str, arguments: tuple) -> asyncio.Future:
        loop = self.host.loop
        future = loop.create_future()

        def done(result: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(settle, future, _failed(result))

        self._thread.call(name, arguments, done)
        return future

    async def abandon(self, number: int) -> str:
        return self._thread.abandon()

    def release(self, number: int) -> None:
        pass


def _failed(result: Any) -> Any:
    if isinstance(result, Failure):
        return Failed(result.kind.value, result.cause, result.trace)
    return result
