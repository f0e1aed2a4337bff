"""A function in a child process that can be killed in the middle of a call, and is back a millisecond later.

Two processes serve a function: a *keeper*, which imports it once and then only watches, and its fork, which calls it.
When a call takes too long the keeper kills the fork and makes another, without importing anything anew. No signal
handlers and no alarms, so it works in any thread; arguments and results travel as JSON. The fork has no network where
the system allows that, and sees no environment variables but a few harmless ones.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from functools import lru_cache
from typing import Any, BinaryIO

from verl.sandbox.supervisor import NO_NETWORK, descendants, kill_all, unshare

START_S = 180.0
"""For the import of the function's module."""

GRACE_S = 10.0
"""How much later than its limit the keeper may answer."""

_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""What of the environment children see: no keys and tokens."""

_PR_SET_PDEATHSIG = 1


class Killed(RuntimeError):
    """A call was ended from outside or failed: ``reason`` is ``timeout``, ``memory``, ``crash`` or ``error``."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


class Killable:
    """Calls ``function`` in a child, one call at a time.

    Args:
        function: ``module:name``.
        timeout_s: wall seconds of one call.
        memory_mb: MiB that a call may take on top of what the imports took.
    """

    def __init__(self, function: str, timeout_s: float, memory_mb: int = 1024):
        self.function, self.timeout_s, self.memory_mb = function, timeout_s, memory_mb
        self._lock = threading.Lock()
        self._keeper: subprocess.Popen | None = None

    def __call__(self, *arguments: Any, timeout_s: float | None = None) -> Any:
        """The function's result.

        Args:
            timeout_s: of this call, in place of ``self.timeout_s``.

        Raises:
            Killed: it took too long or too much memory, crashed, or raised.
            RuntimeError: its module cannot be imported.
        """
        with self._lock:
            if self._keeper is None or self._keeper.poll() is not None:
                self._start()
            timeout_s = timeout_s or self.timeout_s
            task = json.dumps({"timeout_s": timeout_s, "arguments": arguments}).encode() + b"\n"
            try:
                self._send(task)
            except BrokenPipeError:  # killed since the last call
                self._start()
                self._send(task)
            reply = self._read(timeout_s + GRACE_S)
        if reply is None:
            raise Killed("crash", f"The process that calls {self.function} is gone.")
        if "value" in reply:
            return reply["value"]
        raise Killed(reply["reason"], reply["detail"])

    def close(self) -> None:
        """End the child; the next call starts another."""
        if self._keeper is not None:
            self._keeper.kill()
            self._keeper.communicate()
            self._keeper = None

    def _start(self) -> None:
        self.close()
        command = [sys.executable, "-m", "verl.sandbox.fork_server", self.function, str(self.memory_mb)]
        env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        env |= {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._keeper = subprocess.Popen(command, env=env, **pipes)
        reply = self._read(START_S)
        if reply != {"value": "ready"}:
            self.close()
            detail = reply["detail"] if reply else f"no answer within {START_S:.0f} s"
            raise RuntimeError(f"{self.function} cannot be served by a child process: {detail}")

    def _send(self, task: bytes) -> None:
        self._keeper.stdin.write(task)
        self._keeper.stdin.flush()

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """The keeper's next line; None, and the keeper killed, if none comes."""
        line = _line(self._keeper.stdout, seconds)
        if not line:
            self.close()
        return json.loads(line) if line else None


def killable(function: str, timeout_s: float, memory_mb: int = 1024) -> Killable:
    """The one :class:`Killable` of this process for a function and its limits."""
    return _of_process(os.getpid(), function, timeout_s, memory_mb)


@lru_cache(maxsize=64)
def _of_process(pid: int, function: str, timeout_s: float, memory_mb: int) -> Killable:
    """Keyed by pid: a forked child must not share its parent's pipes."""
    return Killable(function, timeout_s, memory_mb)


def _line(file: BinaryIO, seconds: float) -> bytes | None:
    """The next line of an unbuffered pipe; empty at its end, None when ``seconds`` are over."""
    data, end, fd = b"", time.monotonic() + seconds, file.fileno()
    while not data.endswith(b"\n"):
        if not select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]:
            return None
        piece = os.read(fd, 1 << 16)
        if not piece:
            return b""
        data += piece
    return data


# -- in the child -----------------------------------------------------------------------------------------------------


def keep(function: str, memory_mb: int) -> None:
    """The keeper: hands each line of stdin to the fork that calls, watches the clock, writes the reply to stdout."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the function prints is no reply
    try:
        module, name = function.split(":")
        call = getattr(importlib.import_module(module), name)
    except Exception as error:
        replies.write(_packed({"reason": "error", "detail": f"{type(error).__name__}: {error}"}))
        return
    replies.write(_packed({"value": "ready"}))
    worker = None
    for line in sys.stdin.buffer:
        worker = worker or _Worker(call, memory_mb)
        timeout_s = json.loads(line)["timeout_s"]
        worker.tasks.write(line)
        reply = _line(worker.replies, timeout_s)
        if not reply:
            worker.end()
            worker = None
            late = {"reason": "timeout", "detail": f"the call took longer than {timeout_s:g} s"}
            gone = {"reason": "crash", "detail": "the call ended its process"}
            reply = _packed(late if reply is None else gone)
        replies.write(reply)


class _Worker:
    """The fork that calls the function, seen from the keeper."""

    def __init__(self, call: Any, memory_mb: int):
        (task_out, task_in), (reply_out, reply_in) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(task_in)
            os.close(reply_out)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            _serve(call, os.fdopen(task_out, "rb"), os.fdopen(reply_in, "wb", buffering=0), memory_mb)
            os._exit(0)
        os.close(task_out)
        os.close(reply_in)
        self.tasks = os.fdopen(task_in, "wb", buffering=0)
        self.replies = os.fdopen(reply_out, "rb", buffering=0)

    def end(self) -> None:
        """Kill it and everything below it."""
        kill_all([self.pid, *descendants(self.pid)])
        os.waitpid(self.pid, 0)
        self.tasks.close()
        self.replies.close()


def _serve(call: Any, tasks: BinaryIO, replies: BinaryIO, memory_mb: int) -> None:
    _end_with_keeper()
    os.setsid()
    if sys.platform == "linux":
        unshare(NO_NETWORK)
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + (memory_mb << 20),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in tasks:
        try:
            reply = {"value": call(*json.loads(line)["arguments"])}
        except MemoryError:
            reply = {"reason": "memory", "detail": f"the call took more than {memory_mb} MiB"}
        except (Exception, SystemExit) as error:
            reply = {"reason": "error", "detail": f"{type(error).__name__}: {error}"[:1000]}
        replies.write(_packed(reply))


def _packed(reply: dict[str, Any]) -> bytes:
    return json.dumps(reply).encode() + b"\n"


def _end_with_keeper() -> None:
    """Ask the kernel to kill the fork when the keeper ends. The keeper itself ends with its stdin: the kernel would
    watch the *thread* that started it, and reward threads come and go."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    keep(sys.argv[1], int(sys.argv[2]))
