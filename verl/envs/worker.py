"""One environment in a thread of its own, the checks of what it answers, and the process that runs many of them.

The process is started as ``main()`` with the number of an inherited socket; requests come as pickle, answers leave as
msgpack. Imports no torch.
"""

import asyncio
import ctypes
import faulthandler
import inspect
import math
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from verl.envs.base import environment_class, make
from verl.sandbox.messages import encode, framed, receive
from verl.sandbox.outcomes import Failure, Outcome, plain_number, shown
from verl.sandbox.supervisor import Limits, enter
from verl.utils.import_utils import split_file_name

MAX_OBSERVATION = 256 * 1024
"""Characters of one observation at most: more than a response window holds, and slow to turn into tokens."""

MAX_TEXT = 4096
"""Characters of a text in ``info`` and of a ``state_id`` at most."""

MAX_INFO = 256
"""Entries of ``info`` at most."""

MAX_PROCESSES = 1024
"""Processes that the environments of one worker may have started at a time."""

LOOP_ANSWERS_WITHIN_S = 2.0
"""Seconds after which an event loop that does not answer counts as blocked."""


@dataclass(frozen=True)
class Answer:
    """What an environment answered to a reset or to an action."""

    messages: list[dict[str, str]]
    """The observation: a text is one message of role user."""
    text: str | None
    """The observation, where it is text."""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    """Numbers, booleans and texts."""
    state_id: Any = None
    """The environment's attribute; None: it has none."""
    dropped: tuple[str, ...] = ()
    """Names in ``info`` of values that are neither, which are left out."""


class WrongAnswer(TypeError):
    """An environment answered with what is no answer."""


class NotFinite(WrongAnswer):
    """An environment's reward is NaN or infinite."""


def checked(result: Any, is_reset: bool, state_id: Any = None) -> Answer:
    """Return the result of ``reset`` or ``step`` as an `Answer`.

    Raises:
        WrongAnswer: it is none; says what it is and what it should be.
    """
    names = "(observation, info)" if is_reset else "(observation, reward, terminated, truncated, info)"
    count = 2 if is_reset else 5
    if not isinstance(result, (tuple, list)) or len(result) != count:
        raise WrongAnswer(
            f"{'reset' if is_reset else 'step'} returned {shown(result)} of type {type(result).__name__}; it must "
            f"return {names}."
        )
    observation, info = result[0], result[-1]
    messages = _messages(observation)
    text = observation if isinstance(observation, str) else None
    numbers, dropped = _info(info)
    state = _state(state_id)
    if is_reset:
        return Answer(messages, text, info=numbers, state_id=state, dropped=dropped)
    terminated, truncated = (_flag(*one) for one in (("terminated", result[2]), ("truncated", result[3])))
    return Answer(messages, text, _reward(result[1]), terminated, truncated, numbers, state, dropped)


def _messages(observation: Any) -> list[dict[str, str]]:
    if isinstance(observation, str):
        found = [{"role": "user", "content": observation}]
    elif isinstance(observation, Sequence) and not isinstance(observation, (bytes, bytearray, memoryview)):
        found = [dict(one) if isinstance(one, Mapping) else one for one in observation]
    else:
        raise WrongAnswer(
            f"the observation is {shown(observation)} of type {type(observation).__name__}; it must be text or a list "
            "of messages {'role': text, 'content': text}. Decode bytes, and render arrays as text."
        )
    size = 0
    for one in found:
        if not (isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)):
            raise WrongAnswer(
                f"a message of the observation is {shown(one)}; it must be a dict with the texts 'role' and 'content'."
            )
        size += len(one["content"])
    if size > MAX_OBSERVATION:
        raise WrongAnswer(
            f"the observation has {size} characters; {MAX_OBSERVATION} are the most "
            "(verl.envs.worker.MAX_OBSERVATION). Let the environment shorten it."
        )
    return found


