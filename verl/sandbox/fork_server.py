"""A function called in a fork of a process that imported it once: a killed call costs a new fork, and no import.

    this process    --socket-->  fork server: imports the function, and watches the clock
                                   supervisor: of limits, memory and orphans (`verl.sandbox.supervisor`)
                                     worker: calls the function

No signal handlers and no alarms, so it works in any thread; arguments and results travel as JSON. The worker has no
network where the system allows that, and sees no environment variables but a few harmless ones.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from functools import lru_cache
from typing import Any

from verl.sandbox.messages import framed, receive, start_child
from verl.sandbox.outcomes import Failure, Outcome, SandboxError
from verl.sandbox.supervisor import Limits, end, enter, kill_tree, outcome_of, status_of_self

START_S = 180.0
"""Seconds for the import of the function's module."""

GRACE_S = 10.0
"""Seconds after the limit of a call in which the fork server must have answered."""

_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Environment variables that the child sees: no keys and tokens."""


class ForkServer:
    """Calls ``function`` in a child, one call at a time.

    Args:
        function: ``module:name``.
        timeout_s: wall seconds of one call.
        memory_mb: MiB that a call may take on top of those of the imports.
    """

    def __init__(self, function: str, timeout_s: float, memory_mb: int = 1024):
        self.function, self.timeout_s, self.memory_mb = function, timeout_s, memory_mb
        self._lock = threading.Lock()
        self._popen: subprocess.Popen | None = None
        self._channel: socket.socket | None = None

    def __call__(self, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Return the function's result.

        Args:
            timeout_s: of this call, in place of ``self.timeout_s``.

        Raises:
            SandboxError: it took too long or too much memory, crashed, or raised.
            RuntimeError: its module cannot be imported.
        """
        with self._lock:
            if self._popen is None or self._popen.poll() is not None:
                self._start()
            timeout_s = timeout_s or self.timeout_s
            request = {"timeout_s": timeout_s, "arguments": arguments}
            try:
                self._send(request)
            except (BrokenPipeError, ConnectionResetError):  # killed since the last call
                self._start()
                self._send(request)
            # no second try from here on: the call itself may be what ended the process
            reply = self._receive(timeout_s + GRACE_S)
        if reply is None:
            raise SandboxError(Failure(Outcome.CRASH, f"The process that calls {self.function} has exited."))
        if "value" in reply:
            return reply["value"]
        raise SandboxError(Failure(Outcome(reply["outcome"]), reply["cause"]))

    def close(self) -> None:
        """End the child; the next call starts another."""
        if self._popen is not None:
            with suppress(subprocess.TimeoutExpired):
                end(self._popen)
            self._channel.close()
            self._popen = None

    def _start(self) -> None:
        self.close()
        env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        # one OpenMP thread: the threads of a larger team do not survive the fork, and the worker would wait for them
        env |= {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "OMP_NUM_THREADS": "1"}
        quiet = subprocess.DEVNULL
        self._popen, self._channel = start_child("verl.sandbox.fork_server", env, stdout=quiet, stderr=quiet)
        self._send({"function": self.function, "memory_mb": self.memory_mb})
        reply = self._receive(START_S)
        if reply != {"value": "ready"}:
            self.close()
            cause = reply["cause"] if reply else f"no answer within {START_S:.0f} s"
            raise RuntimeError(f"{self.function} cannot be served by a child process: {cause}")

    def _send(self, message: dict[str, Any]) -> None:
        self._channel.settimeout(None)
        self._channel.sendall(framed(json.dumps(message).encode()))

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """Return the fork server's next message; if none comes in time, end the fork server and return None."""
        payload = None
        with suppress(OSError):
            payload = receive(self._channel, seconds)
        if payload is None:
            self.close()
        return None if payload is None else json.loads(payload)


def fork_server(function: str, timeout_s: float, memory_mb: int = 1024, number: int = 0) -> ForkServer:
    """The one :class:`ForkServer` of this process for a function, its limits, and a number: of several, which one."""
    return _of_process(os.getpid(), function, timeout_s, memory_mb, number)


