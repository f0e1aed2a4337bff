"""One sandbox process, seen from outside: its start, its calls and messages, its outcome."""

import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.sandbox.messages import BadFrame, FrameReader, framed
from verl.sandbox.outcomes import Failure, Outcome
from verl.sandbox.supervisor import MIB, Limits, descendants, end, outcome_of

_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from {} import main; main()"
_FORWARD_UP_TO = 256 * 1024
"""Bytes of a hand-over's output that are shown."""

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


def start_child(module: str, env: dict[str, str], **pipes: Any) -> tuple[subprocess.Popen, socket.socket]:
    """Start ``main()`` of a module in a new interpreter, with the number of its socket as the argument.

    Args:
        pipes: ``stdout`` and ``stderr`` of the child.

    Returns:
        the process, and the other end of its socket.
    """
    channel, theirs = socket.socketpair()
    root = str(Path(__file__).parents[2])
    line = [sys.executable, "-c", _START.format(module), root, str(theirs.fileno())]
    with theirs:
        return subprocess.Popen(line, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=env, **pipes), channel


@dataclass(frozen=True)
class Call:
    """A call to come: its number, the responses it is about (null: one, scored by itself), its pickled arguments."""

    number: int
    count: int | None
    arguments: bytes


@dataclass
class Process:
    """A worker process, its pipes and its open calls."""

    setup: dict[str, Any]
    limits: Limits
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
        env = {"PYTHONHASHSEED": "0", **os.environ}
        pipe = subprocess.PIPE
        self.popen, self.channel = start_child("verl.sandbox.worker", env, stdout=pipe, stderr=pipe)
        self.channel.setblocking(False)
        self._reader, self._unsent = FrameReader(), bytearray()
        for pipe in (self.popen.stdout, self.popen.stderr):
            os.set_blocking(pipe.fileno(), False)
        self._send(pickle.dumps(self.setup))
        self.since = time.monotonic()

    @property
    def is_idle(self) -> bool:
        return self.is_ready and not self.open_calls

    @property
    def wants_to_write(self) -> bool:
        return bool(self._unsent)

    def filenos(self) -> Iterator[int]:
        yield from (self.channel.fileno(), self.popen.stdout.fileno(), self.popen.stderr.fileno())

    def give(self, calls: list[Call], timeout_s: float) -> None:
        """Hand over calls, to be answered one after the other."""
        self.open_calls, self.is_awaiting = list(calls), False
        self._send(pickle.dumps((timeout_s, [(call.number, call.count, call.arguments) for call in calls])))
        self.since, self.printed, self._forwarded = time.monotonic(), 0, 0

    def _send(self, payload: bytes) -> None:
        self._unsent += framed(payload)
        self.write()

    def write(self) -> None:
        """Send what the channel takes by now."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                del self._unsent[: self.channel.send(self._unsent)]

    def read(self) -> tuple[list[dict], bool]:
        """Return the messages since the last call, and whether the process is still there."""
        self.forward_output()
        messages: list[dict] = []
        try:
            while data := self.channel.recv(1 << 20):
                messages += self._reader.feed(data)
        except BlockingIOError:
            return self._checked(messages), True
        except OSError:
            pass
        return self._checked(messages), False

    def _checked(self, messages: list) -> list[dict]:
        for message in messages:
            if not isinstance(message, dict):
                raise BadFrame(f"a message of type {type(message).__name__}")
        return messages

    def forward_output(self) -> None:
        """Print what the process has printed; of one that prints without end, the beginning."""
        for pipe, stream in ((self.popen.stdout, sys.stdout), (self.popen.stderr, sys.stderr)):
            with contextlib.suppress(BlockingIOError, ValueError):
                while data := os.read(pipe.fileno(), 1 << 16):
                    self.printed += len(data)
                    self._forwarded += len(data)
                    if stream is sys.stderr:
                        self.last_words = (self.last_words + data)[-4096:]
                    if self._forwarded <= _FORWARD_UP_TO:
                        stream.write(data.decode("utf-8", "replace"))
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
        """Return the stack of the process, which it writes on a signal."""
        below = list(descendants(self.popen.pid))
        program = below[1] if len(below) > 1 else None  # after init
        if program is None or not self.is_ready:
            return ""
        self.forward_output()
        self.last_words = b""
        with contextlib.suppress(OSError):
            os.kill(program, signal.SIGUSR1)
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline and b"verl/sandbox/worker.py" not in self.last_words:
            time.sleep(0.005)
            self._gather_words()
        return stack_of(self.last_words)

    def _gather_words(self) -> None:
        with contextlib.suppress(BlockingIOError, ValueError):
            while data := os.read(self.popen.stderr.fileno(), 1 << 16):
                self.last_words = (self.last_words + data)[-65536:]

    def end(self) -> Failure:
        """End the process and all below it, or say how it ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
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
    frames = [match for match in found if "verl/sandbox/" not in match["file"] and match["file"] != "<string>"]
    if not frames:
        return ""
    lines = [f'  File "{match["file"]}", line {match["line"]}, in {match["name"]}' for match in reversed(frames)]
    return "\n".join(["Stack (most recent call last):", *lines[-12:], ""])