def _reward(value: Any) -> float:
    number = plain_number(value)
    if not isinstance(number, (int, float)):
        raise WrongAnswer(f"the reward is {shown(value)} of type {type(value).__name__}; it must be a number.")
    try:
        reward = float(number)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise NotFinite(f"the reward is {reward}; it must be finite.")
    return reward


def _flag(name: str, value: Any) -> bool:
    found = plain_number(value)
    if found not in (True, False):
        raise WrongAnswer(f"{name} is {shown(value)} of type {type(value).__name__}; it must be True or False.")
    return bool(found)


def _info(info: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    if info is None:
        return {}, ()
    if not isinstance(info, Mapping):
        raise WrongAnswer(f"info is {shown(info)} of type {type(info).__name__}; it must be a dict.")
    if len(info) > MAX_INFO:
        raise WrongAnswer(f"info has {len(info)} entries; {MAX_INFO} are the most.")
    if "messages" in info:
        raise WrongAnswer("info has 'messages': messages for the policy are the observation. Return them as that.")
    kept, dropped = {}, []
    for key, value in info.items():
        number = plain_number(value)
        is_number = isinstance(number, (bool, int, float)) and (isinstance(number, int) or math.isfinite(number))
        if isinstance(key, str) and (is_number or isinstance(value, str) and len(value) <= MAX_TEXT):
            kept[key] = number if is_number else value
        elif value is not None:
            dropped.append(str(key)[:100])
    return kept, tuple(dropped)


def _state(value: Any, depth: int = 0) -> Any:
    """A state id as plain values, which can be compared, hashed by others and sent."""
    if depth == 0 and hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, float)) or isinstance(value, str) and len(value) <= MAX_TEXT:
        return value
    if isinstance(value, (list, tuple)) and depth < 8 and len(value) <= MAX_TEXT:
        return [_state(one, depth + 1) for one in value]
    number = plain_number(value)
    if number is not value:
        return number
    raise WrongAnswer(
        f"state_id is {shown(value)} of type {type(value).__name__}; it must be a text of at most {MAX_TEXT} "
        "characters, a number, or an array or list of them."
    )


def locate(kind: str) -> str:
    """Return a name by which another process finds the environment class of ``kind`` too.

    Raises:
        ValueError: it was registered under a name, and its file is not known.
    """
    if split_file_name(kind) or "." in kind or ":" in kind:
        return kind
    cls = environment_class(kind)
    module, name = sys.modules.get(getattr(cls, "__module__", "")), getattr(cls, "__qualname__", "")
    if module is not None and module.__name__.startswith("verl."):
        return kind
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py") or not name.isidentifier() or getattr(module, name, None) is not cls:
        raise ValueError(
            f"environment type {kind!r} is registered as {shown(cls)}, which other processes cannot import: with "
            "env.num_workers > 0 it must be a class at the top of a Python file. Set env.num_workers=0, or give "
            "env.registry.<tag>.type as path/file.py:Class."
        )
    return f"{file}:{name}"


# -- One environment in a thread of its own --------------------------------------------------------------------------


class Interrupted(SystemExit):
    """Raised in a thread whose answer nobody waits for any more, to end it."""


class LeftProcess(SystemExit):
    """Raised in place of ``os._exit`` in an environment's thread: the other environments of the process go on."""


