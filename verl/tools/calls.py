"""Calls of tools: their outcomes, the text that the policy reads, and the event loop in which coroutines run."""

import asyncio
import concurrent.futures
import json
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from verl.sandbox.outcomes import Outcome


class CallOutcome(str, Enum):
    """How a tool call ended. All but ``ok`` are answers that say what is wrong."""

    OK = "ok"
    UNKNOWN_TOOL = "unknown_tool"
    """The row has no tool of this name."""
    INVALID_JSON = "invalid_json"
    """The arguments are no JSON object."""
    INVALID_ARGUMENTS = "invalid_arguments"
    """They contradict the tool's schema."""
    NOT_CALLED = "not_called"
    """Over ``max_parallel_calls``, or over ``max_tool_calls``."""
    ERROR = "error"
    """The tool raised, or answered with what is no text and no JSON."""
    TIMEOUT = "timeout"
    """It took longer than ``tool_timeout``."""
    MEMORY = "memory"
    """It held more than ``tool_memory_mb``."""
    EXIT = "exit"
    """It ended its process."""
    CRASH = "crash"
    """Its process was ended by a signal."""

    def __str__(self) -> str:
        return self.value


OF_PROCESS = {
    Outcome.MEMORY: CallOutcome.MEMORY,
    Outcome.EXIT: CallOutcome.EXIT,
    Outcome.CRASH: CallOutcome.CRASH,
    Outcome.TIMEOUT: CallOutcome.TIMEOUT,
}


class CallFailed(Exception):
    """A tool gave no answer."""

    def __init__(self, outcome: CallOutcome, cause: str):
        super().__init__(cause)
        self.outcome, self.cause = outcome, cause


@dataclass
class CallResult:
    """One answered call."""

    name: str
    """Of the tool; "unknown" if there is none of the called name."""
    outcome: CallOutcome
    text: str
    """What the policy reads."""
    seconds: float = 0.0
    reward: float | None = None
    """Reward that a tool gave its turn."""
    metrics: dict[str, Any] = field(default_factory=dict)


def text_of(value: Any) -> str:
    """Return what a tool answered as text: text as it is, None as "", any other value as JSON.

    Raises:
        CallFailed: JSON has no such value.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        # half a surrogate pair cannot be written as UTF-8, and no tokenizer takes it
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise CallFailed(
            CallOutcome.ERROR, f"it returned {len(value)} bytes; a tool returns text, or what JSON can hold"
        )
    try:
        return text_of(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        kind = type(value).__name__
        raise CallFailed(CallOutcome.ERROR, f"it returned a {kind}, which is no text and no JSON: {error}") from None


_CUT = "...(truncated)..."


def truncated(text: str, length: int, side: str) -> str:
    """Return ``length`` characters of a longer text, and a mark where the rest was.

    Args:
        side: ``left`` keeps the head, ``right`` the tail, ``middle`` both ends.
    """
    if len(text) <= length:
        return text
    if side == "left":
        return text[:length] + _CUT.rstrip(".")
    if side == "right":
        return _CUT.lstrip(".") + text[-length:]
    head = (length + 1) // 2
    return text[:head] + _CUT + text[len(text) - (length - head) :]


class ToolThread:
    """Event loop in a thread of its own, in which tools that are coroutines run.

    A tool that blocks the loop is timed out all the same, and the next call gets a new thread.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    async def run(self, coroutine: Coroutine, timeout_s: float) -> Any:
        """Return the result of a coroutine.

        Raises:
            CallFailed: it is not done in time.
        """
        loop = self._running()
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        waiter = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait({waiter}, timeout=timeout_s)
        except asyncio.CancelledError:
            future.cancel()
            raise
        if done:
            return waiter.result()
        future.cancel()
        waiter.cancel()
        await self._replace_if_blocked(loop)
        raise CallFailed(CallOutcome.TIMEOUT, f"it did not answer within {timeout_s:g} seconds")

    def run_and_wait(self, coroutine: Coroutine, timeout_s: float) -> Any:
        """Return the result of a coroutine, from a thread without an event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running()).result(timeout_s)

    async def _replace_if_blocked(self, loop: asyncio.AbstractEventLoop, patience_s: float = 1.0) -> None:
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)
        end = time.monotonic() + patience_s
        while not answered.is_set() and time.monotonic() < end:
            await asyncio.sleep(0.01)
        with self._lock:
            if not answered.is_set() and self._loop is loop:
                self._loop = self._thread = None  # abandoned: a thread cannot be ended

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="verl-tools", daemon=True)
                self._thread.start()
            return self._loop

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        with suppress(concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        if not thread.is_alive():
            loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def call_in_thread(function: Any, arguments: dict[str, Any], timeout_s: float) -> Any:
    """Return what a function returns, called in a thread that is abandoned if it is not done in time.

    Raises:
        CallFailed: it was not done in time.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result((result, error))

    def work() -> None:
        result, error = None, None
        try:
            result = function(**arguments)
        except BaseException as caught:  # SystemExit too: it belongs to the call
            error = caught
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, result, error)

    # a daemon, or a call that hangs would keep the process from ending
    threading.Thread(target=work, name="verl-tool", daemon=True).start()
    done, _ = await asyncio.wait({future}, timeout=timeout_s)
    if not done:
        future.cancel()
        raise CallFailed(CallOutcome.TIMEOUT, f"it did not answer within {timeout_s:g} seconds")
    result, error = future.result()
    if error is not None:
        raise CallFailed(CallOutcome.ERROR, described(error))
    return result


def described(error: BaseException) -> str:
    """Return an exception as ``ValueError: cause``, 500 characters at most."""
    try:
        text = str(error)
    except Exception as other:  # the user's own __str__
        text = f"its text raises {type(other).__name__}"
    return f"{type(error).__name__}: {text}"[:500]
