"""Processes that run functions of the user's: one call at a time in each, ended when a call hangs or runs away."""

import asyncio
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from verl.sandbox.messages import BadFrame, FrameReader, framed, start_child
from verl.sandbox.outcomes import Outcome
from verl.sandbox.supervisor import Limits, end, outcome_of
from verl.tools.calls import OF_PROCESS, CallFailed, CallOutcome

START_S = 300.0
"""Seconds in which a process must have loaded the file."""


class FunctionProcess:
    """One process, and its channel."""

    def __init__(self, path: str, limits: Limits):
        self.popen, self.channel = start_child("verl.tools.worker", dict(os.environ))
        self.channel.setblocking(False)
        self._reader = FrameReader()
        self._setup = pickle.dumps({"path": path, "limits": limits, "sys_path": list(sys.path)})

    async def start(self) -> None:
        """Wait until the file is loaded.

        Raises:
            RuntimeError: it fails while it is loaded, or takes too long.
        """
        try:
            message = await asyncio.wait_for(self._ask(self._setup), START_S)
        except asyncio.TimeoutError:
            message = {"failed": f"it was not loaded within {START_S:g} s"}
        if message is None or "ready" not in message:
            cause = "its process has ended" if message is None else message.get("failed")
            raise RuntimeError(f"multi_turn.function_tool_path cannot be loaded in a process of its own: {cause}")

    async def call(self, number: int, attribute: str, arguments: Mapping[str, Any], timeout_s: float) -> dict | None:
        """Return the answer; None: the process has ended, or does not keep to the protocol.

        Raises:
            asyncio.TimeoutError: it did not answer in time.
        """
        payload = pickle.dumps((number, attribute, dict(arguments)))
        try:
            message = await asyncio.wait_for(self._ask(payload), timeout_s)
        except asyncio.TimeoutError:  # first: it is an OSError in later Pythons
            raise
        except (BadFrame, OSError):
            return None
        return message if message is not None and message.get("number") == number else None

    async def _ask(self, payload: bytes) -> dict | None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.channel, framed(payload))
        while data := await loop.sock_recv(self.channel, 1 << 20):
            for message in self._reader.feed(data):
                if not isinstance(message, dict):
                    raise BadFrame(f"a message of type {type(message).__name__}")
                return message
        return None

    def is_idle(self) -> bool:
        """Whether it is there and says nothing: something a call left behind may have ended it, or written."""
        try:
            self.channel.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return self.popen.poll() is None
        except OSError:
            pass
        return False

    def end(self) -> Outcome:
        """End it and all below it; returns how it had ended by itself."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(0.5)
        with suppress(subprocess.TimeoutExpired):
            end(self.popen)
        self.channel.close()
        code = self.popen.returncode
        return outcome_of(-9 if code is None else code)

    def kill(self) -> None:
        """End it and all below it, at once."""
        with suppress(subprocess.TimeoutExpired):
            end(self.popen)
        self.channel.close()


class FunctionProcesses:
    """Processes of one file, started as calls need them.

    Args:
        path: the Python file.
        count: processes at most; further calls wait for a free one.
        limits: of each process.
    """

    def __init__(self, path: str, count: int, limits: Limits):
        self.path, self.count, self.limits = path, count, limits
        self._idle: list[FunctionProcess] = []
        self._all: set[FunctionProcess] = set()
        self._enders: set[threading.Thread] = set()
        self._calls = 0
        self._gates: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    @property
    def pids(self) -> list[int]:
        return [process.popen.pid for process in self._all]

    async def call(self, attribute: str, arguments: Mapping[str, Any], timeout_s: float) -> tuple[str, float]:
        """Return what a function answered, as text, and the seconds it took without waiting for a process.

        Raises:
            CallFailed: it gave no answer.
            RuntimeError: the file cannot be loaded.
        """
        loop = asyncio.get_running_loop()
        # a semaphore belongs to one event loop; a run has one
        gate = self._gates.setdefault(loop, asyncio.Semaphore(self.count))
        async with gate:
            process = await self._take()
            self._calls += 1
            start = time.monotonic()
            try:
                message = await process.call(self._calls, attribute, arguments, timeout_s)
            except BaseException as error:  # timed out, or nobody waits for it any more
                self._end(process)
                if not isinstance(error, asyncio.TimeoutError):
                    raise
                raise CallFailed(CallOutcome.TIMEOUT, f"it did not answer within {timeout_s:g} seconds") from None
            if message is None:
                self._all.discard(process)
                raise await self._failure(process)
            self._idle.append(process)
        outcome = CallOutcome(message.get("outcome", CallOutcome.ERROR))
        if outcome is not CallOutcome.OK:
            raise CallFailed(outcome, str(message.get("cause")))
        return str(message.get("text")), time.monotonic() - start

    async def _take(self) -> FunctionProcess:
        while self._idle:
            process = self._idle.pop()
            if process.is_idle():
                return process
            self._end(process)
        process = FunctionProcess(self.path, self.limits)
        self._all.add(process)
        try:
            await process.start()
        except BaseException:
            self._end(process)
            raise
        return process

    async def _failure(self, process: FunctionProcess) -> CallFailed:
        outcome = OF_PROCESS.get(await asyncio.to_thread(process.end), CallOutcome.CRASH)
        cause = {
            CallOutcome.MEMORY: f"it held more than {self.limits.memory_mb} MiB",
            CallOutcome.EXIT: "it ended its process",
        }
        return CallFailed(outcome, cause.get(outcome, "its process crashed"))

    def _end(self, process: FunctionProcess) -> None:
        """End a process without waiting for it."""
        self._all.discard(process)
        thread = threading.Thread(target=self._kill, args=(process,), name="verl-tool-end", daemon=True)
        self._enders.add(thread)
        thread.start()

    def _kill(self, process: FunctionProcess) -> None:
        try:
            process.kill()
        finally:
            self._enders.discard(threading.current_thread())

    def close(self) -> None:
        """End all processes."""
        while self._all:
            self._all.pop().kill()
        self._idle.clear()
        for thread in list(self._enders):
            thread.join(5)