@lru_cache(maxsize=64)
def _of_process(pid: int, function: str, timeout_s: float, memory_mb: int, number: int) -> ForkServer:
    """Return the server cached under its arguments; by ``pid``, since a fork must not share its parent's socket."""
    return ForkServer(function, timeout_s, memory_mb)


# -- in the child -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve requests: hand each to the worker, watch the clock, pass the reply on.

    It ends with its channel: the kernel's death signal would follow the *thread* that started it, and reward threads
    come and go.
    """
    channel = socket.socket(fileno=int(sys.argv[1]))
    setup = receive(channel)
    if setup is None:
        return
    options = json.loads(setup)
    try:
        module, name = options["function"].split(":")
        call = getattr(importlib.import_module(module), name)
    except Exception as error:
        channel.sendall(framed(_failed(Outcome.RAISED, f"{type(error).__name__}: {error}")))
        return
    channel.sendall(framed(json.dumps({"value": "ready"}).encode()))
    worker = None
    while (request := receive(channel)) is not None:
        worker = worker or _Worker(call, options["memory_mb"], channel)
        reply = worker.answer(request, json.loads(request)["timeout_s"])
        if worker.has_ended:
            worker = None
        channel.sendall(framed(reply))
    if worker is not None:
        worker.end()


class _Worker:
    """The fork that calls the function, seen from the fork server."""

    def __init__(self, call: Any, memory_mb: int, channel_of_server: socket.socket):
        self.memory_mb, self.has_ended = memory_mb, False
        self.channel, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                # or the function could write an answer of its own making to the caller
                channel_of_server.close()
                self.channel.close()
                _serve(call, theirs, memory_mb)
            finally:
                os._exit(0)
        theirs.close()

    def answer(self, request: bytes, timeout_s: float) -> bytes:
        """Return the reply to a request; if none comes in time, end the worker and return its outcome as a reply."""
        reply = None
        try:
            self.channel.settimeout(None)
            self.channel.sendall(framed(request))
            reply = receive(self.channel, timeout_s)
        except TimeoutError:  # before OSError, of which it is a kind
            self.end()
            return _failed(Outcome.TIMEOUT, f"the call took longer than {timeout_s:g} s")
        except OSError:  # it has ended before it read the request
            pass
        if reply is not None:
            return reply
        outcome = outcome_of(self.end())
        if outcome is Outcome.MEMORY:
            return _failed(outcome, f"the call took more than {self.memory_mb} MiB")
        return _failed(Outcome.CRASH, "the call ended its process")

    def end(self) -> int:
        """Kill the worker and everything below it; returns its return code, its own if it had ended before."""
        self.has_ended = True
        self.channel.close()
        return kill_tree(self.pid)


def _serve(call: Any, channel: socket.socket, memory_mb: int) -> None:
    # Without a process namespace of its own: supervisors of programs below (`code_runner`) read /proc as they find it.
    own_kb = ""
    with suppress(OSError):
        own_kb = status_of_self("VmData")
    # on top of the private memory this process has already; no limit where the system does not tell
    limit_mb = memory_mb + int(own_kb) // 1024 if own_kb else None
    enter(Limits(memory_mb=limit_mb, network=False), processes=False)
    while (request := receive(channel)) is not None:
        try:
            reply = json.dumps({"value": call(*json.loads(request)["arguments"])}).encode()
        except MemoryError:
            reply = _failed(Outcome.MEMORY, f"the call took more than {memory_mb} MiB")
        except (Exception, SystemExit) as error:
            reply = _failed(Outcome.RAISED, f"{type(error).__name__}: {error}"[:1000])
        channel.sendall(framed(reply))


def _failed(outcome: Outcome, cause: str) -> bytes:
    return json.dumps({"outcome": outcome.value, "cause": cause}).encode()
