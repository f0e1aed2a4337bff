"""A user's function called in processes of its own, many calls at a time: each a fork of one that imported its file.

    this process    --socket-->  importer: imports the file once, and forks
                                   monitor, one a call: waits for what it forked, and reports its outcome
                                     supervisor: of limits (`verl.sandbox.supervisor`)
                                       program: calls the function

A call that is given up is killed with all that it started. Arguments and results travel as JSON.
"""

import asyncio
import atexit
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from verl.sandbox.messages import framed, receive, start_child
from verl.sandbox.outcomes import Failure, Outcome, SandboxError
from verl.sandbox.supervisor import Limits, descendants, die_with_parent, enter, kill_all, outcome_of
from verl.utils.import_utils import load_extern_type

START_S = 180.0
"""Seconds for the import of the function's file."""
_LONGEST_CAUSE = 4000

_OPEN: dict[tuple[int, str, str, Limits], "ForkedCalls"] = {}


class ForkedCalls:
    """Calls ``name`` of the Python file (or ``pkg://module``) ``path``; many at a time.

    Args:
        limits: of each call.
    """

    def __init__(self, path: str, name: str, limits: Limits):
        self.path, self.name, self.limits = path, name, limits
        self._lock = threading.Lock()
        self._popen: subprocess.Popen | None = None
        self._channel: socket.socket | None = None

    @classmethod
    def of(cls, path: str, name: str, limits: Limits) -> "ForkedCalls":
        """Return the one of this process for these arguments; `close_all` ends it."""
        return _OPEN.setdefault((os.getpid(), path, name, limits), cls(path, name, limits))

    async def call(self, *arguments: Any) -> Any:
        """Return what the function returns, or its coroutine. Cancelling the call kills its process.

        Raises:
            SandboxError: it raised, or its process ended before it returned.
            RuntimeError: its file cannot be loaded.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            await asyncio.to_thread(self._hand_over, theirs)
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 26)
        pid = None
        try:
            pid = (await _read(reader) or {}).get("pid")
            writer.write(framed(json.dumps(arguments, default=plain).encode()))
            reply = await _read(reader) if pid else None
        finally:
            writer.close()
            if pid is not None:
                kill_all([pid, *descendants(pid)])
        if reply is None:
            raise SandboxError(Failure(Outcome.CRASH, f"The process that calls {self.name} has exited."))
        if "value" in reply:
            return reply["value"]
        raise SandboxError(Failure(Outcome(reply["outcome"]), reply["cause"]))

    def close(self) -> None:
        """End the importer, and with it all calls; the next call starts another."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._popen is not None and self._channel is not None:
            self._channel.close()
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(5)
            self._popen.kill()
            self._popen.wait()
            self._popen = self._channel = None

    def _hand_over(self, theirs: socket.socket) -> None:
        """Give the importer the socket of a call; start the importer if there is none."""
        with self._lock:
            for _ in range(2):
                if self._popen is None or self._channel is None or self._popen.poll() is not None:
                    self._start()
                with suppress(BrokenPipeError, ConnectionResetError):  # killed since the last call
                    socket.send_fds(self._channel, [b"."], [theirs.fileno()])
                    return
                self._close()
        raise RuntimeError(f"{self.path}: the process that imported it has ended twice in a row.")

    def _start(self) -> None:
        self._close()
        # one OpenMP thread: the threads of a larger team do not survive a fork
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        self._popen, self._channel = start_child("verl.sandbox.forked_calls", env)
        setup = {"path": self.path, "name": self.name, "sys_path": list(sys.path), "limits": asdict(self.limits)}
        reply = None
        with suppress(OSError):
            self._channel.sendall(framed(json.dumps(setup).encode()))
            reply = receive(self._channel, START_S)
            self._channel.settimeout(None)
        if reply != b"ready":
            self._close()
            cause = reply.decode() if reply else f"no answer within {START_S:.0f} s"
            raise RuntimeError(f"{self.name} of {self.path} cannot be called in a process of its own: {cause}")


@atexit.register
def close_all() -> None:
    """End the importers of this process."""
    for key in [key for key in _OPEN if key[0] == os.getpid()]:
        _OPEN.pop(key).close()


async def _read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message; None: the other side has closed."""
    try:
        size = int.from_bytes(await reader.readexactly(4), sys.byteorder)
        message = json.loads(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError, ValueError):
        return None
    return message if isinstance(message, dict) else None


def plain(value: Any) -> Any:
    """Return what JSON has for a value that it lacks: lists and numbers for those of numpy, a text for others."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def result_of(function: Any, *arguments: Any) -> Any:
    """Return what a function returns, or its coroutine in an event loop of its own."""

    async def awaited(awaitable: Any) -> Any:
        return await awaitable

    result = function(*arguments)
    return asyncio.run(awaited(result)) if inspect.isawaitable(result) else result


# -- in the child -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Import the function; fork for each socket that arrives. Ends with its channel."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    setup = json.loads(receive(channel) or b"null")
    if setup is None:
        return
    sys.path[:] = setup["sys_path"]
    try:
        function = load_extern_type(setup["path"], setup["name"])
    except Exception as error:
        channel.sendall(framed(f"{type(error).__name__}: {error}".encode()))
        return
    channel.sendall(framed(b"ready"))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # monitors are reaped by the kernel
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's
    while True:
        data, sockets, *_ = socket.recv_fds(channel, 1, 1)
        if not data:
            return
        with socket.socket(fileno=sockets[0]) as caller:
            if os.fork() == 0:
                try:
                    channel.close()
                    _monitor(function, caller, Limits(**setup["limits"]))
                finally:
                    os._exit(0)


def _monitor(function: Any, caller: socket.socket, limits: Limits) -> None:
    """Fork the program of a call, wait for its end, and report it unless it did that itself."""
    die_with_parent()
    os.setsid()
    child = os.fork()
    if child == 0:
        try:
            enter(limits)
            _call(function, caller)
        finally:
            os._exit(0)
    caller.sendall(framed(json.dumps({"pid": os.getpid()}).encode()))
    outcome = outcome_of(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    cause = "its process has ended" if outcome is Outcome.DONE else f"its process has ended: {outcome.value}"
    outcome = Outcome.EXIT if outcome is Outcome.DONE else outcome
    with suppress(OSError):  # one that was answered reads no more
        caller.sendall(framed(json.dumps({"outcome": outcome.value, "cause": cause}).encode()))


def _call(function: Any, caller: socket.socket) -> None:
    arguments = json.loads(receive(caller) or b"null")
    if arguments is None:
        return
    try:
        payload = json.dumps({"value": result_of(function, *arguments)}, default=plain)
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {error}"[:_LONGEST_CAUSE]
        payload = json.dumps({"outcome": Outcome.RAISED.value, "cause": cause})
    caller.sendall(framed(payload.encode()))
