"""One sandbox process, seen from outside: its start, its calls and messages, its outcome."""

import atexit
import contextlib
import logging
import os
import pickle
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from verl.sandbox.messages import BadFrame, FrameReader, framed, signature_of, start_child, taken_by, without_keys
from verl.sandbox.outcomes import Failure, NotCalled, Outcome, SandboxError, Scored
from verl.sandbox.supervisor import MIB, Limits, descendants, end, outcome_of

logger = logging.getLogger(__name__)

_FORWARD_UP_TO = 256 * 1024
"""Bytes of a hand-over's output that are shown."""

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


@dataclass(frozen=True)
class Call:
    """One call: its number, the number of responses it scores (None: one, by itself), its pickled arguments."""

    number: int
    count: int | None
    arguments: bytes


@dataclass
class Process:
    """A worker process, its pipes and its open calls."""

    setup: dict[str, Any]
    limits: Limits
    keys: Sequence[str] = ()
    popen: subprocess.Popen = field(init=False)
    channel: socket.socket = field(init=False)
    open_calls: list[Call] = field(default_factory=list)
    answered: int = 0
    is_ready: bool = False
    is_awaiting: bool = False
    since: float = 0.0
    printed: int = 0
    last_words: bytes = b""
    _forwarded: int = 0

    def __post_init__(self):
        # one order of sets of strings in all processes, or a score could depend on the process
        env, pipe = {"PYTHONHASHSEED": "0", **without_keys(os.environ, self.keys)}, subprocess.PIPE
        self.popen, self.channel = start_child("verl.sandbox.worker", env, stdout=pipe, stderr=pipe)
        self.channel.setblocking(False)
        self._reader, self.unsent = FrameReader(), bytearray()
        for stream in (self.popen.stdout, self.popen.stderr):
            os.set_blocking(stream.fileno(), False)
        self._send(pickle.dumps(self.setup))
        self.since = time.monotonic()

    def give(self, calls: list[Call], timeout_s: float) -> None:
        """Hand over calls, to be answered one after the other; while calls are awaited, more of them."""
        self.is_awaiting &= bool(self.open_calls)
        self.open_calls += calls
        self._send(pickle.dumps((timeout_s, [(call.number, call.count, call.arguments) for call in calls])))
        self.since, self.printed, self._forwarded = time.monotonic(), 0, 0

    def _send(self, payload: bytes) -> None:
        self.unsent += framed(payload)
        self.write()

    def write(self) -> None:
        """Send as much of the unsent bytes as the channel takes without blocking."""
        # a broken pipe is no error here: `read` finds the end of the process, and its outcome
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self.unsent:
                del self.unsent[: self.channel.send(self.unsent)]

    def read(self) -> tuple[list[dict], bool]:
        """Return the messages since the last call, and whether the process is still there."""
        # before the messages: `_take` starts a new count of output with each, and this is of the calls before it
        self.forward_output()
        messages: list[dict] = []
        is_there = False
        try:
            while data := self.channel.recv(1 << 20):
                messages += self._reader.feed(data)
        except BlockingIOError:
            is_there = True
        except OSError:
            pass
        for message in messages:
            if not isinstance(message, dict):
                raise BadFrame(f"a message of type {type(message).__name__}")
        return messages, is_there

    def forward_output(self) -> None:
        """Print the output of the process, the first 256 KiB of a hand-over, and count its bytes."""
        for pipe, stream in ((self.popen.stdout, sys.stdout), (self.popen.stderr, sys.stderr)):
            with contextlib.suppress(BlockingIOError, ValueError):
                while data := os.read(pipe.fileno(), 1 << 16):
                    self.printed += len(data)
                    self._forwarded += len(data)
                    if stream is sys.stderr:
                        self.last_words = (self.last_words + data)[-4096:]
                    if self._forwarded <= _FORWARD_UP_TO:
                        stream.write(data.decode("utf-8", "replace"))
                    # one that prints faster than this reads would never let go of the driver
                    if self._prints_too_much():
                        return

    def _prints_too_much(self) -> bool:
        return self.limits.output_mb is not None and self.printed > self.limits.output_mb * MIB

    def excess(self, timeout_s: float) -> Failure | None:
        """Return the failure of an open call that is over a limit, or None."""
        if self._prints_too_much():
            return Failure(Outcome.OUTPUT, f"OutputError: it printed more than {self.limits.output_mb} MiB in one call")
        if time.monotonic() - self.since > timeout_s:
            return Failure(Outcome.TIMEOUT, f"TimeoutError: it was under way for {timeout_s:g} s", self._stack())
        return None

    def _stack(self) -> str:
        """Return the stack that faulthandler writes on SIGUSR1; empty if there is none within 0.2 s."""
        below = list(descendants(self.popen.pid))
        program = below[1] if len(below) > 1 else None  # after init
        # before it is ready SIGUSR1 may have no handler yet, and would end it
        if program is None or not self.is_ready:
            return ""
        self.forward_output()
        self.last_words = b""
        with contextlib.suppress(OSError):
            os.kill(program, signal.SIGUSR1)
        deadline = time.monotonic() + 0.2
        # faulthandler writes the innermost frame first: with the worker's own all of the user's are there
        while time.monotonic() < deadline and b"verl/sandbox/worker.py" not in self.last_words:
            time.sleep(0.005)
            self._gather_words()
        return stack_of(self.last_words)

    def _gather_words(self) -> None:
        with contextlib.suppress(BlockingIOError, ValueError):
            while data := os.read(self.popen.stderr.fileno(), 1 << 16):
                self.last_words = (self.last_words + data)[-65536:]

    def end(self) -> Failure:
        """End the process and all below it; returns the failure for the way it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            # one that has hung up is ending by itself, and its exit code tells how
            self.popen.wait(0.5 if self.popen.poll() is None and self._has_hung_up() else 0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            end(self.popen)
        self._gather_words()
        code = self.popen.returncode
        for closed in (self.channel, self.popen.stdout, self.popen.stderr):
            closed.close()
        return _failure(-9 if code is None else code, self.limits, stack_of(self.last_words))

    def _has_hung_up(self) -> bool:
        try:
            return not self.channel.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


@cache
def _warn_of_network(cause: str) -> None:
    logger.warning("reward_model.sandbox.network=false has no effect: this system does not grant %s.", cause)


def _failure(code: int, limits: Limits, trace: str) -> Failure:
    outcome = outcome_of(code)
    if outcome is Outcome.CRASH:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
        return Failure(outcome, f"ProcessError: its process was ended by {name}", trace)
    causes = {
        Outcome.MEMORY: f"MemoryError: it and what it started held more than {limits.memory_mb} MiB",
        Outcome.PROCESSES: f"ProcessError: it had more than {limits.processes} processes at a time",
        Outcome.CPU: f"TimeoutError: it used more than {limits.cpu_s or 0:g} CPU seconds",
    }
    if outcome in causes:
        return Failure(outcome, causes[outcome], trace)
    return Failure(Outcome.EXIT, f"ProcessError: it left its process with exit code {code}", trace)


def stack_of(words: bytes) -> str:
    """The user's frames of a stack that Python's faulthandler wrote, the innermost last as in a traceback."""
    found = [match for line in words.decode("utf-8", "replace").splitlines() if (match := _FRAME.match(line))]
    callers = ("verl/sandbox/", "verl/envs/worker.py", "<string>", "/threading.py")
    frames = [match for match in found if not any(name in match["file"] for name in callers)]
    if not frames:
        return ""
    lines = [f'  File "{match["file"]}", line {match["line"]}, in {match["name"]}' for match in reversed(frames)]
    return "\n".join(["Stack (most recent call last):", *lines[-12:], ""])


# -- A pool of processes that call one function: hands over calls, waits, kills and restarts processes ---------------


_GRACE_S = 2.0
"""Seconds a process has to end its awaited calls by itself before it is ended."""

_GROW_S = 0.1
"""Seconds for which calls wait for a process before a pool that grows starts one more."""

_PASSED_ON = {error.__name__: error for error in (FileNotFoundError, AttributeError, ModuleNotFoundError, ImportError)}


class SlowStart(RuntimeError):
    """A file was not loaded within ``start_timeout_s``; it may be slow or broken."""


@dataclass(frozen=True)
class Source:
    """Source of a function: a Python file or ``pkg://module``, its name, arguments of every call."""

    path: str
    name: str
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    offered: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of every call for a function that names them, or takes any; of `TOKENIZER` the folder."""


class Pool:
    """A function in processes of its own.

    Args:
        source: the function.
        limits: of one call (``cpu_s``, ``output_mb``) and of a process (``memory_mb``, ``processes``, ``network``).
        workers: processes, each with a copy of the function's module.
        grows: start with one process, and start more, ``workers`` at most, while calls wait and all are busy; one alone
            for an ``async def`` function, which has many calls under way. False: all of them at once.
        start_timeout_s: seconds in which a process must have loaded the function.
        max_concurrent: how many calls of an ``async def`` function one process has under way.
        keys: environment variables that it sees although they are keys: names, or patterns.
    """

    def __init__(
        self,
        source: Source,
        limits: Limits,
        workers: int = 1,
        start_timeout_s: float = 300.0,
        max_concurrent: int = 64,
        keys: Sequence[str] = (),
        grows: bool = False,
    ):
        self.keys, self.grows = keys, grows
        self.source, self.limits, self.start_timeout_s = source, limits, start_timeout_s
        self._owner, self._lock = os.getpid(), threading.RLock()
        self._description: dict[str, Any] | None = None
        self._setup = {
            "path": source.path,
            "name": source.name,
            "reward_kwargs": dict(source.reward_kwargs),
            "offered": dict(source.offered),
            "limits": limits,
            "max_concurrent": max_concurrent,
        }
        self.missing: tuple[str, ...] = ()
        self.workers = workers
        self._processes: list[Process] = []
        self._new_thread_state()
        self._open()

    def _new_thread_state(self) -> None:
        self._mutex = threading.Lock()
        self._submitted: list[tuple[bytes, Future]] = []
        self._thread: threading.Thread | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None

    def _open(self) -> None:
        """Start the processes unless there are some: at first, after a close, and in a fork, without its parent's."""
        if os.getpid() != self._owner:
            self._owner, self._lock, self._processes = os.getpid(), threading.RLock(), []
            self._new_thread_state()
        if not self._processes:
            self._processes = [self._start() for _ in range(1 if self.grows else self.workers)]
            _OPEN.add(self)

    def _start(self) -> Process:
        return Process({**self._setup, "sys_path": list(sys.path)}, self.limits, self.keys)

    @property
    def pids(self) -> list[int]:
        return [process.popen.pid for process in self._processes]

    def description(self) -> dict[str, Any]:
        """Return the function's name and signature; waits until a process has loaded it.

        Raises:
            FileNotFoundError, AttributeError, RuntimeError: it cannot be loaded.
        """
        with self._lock:
            if self._description is None:
                self._open()
                _Run(self, [], self.start_timeout_s, None).until(lambda: self._description is not None)
        return self._description

    def __call__(
        self, calls: Sequence[tuple[int | None, tuple, dict]], timeout_s: float, bear: int | None = None
    ) -> list[list[Scored | Failure] | None]:
        """Make calls and wait for all of them.

        Args:
            calls: of each the number of responses it is about (None: one, whose result is the score itself), its
                positional and its named arguments.
            timeout_s: seconds of one call.
            bear: failed calls after which no more are made; the rest stay None. None: however many.

        Returns:
            the outcomes of each call, one a response.
        """
        with self._lock:
            # needs a process that is ready: `_Run` cuts its chunks by whether the function is async
            self.description()
            self._open()
            run = _Run(self, calls, timeout_s, bear)
            run.until(run.is_over)
            return run.results

    # -- calls that a thread makes while this process does other work --------------------------------------------------

    def submit(self, calls: Sequence[bytes], timeout_s: float) -> list[Future]:
        """Begin calls about one response each, and return the future `Scored` or `Failure` of each.

        Args:
            calls: pickled arguments, ``(args, kwargs)``.
            timeout_s: seconds of one call.
        """
        futures: list[Future] = [Future() for _ in calls]
        with self._mutex:
            self._submitted += zip(calls, futures, strict=True)
            if self._thread is None:
                # daemon: a function that never returns must not keep this process alive
                make = partial(self._make_submitted, timeout_s)
                self._thread = threading.Thread(target=make, name="verl-rewards", daemon=True)
                self._thread.start()
            elif self._wake is not None:
                with suppress(BlockingIOError):  # it is full: the thread wakes anyway
                    self._wake[1].send(b".")
        return futures

    def _make_submitted(self, timeout_s: float) -> None:
        begun: list[Future] = []
        try:
            with self._lock:
                self._wake = self._wake or _pipe()
                self.description()
                self._open()
                run = _SubmittedRun(self, timeout_s, begun)
                run.until(run.is_over)
        except BaseException as error:  # raised where the result is awaited
            with self._mutex:
                self._thread, left, self._submitted = None, self._submitted, []
            for future in (*begun, *(future for _, future in left)):
                if not future.done():
                    future.set_exception(error)

    def close(self) -> None:
        """End all processes."""
        if os.getpid() != self._owner:  # a copy of this object in a forked child
            return
        _OPEN.discard(self)
        has_lock = self._lock.acquire(timeout=0.5)  # at the end of a run a thread may still wait for scores
        try:
            while self._processes:
                self._processes.pop().end()
        finally:
            if has_lock:
                self._lock.release()

    def __del__(self):
        with suppress(Exception):  # at the end of the interpreter
            self.close()