class Threads:
    """Threads for calls that may hang. An idle one takes the next job, and none keeps the process from ending."""

    def __init__(self, name: str):
        self._name, self._idle, self._count = name, threading.Semaphore(0), 0
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()

    def start(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if not self._idle.acquire(blocking=False):
            self._count += 1
            threading.Thread(target=self._work, name=f"{self._name}-{self._count}", daemon=True).start()

    def _work(self) -> None:
        with suppress(Interrupted):
            while (job := self._jobs.get()) is not None:
                job()
                del job
                self._idle.release()

    def close(self) -> None:
        """End the idle threads."""
        while self._idle.acquire(blocking=False):
            self._jobs.put(None)


class EnvironmentThread:
    """One environment, all of whose methods run in one thread: libraries may keep state by thread.

    Args:
        threads: gives the thread.
        kind, options: as of `verl.envs.make`.
        submit: runs what an ``async`` method returned in an event loop; returns the future of its result.
        started: gets the thread's id, in the thread.
    """

    def __init__(
        self,
        threads: Threads,
        kind: str,
        options: Mapping[str, Any],
        submit: Callable[[Any], Future],
        started: Callable[[int], None] | None = None,
    ):
        self.kind, self.options, self.submit, self.started = kind, options, submit, started
        self.environment: Any = None
        self.is_abandoned = False
        self._requests: queue.SimpleQueue = queue.SimpleQueue()
        self._ident: int | None = None
        self._awaited: Future | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        threads.start(self._serve)

    def call(self, name: str, arguments: tuple | bytes, done: Callable[[Any], None]) -> None:
        """Run ``reset``, ``step``, ``frame`` or ``close``; ``done`` gets an `Answer`, a text, None or a `Failure`.

        ``arguments`` in bytes are pickled, by this process's parent.
        """
        self._requests.put((name, arguments, done))

    def abandon(self) -> str:
        """Interrupt the thread, whose environment is not called again. Returns its stack.

        Python code is interrupted at its next line; what waits in C goes on until it returns.
        """
        with self._lock:
            self.is_abandoned = True
            # wakes a thread that waits for a request
            self._requests.put(None)
            if (awaited := self._awaited) is not None:
                awaited.cancel()
            if awaited is not None or self._ident is None:
                return ""
            frame = sys._current_frames().get(self._ident)
            stack = "".join(traceback.format_stack(frame)) if frame else ""
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._ident), ctypes.py_object(Interrupted))
        # from the first frame of the environment's
        users = stack.rpartition('verl/envs/worker.py"')[2].partition("  File")[2]
        return f"Stack (most recent call last):\n  File{users[-4000:]}" if users else ""

    def _serve(self) -> None:
        self._ident = threading.get_ident()
        if self.started is not None:
            self.started(self._ident)
        try:
            while not self.is_abandoned and (request := self._requests.get()) is not None:
                name, arguments, done = request
                result = self._run(name, arguments)
                if os.getpid() != self._pid:
                    # a child that the environment forked: it must not answer in its parent's place
                    os._exit(0)
                if not self.is_abandoned:
                    done(result)
                if name == "close":
                    return
        finally:
            with self._lock:
                self._ident = None
                is_abandoned = self.is_abandoned
        if is_abandoned:
            # the interruption may still be on its way: it must not meet the next environment in this thread
            raise Interrupted

    def _run(self, name: str, arguments: tuple | bytes) -> Any:
        try:
            # here and not where they arrive: a class among them may take its time to be imported, or be missing
            if isinstance(arguments, bytes):
                arguments = pickle.loads(arguments)
            return getattr(self, f"_{name}")(*arguments)
        except (Interrupted, CancelledError):
            raise Interrupted from None
        except NotFinite as error:
            return Failure(Outcome.NOT_FINITE, str(error))
        except WrongAnswer as error:
            return Failure(Outcome.WRONG_TYPE, str(error))
        except BaseException as error:
            return Failure.of(error)

    def _result(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result
        self._awaited = self.submit(result)
        try:
            return self._awaited.result()
        finally:
            self._awaited = None

    def _reset(self, seed: int, task: Mapping[str, Any]) -> Answer:
        if self.environment is None:
            self.environment = make(self.kind, **self.options)
        result = self._result(self.environment.reset(seed=seed, **task))
        return checked(result, True, getattr(self.environment, "state_id", None))

    def _step(self, action: str) -> Answer:
        result = self._result(self.environment.step(action))
        return checked(result, False, getattr(self.environment, "state_id", None))

    def _frame(self) -> str | None:
        frame = getattr(self.environment, "frame", None)
        text = self._result(frame()) if callable(frame) else None
        if text is not None and not isinstance(text, str):
            raise WrongAnswer(f"frame returned {shown(text)} of type {type(text).__name__}; it must return text.")
        return text and text[:MAX_OBSERVATION]

    def _close(self) -> None:
        environment, self.environment = self.environment, None
        close = getattr(environment, "close", None)
        if callable(close):
            self._result(close())


# -- The process that runs many environments -------------------------------------------------------------------------


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    payload = receive(channel)
    if payload is None:
        return
    setup = pickle.loads(payload)
    missing = enter(Limits(memory_mb=setup["memory_mb"], processes=MAX_PROCESSES))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    # many threads: the usual 8 MiB each would count against the limit of memory
    threading.stack_size(1 << 20)
    keep_process()
    sys.path[:] = setup["sys_path"]
    worker = Worker(channel)
    worker.send({"ready": True, "missing": missing})
    worker.serve()
    # not through the end of the interpreter: it would wait for what the environments left behind
    os._exit(0)


def keep_process() -> None:
    """Let ``os._exit`` end the call of an environment, and not this process with all others; forked children end."""
    pid, exit_process = os.getpid(), os._exit

    def leave(status: int) -> NoReturn:
        if os.getpid() != pid or threading.current_thread() is threading.main_thread():
            exit_process(status)
        raise LeftProcess(f"os._exit({status})")

    os._exit = leave


class Worker:
    """Runs environments by number, as the requests say that arrive on a channel."""

    def __init__(self, channel: socket.socket):
        self.channel, self.threads = channel, Threads("environment")
        self.environments: dict[int, EnvironmentThread] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        data = framed(encode(message))
        with self._lock:
            self.channel.sendall(data)

    def serve(self) -> None:
        while (payload := receive(self.channel)) is not None:
            request, environment, name, arguments = pickle.loads(payload)
            if name == "abandon":
                self._abandon(request, environment)
                continue
            if name == "open":
                kind, options = pickle.loads(arguments)
                self.environments[environment] = EnvironmentThread(
                    self.threads, kind, options, self._submit, partial(self._note_thread, environment)
                )
                continue
            thread = self.environments.pop(environment) if name == "close" else self.environments[environment]
            thread.call(name, arguments, self._answer(request))

    def _note_thread(self, environment: int, ident: int) -> None:
        # of a crash the process can say only in which thread it was
        self.send({"environment": environment, "thread": ident})

    def _answer(self, request: int) -> Callable[[Any], None]:
        def send(result: Any) -> None:
            message: dict[str, Any] = {"number": request}
            if isinstance(result, Failure):
                message["failure"] = [result.kind.value, result.cause[-8000:], result.trace]
            else:
                message["value"] = vars(result) if isinstance(result, Answer) else result
            self.send(message)

        return send

    def _abandon(self, request: int, environment: int) -> None:
        thread = self.environments.pop(environment, None)
        stack = thread.abandon() if thread else ""
        self.send({"number": request, "value": stack, "is_blocked": self._is_blocked()})

    def _submit(self, awaitable: Any) -> Future:
        with self._lock:
            if self.loop is None:  # one for all environments: a session that a module keeps stays usable
                self.loop = asyncio.new_event_loop()
                threading.Thread(target=self.loop.run_forever, name="environments", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine(awaitable), self.loop)

    def _is_blocked(self) -> bool:
        """Whether a method blocks the event loop that all ``async`` environments share."""
        if self.loop is None:
            return False
        answered = threading.Event()
        self.loop.call_soon_threadsafe(answered.set)
        return not answered.wait(LOOP_ANSWERS_WITHIN_S)


async def coroutine(awaitable: Any) -> Any:
    """Wait for any awaitable: an event loop takes coroutines only."""
    return await awaitable