_OPEN: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def close_pools() -> None:
    """End the processes of every pool."""
    for pool in list(_OPEN):
        pool.close()


class _Run:
    """One list of calls: handed to a pool's processes in chunks, each answered, failed or not made."""

    def __init__(self, pool: Pool, calls: Sequence[tuple[int | None, tuple, dict]], timeout_s: float, bear: int | None):
        self.pool, self.timeout_s, self.bear = pool, timeout_s, bear
        self.grown_at = time.monotonic()
        self.results: list[list[Scored | Failure] | None] = [None] * len(calls)
        self.failed = 0
        self.tried_again: set[int] = set()
        packed: list[Call] = []
        for number, (count, args, kwargs) in enumerate(calls):
            try:
                packed.append(Call(number, count, pickle.dumps((args, kwargs))))
            except Exception as error:  # whatever an object's own __reduce__ raises
                cause = f"{type(error).__name__}: the arguments cannot be handed to the sandbox: {error}"
                self.note(number, [Failure(Outcome.RAISED, cause)])
        size = self._chunk_size(len(packed))
        self.waiting = deque(packed[i : i + size] for i in range(0, len(packed), size))

    @property
    def is_async(self) -> bool:
        return bool((self.pool._description or {}).get("is_async"))

    def _chunk_size(self, count: int) -> int:
        """Calls of a hand-over: few enough to keep every process busy to the end, enough to cost little."""
        # an async function gets its share at once: only then are as many calls under way as it may have
        if self.is_async:
            return max(1, -(-count // (1 if self.pool.grows else self.pool.workers)))
        return max(1, min(64, -(-count // (4 * self.pool.workers))))

    def next_chunk(self) -> list[Call] | None:
        """The calls to hand over next."""
        return self.waiting.popleft() if self.waiting else None

    def has_waiting(self) -> bool:
        return bool(self.waiting)

    def is_over(self) -> bool:
        if self.bear is not None and self.failed > self.bear:
            self.waiting.clear()
            for index, process in enumerate(self.pool._processes):
                if process.open_calls:
                    self._replace(index)
        return not self.waiting and not any(process.open_calls for process in self.pool._processes)

    def until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            for index, process in enumerate(self.pool._processes):
                if self.has_waiting() and process.is_ready and not process.open_calls:
                    if process.read()[1]:
                        process.give(self.next_chunk(), self.timeout_s)
                    else:  # ended by what an earlier call had left behind
                        self._replace(index)
            self._grow()
            self._wait()
            for index, process in enumerate(self.pool._processes):
                self._look_at(index, process)

    def _may_grow(self) -> bool:
        pool = self.pool
        most = 1 if self.is_async else pool.workers
        is_busy = all(process.is_ready and process.open_calls for process in pool._processes)
        return pool.grows and self.has_waiting() and is_busy and len(pool._processes) < most

    def _grow(self) -> None:
        """Start one more process where calls have waited for a while, and every process that there is is busy."""
        if self._may_grow() and time.monotonic() - self.grown_at > _GROW_S:
            self.pool._processes.append(self.pool._start())
            self.grown_at = time.monotonic()

    def _wait(self) -> None:
        """Wait until a process can be read or written, or is over its time; 1 s at most."""
        # poll: `select` takes no file numbers above 1023, which a trainer may reach
        with selectors.PollSelector() as selector:
            for process in self.pool._processes:
                to_write = selectors.EVENT_WRITE if process.unsent else 0
                for file, events in ((process.channel, to_write), (process.popen.stdout, 0), (process.popen.stderr, 0)):
                    with suppress(KeyError, ValueError):
                        selector.register(file, selectors.EVENT_READ | events)
            busy = [p for p in self.pool._processes if p.open_calls or not p.is_ready]
            left = min((p.since + self._patience(p) - time.monotonic() for p in busy), default=0.1)
            if self.pool._wake is not None:
                selector.register(self.pool._wake[0], selectors.EVENT_READ)
            selector.select(max(0.0, min(left, _GROW_S if self._may_grow() else 1.0)))
            if self.pool._wake is not None:
                with suppress(BlockingIOError):
                    self.pool._wake[0].recv(4096)

    def _patience(self, process: Process) -> float:
        if not process.is_ready:
            return self.pool.start_timeout_s
        return self.timeout_s + (_GRACE_S if process.is_awaiting else 0.0)

    def _look_at(self, index: int, process: Process) -> None:
        process.write()
        try:
            messages, is_there = process.read()
            for message in messages:
                self._take(process, message)
        except BadFrame as error:
            self._blame(index, Failure(Outcome.CRASH, f"ProcessError: it wrote into the sandbox's channel: {error}"))
            return
        if not is_there:
            self._blame(index, None)
        elif process.open_calls or not process.is_ready:
            excess = process.excess(self._patience(process))
            if excess is not None:
                self._blame(index, excess)

    def _take(self, process: Process, message: dict) -> None:
        # calls of a chunk run one after the other: time and output of the next begin with this answer
        process.since, process.printed = time.monotonic(), 0
        if "ready" in message:
            process.is_ready = True
            self.pool._description, self.pool.missing = message["ready"], tuple(message["missing"])
            if not self.pool.limits.network and (cause := next((m for m in self.pool.missing if "network" in m), None)):
                _warn_of_network(cause)
        elif "failed" in message:
            self._refuse(message)
        elif "awaiting" in message:
            process.is_awaiting = True
        else:
            call = next((call for call in process.open_calls if call.number == message.get("number")), None)
            if call is None:
                raise BadFrame("an answer to no call")
            outcomes = [_read(outcome) for outcome in message.get("outcomes") or ()]
            if len(outcomes) != (call.count or 1) and call.count != 0:
                raise BadFrame("an answer of another length")
            process.open_calls.remove(call)
            process.answered += 1
            self.note(call.number, outcomes)

    def note(self, number: int, outcomes: list[Scored | Failure]) -> None:
        self.results[number] = outcomes
        self.failed += any(isinstance(outcome, Failure) for outcome in outcomes)

    def _blame(self, index: int, failure: Failure | None) -> None:
        """End a process, or note that it has ended: fail the call that caused it, and queue the others again."""
        process = self.pool._processes[index]
        if not process.is_ready and failure is not None and failure.kind is Outcome.TIMEOUT:
            # the call goes on: another caller with a later deadline may still get its result
            raise SlowStart(
                f"{self.pool.source.path} was not loaded in time: it took more than {self.pool.start_timeout_s:g} s. "
                "Raise reward_model.sandbox.start_timeout_s, or load less."
            )
        calls, had_answered, was_ready = process.open_calls, process.answered, process.is_ready
        is_shared = process.is_awaiting and len(calls) > 1
        ended = self._replace(index, start=was_ready)
        if not was_ready:
            self._refuse({"failed": "RuntimeError", "cause": (failure or ended).cause})
        if not calls:
            return
        if is_shared:  # each by itself will tell
            self.waiting.extendleft([call] for call in reversed(calls))
            return
        # calls are made in order, so the first without an answer was running
        guilty, rest = calls[0], calls[1:]
        if rest:
            self.waiting.appendleft(rest)
        # a thread or timer that an earlier call left behind may have ended it: one more try, in a new process
        may_be_another = failure is None and ended.kind in (Outcome.CRASH, Outcome.EXIT) and had_answered
        if may_be_another and guilty.number not in self.tried_again:
            self.tried_again.add(guilty.number)
            self.waiting.appendleft([guilty])
            return
        self.note(guilty.number, [failure or ended] * (guilty.count or 1))

    def _replace(self, index: int, start: bool = True) -> Failure:
        ended = self.pool._processes[index].end()
        if start:
            self.pool._processes[index] = self.pool._start()
        else:
            del self.pool._processes[index]
        return ended

    def _refuse(self, message: dict) -> None:
        self.pool.close()
        kind = _PASSED_ON.get(message["failed"], RuntimeError)
        is_named = kind is not RuntimeError or message["failed"] == "RuntimeError"
        cause = message["cause"] if is_named else f"{message['failed']}: {message['cause']}"
        if "failed while it was loaded" not in cause and kind is RuntimeError:
            cause = f"{self.pool.source.path} failed while it was loaded: {cause}"
        raise kind(cause)


class _SubmittedRun(_Run):
    """The calls of `Pool.submit`, which come while others are under way.

    Args:
        begun: becomes the list of the calls' futures.
    """

    def __init__(self, pool: Pool, timeout_s: float, begun: list[Future]):
        super().__init__(pool, [], timeout_s, None)
        self.fresh: deque[Call] = deque()
        self.futures = begun

    def is_over(self) -> bool:
        pool = self.pool
        with pool._mutex:
            for arguments, future in pool._submitted:
                self.fresh.append(Call(len(self.futures), None, arguments))
                self.futures.append(future)
            pool._submitted = []
            is_over = not self.has_waiting() and not any(process.open_calls for process in pool._processes)
            if is_over:
                pool._thread = None  # a call that comes now gets another thread
        if not is_over and self.is_async:
            for process in pool._processes:  # one that awaits its calls takes more of them
                if self.fresh and process.open_calls and process.is_awaiting:
                    process.give(self.next_chunk(), self.timeout_s)
        return is_over

    def has_waiting(self) -> bool:
        return bool(self.waiting or self.fresh)

    def next_chunk(self) -> list[Call] | None:
        if not self.fresh or self.waiting:
            return super().next_chunk()
        return [self.fresh.popleft() for _ in range(self._chunk_size(len(self.fresh)))]

    def note(self, number: int, outcomes: list[Scored | Failure]) -> None:
        self.futures[number].set_result(outcomes[0])


def _pipe() -> tuple[socket.socket, socket.socket]:
    """Two ends that do not block: what is sent into the second wakes a thread that waits for the first."""
    ends = socket.socketpair()
    for end_ in ends:
        end_.setblocking(False)
    return ends


def _read(outcome: Any) -> Scored | Failure:
    try:
        if len(outcome) == 3:
            return Failure(Outcome(outcome[0]), str(outcome[1]), str(outcome[2]))
        score, columns = outcome
        if isinstance(score, (float, int)) and (columns is None or isinstance(columns, dict)):
            return Scored(float(score), columns)
    except (TypeError, ValueError):
        pass
    raise BadFrame("an answer without a score")


# -- A function that stands for one in a sandbox: called like it, or with many calls at once -------------------------
_KEPT = 4

_POOLS: OrderedDict[Any, Pool] = OrderedDict()
"""The last pools used. Training and validation share one, as they would share the module in one process."""


class SandboxedFunction:
    """Stands for a function that runs in processes of its own.

    Args:
        pool: its processes.
        timeout_s: seconds of a call about one sample.
        batch_timeout_s: seconds of a call about many.
    """

    def __init__(self, pool: Pool, timeout_s: float = 60.0, batch_timeout_s: float = 600.0):
        self.pool, self.timeout_s, self.batch_timeout_s = pool, timeout_s, batch_timeout_s
        source = pool.source
        self.keywords = dict(source.reward_kwargs)
        self._begun: dict[bytes, deque[tuple[int, Future]]] = {}
        self._begun_lock = threading.Lock()  # calls are begun in other threads
        self._round = 0
        description = pool.description()
        self.described_name: str = description["name"]
        self.__name__ = pool.source.name
        self.is_async: bool = description["is_async"]
        signature = signature_of(description["parameters"])
        if signature is not None:
            self.__signature__ = signature
            self.keywords |= {name: source.offered[name] for name in taken_by(signature, source.offered)}

    def rows(
        self, calls: Sequence[tuple[tuple, dict[str, Any]]], bear: int | None = None
    ) -> list[Scored | Failure | NotCalled]:
        """Make one call a sample, each with its arguments; no more are made after more than ``bear`` failures.

        Of a call that `begin` has begun this is the result.
        """
        if self._begun:
            return self._with_begun(calls, bear)
        results = self.pool([(None, args, kwargs) for args, kwargs in calls], self.timeout_s, bear)
        return [NotCalled() if outcomes is None else outcomes[0] for outcomes in results]

    def _with_begun(
        self, calls: Sequence[tuple[tuple, dict[str, Any]]], bear: int | None
    ) -> list[Scored | Failure | NotCalled]:
        found = [self._taken(call) for call in calls]
        results = [None if future is None else future.result() for future in found]
        left = [i for i, result in enumerate(results) if result is None]
        if bear is not None:
            bear -= sum(isinstance(result, Failure) for result in results)
        if bear is not None and bear < 0:
            others: list[Any] = [NotCalled()] * len(left)
        else:
            made = self.pool([(None, *calls[i]) for i in left], self.timeout_s, bear) if left else []
            others = [NotCalled() if outcomes is None else outcomes[0] for outcomes in made]
        for i, result in zip(left, others, strict=True):
            results[i] = result
        return results

    def begin(self, calls: Sequence[tuple[tuple, dict[str, Any]]]) -> None:
        """Begin calls whose results `rows` will be asked for with the same arguments; returns at once."""
        packed = [pickle.dumps(call) for call in calls]
        futures = self.pool.submit(packed, self.timeout_s)
        with self._begun_lock:
            for key, future in zip(packed, futures, strict=True):
                self._begun.setdefault(key, deque()).append((self._round, future))

    def next_round(self, kept: int = 1) -> int:
        """Forget the calls begun more than ``kept`` rounds ago; returns how many were never asked for."""
        with self._begun_lock:
            self._round += 1
            old = {key: futures for key, futures in self._begun.items() if futures[-1][0] < self._round - kept}
            for key in old:
                del self._begun[key]
        return sum(map(len, old.values()))

    def _taken(self, call: tuple[tuple, dict[str, Any]]) -> Future | None:
        """The future of a call that has begun; each is taken once."""
        try:
            key = pickle.dumps(call)
        except Exception:  # whatever an object's own __reduce__ raises: the pool reports it
            return None
        with self._begun_lock:
            futures = self._begun.get(key)
            if futures is None:
                return None
            _, future = futures.popleft()
            if not futures:
                del self._begun[key]
        return future

    def batch(self, count: int, kwargs: dict[str, Any]) -> list[Scored | Failure]:
        """Make one call about ``count`` samples; returns one outcome for each."""
        [outcomes] = self.pool([(count, (), kwargs)], self.batch_timeout_s)
        return outcomes if len(outcomes) == count else outcomes * count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make one call; returns its score, or the mapping that it returned.

        Raises:
            SandboxError: the call failed.
        """
        [outcome] = self.rows([(args, kwargs)])
        if isinstance(outcome, Failure):
            raise SandboxError(outcome)
        assert isinstance(outcome, Scored)  # every call is made where any number may fail
        return outcome.score if outcome.columns is None else outcome.columns


def sandboxed(source: Source, limits: Limits, workers: int, start_timeout_s: float, **options: Any) -> Pool:
    """The pool for a function, started if there is none yet that does the same; it need not be ready.

    Raises:
        FileNotFoundError: there is no such file.
    """
    stamp: Any = source.path
    if not source.path.startswith("pkg://"):
        path = Path(source.path).expanduser().resolve()
        if not path.is_file():
            raise FileNotFoundError(f"No Python file at {source.path!r} (looked for {path}).")
        source = Source(str(path), source.name, source.reward_kwargs, source.offered)
        # an edited file gets a new pool: processes keep the module they have imported
        stamp = (path, path.stat().st_mtime_ns, path.stat().st_size)
    key = (
        stamp,
        source.name,
        repr(source.reward_kwargs),
        repr(source.offered),
        limits,
        workers,
        repr(options),
        os.getpid(),
    )
    pool = _POOLS.get(key)
    if pool is None:
        pool = _POOLS[key] = Pool(source, limits, workers, start_timeout_s, **options)
    pool.start_timeout_s = start_timeout_s  # the last to ask decides how long it waits
    _POOLS.move_to_end(key)
    # not closed here: others may still hold the pool; when the last one lets go, its processes end
    while len(_POOLS) > _KEPT:
        _POOLS.popitem(last=False)
    return pool
