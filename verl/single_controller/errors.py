"""Errors of worker groups in the driver: the role, rank and method that failed, and the cause.

All are raised in the driver, all end the worker group they come from: its processes are stopped, and every later call
raises `WorkerGroupStopped` with the first failure as its cause.
"""

from __future__ import annotations

import os
import select
import signal as signals
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from verl.single_controller.processes import is_readable
from verl.telemetry.flight_recorder import RECORDER_VARIABLE, STALLED, OwnedRecorder, Reading
from verl.telemetry.memory import host_memory, oom_kills, process_state, shown_GiB
from verl.telemetry.run_record import log_only
from verl.utils.exit_codes import ExitCode

_NO_MEMORY = "for lack of memory"


class WorkerGroupError(RuntimeError):
    """Base of every failure of a worker group."""

    exit_class = ExitCode.WORKER


class WorkerError(WorkerGroupError):
    """A worker method raised.

    Attributes:
        role, rank, world_size, method: where.
        cause: the remote exception in one line, ``ValueError: no rows``.
        traceback: text of the remote traceback.
        doing: activity of its rollout engine; empty if it was idle.
        explanation: text for a user in place of a traceback; None if only the traceback helps.
        exit_class: of the remote exception.
    """

    def __init__(
        self,
        role: str,
        rank: int,
        world_size: int,
        method: str,
        cause: str,
        traceback: str,
        explanation: str | None = None,
        doing: str = "",
        exit_class: ExitCode = ExitCode.UNEXPECTED,
    ):
        """``explanation``: of the remote exception, if it has one; ``doing``: the state of its rollout engine."""
        self.role, self.rank, self.world_size, self.method = role, rank, world_size, method
        self.cause, self.traceback, self._explanation, self.doing = cause, traceback, explanation, doing
        self.exit_class = exit_class
        where = f"{role}.{method} failed on rank {rank} of {world_size}"
        at = f"\nWhat it was doing: {doing}." if doing else ""
        self.explanation = None if explanation is None else f"{where}: {explanation}{at}"
        super().__init__(f"{where}: {cause}{at}\nThe traceback of that worker:\n{traceback.rstrip()}")

    # an exception unpickles as type(*self.args), and args holds the message alone
    def __reduce__(self):
        where = (self.role, self.rank, self.world_size, self.method)
        return type(self), (*where, self.cause, self.traceback, self._explanation, self.doing, self.exit_class)


class WorkerDied(WorkerGroupError):
    """A worker process ended without an answer.

    Attributes:
        role, rank, world_size, method: where; ``method`` is None between calls.
        pid: its process id, None if unknown.
        signal: number of the signal that killed it, or None.
        exit_code: its exit status, or None if killed or unknown.
        stderr_end: the end of its stderr where the controller can read it, else "".
        report: its activity and memory, where known, else "".
        lost_node: address of its node and why it is taken for lost, else "".
    """

    def __init__(
        self,
        role: str,
        rank: int,
        world_size: int,
        method: str | None,
        pid: int | None,
        signal: int | None = None,
        exit_code: int | None = None,
        stderr_end: str = "",
        report: str = "",
        lost_node: str = "",
    ):
        self.role, self.rank, self.world_size, self.method = role, rank, world_size, method
        self.pid, self.signal, self.exit_code, self.stderr_end = pid, signal, exit_code, stderr_end
        self.report, self.lost_node = report, lost_node
        doing = f"while running {role}.{method}" if method else f"between calls of {role}"
        self.exit_class = ExitCode.MEMORY if _NO_MEMORY in report else ExitCode.WORKER
        message = f"Rank {rank} of {world_size} died {doing} (pid {pid}): {self._how()}"
        message += f"\n{report}" if report else ""
        super().__init__(message + (f"\nThe end of its stderr:\n{stderr_end.rstrip()}" if stderr_end else ""))

    def _how(self) -> str:
        if self.signal == signals.SIGKILL:
            return "killed by SIGKILL (9); if nobody sent it, it was likely out of memory (see `dmesg`)"
        if self.signal is not None:
            names = {number.value: number.name for number in signals.Signals}
            return f"killed by {names.get(self.signal, 'an unnamed signal')} ({self.signal})"
        if self.exit_code == STALLED:
            return f"ended by its own watchdog (exit code {STALLED}): it made no progress"
        if self.exit_code is not None:
            return f"left with exit code {self.exit_code}"
        if self.lost_node:
            return f"its node was lost, {self.lost_node}: the machine, its network or Ray's raylet there has ended"
        if "node has crashed" in self.stderr_end:  # in the words of Ray
            return "Ray gave up its node: the raylet there was killed, or answered no heartbeats"
        return "cause unknown; a process that leaves no trace was most often killed with SIGKILL, out of memory"

    def __reduce__(self):
        where = (self.role, self.rank, self.world_size, self.method)
        how = (self.signal, self.exit_code, self.stderr_end, self.report, self.lost_node)
        return type(self), (*where, self.pid, *how)


class WorkerTimeout(WorkerGroupError, TimeoutError):
    """Some ranks did not answer before the deadline of their call.

    Attributes:
        role, method: of the call.
        ranks: those that have not answered.
        waited: seconds.
        why: which limit was passed.
        report: place of the driver, and activity of those ranks, where known.
    """

    def __init__(
        self,
        role: str,
        method: str,
        ranks: list[int],
        world_size: int,
        waited: float,
        why: str = "",
        report: str = "",
    ):
        self.role, self.method, self.ranks = role, method, list(ranks)
        self.world_size, self.waited, self.why, self.report = world_size, waited, why, report
        named = "rank" if len(ranks) == 1 else "ranks"
        why = why or f"within {waited:.1f} s, the timeout of this group (trainer.worker_timeout)"
        super().__init__(
            f"{role}.{method}: {named} {', '.join(map(str, ranks))} of {world_size} did not answer {why}. The stacks "
            "of all their threads are on stderr. Raise the limit if the work is just slow."
            + (f"\n{report}" if report else "")
        )

    def __reduce__(self):
        return type(self), (self.role, self.method, self.ranks, self.world_size, self.waited, self.why, self.report)


class WorkerGroupStopped(WorkerGroupError):
    """A call to a group whose processes have ended: stopped on purpose, or after the failure that is the cause."""

    exit_class = None  # that of the cause


class NodesMissing(RuntimeError):
    """A cluster that the run has joined did not have the devices of a pool in time: nodes have not come, or not back.

    Another attempt may find them, so ``trainer.max_restarts`` makes one.
    """

    exit_class = ExitCode.WORKER


# -- Reports on a worker that died or does not answer: its activity, its memory, the kernel's out-of-memory count ----


class WorkerDiagnostics:
    """The flight recorders of a group, by rank."""

    def __init__(self, world_size: int):
        self._boxes = [OwnedRecorder() for _ in range(world_size)]
        # the kernel's counter is not of this group alone: `report` gives what was added since
        self._kills = oom_kills()

    def environment(self, rank: int) -> dict[str, str]:
        """Environment variables to add for a rank."""
        return {RECORDER_VARIABLE: self._boxes[rank].address}

    def report(self, rank: int, pid: int | None = None) -> str:
        """Lines on one rank; empty without any.

        Args:
            pid: of a process of this machine still running, for its process state.
        """
        if not 0 <= rank < len(self._boxes):
            return ""
        reading, now = self._boxes[rank].read(), time.monotonic()
        lines = [*_doing(reading, now), *_place(reading, now), *_memory(reading, now)]
        if (new := oom_kills() - self._kills) > 0:
            lines.append(f"The kernel killed {new} processes {_NO_MEMORY} since this group started.")
        if pid is not None and process_state(pid) == "T":
            lines.append(f"Process {pid} is stopped by a signal (SIGSTOP); `kill -CONT {pid}` resumes it.")
        if pid is not None and process_state(pid) == "D":
            lines.append(f"Process {pid} waits in the kernel, for a disk, a network file system or a device (state D).")
        return "\n".join(lines)

    def progress(self, rank: int) -> float:
        """When the rank reported progress last, of ``time.monotonic``; 0: never, or on another machine."""
        return self._boxes[rank].read().progress if 0 <= rank < len(self._boxes) else 0.0

    def close(self) -> None:
        for box in self._boxes:
            box.close()
        self._boxes = []


def describe(note: Mapping[str, Any]) -> str:
    """The engine, the phase and the requests of a note, or the rows of a micro-batch, in one line; empty if neither."""
    if note.get("micro_batch"):
        return f"micro-batch {note['micro_batch']}: {note.get('rows')}"
    if "engine" not in note:
        return ""
    text = f"rollout engine {note['engine']}"
    if note.get("phase"):
        text += f", phase {note['phase']}"
    if note.get("requests"):
        text += f", {note['requests']} requests"
    if note.get("longest_prompts"):
        text += f", longest prompts of {', '.join(map(str, note['longest_prompts']))} tokens"
    if note.get("first_requests"):
        text += f", the first of them {', '.join(map(str, note['first_requests']))}"
    return text


def _doing(reading: Reading, now: float) -> Iterator[str]:
    note = reading.notes
    if note.get("ended"):
        yield f"It was ended by its watchdog: {note['ended']}"
    if text := describe(note):
        since = f", since {now - note['since']:.1f} s" if "since" in note else ""
        step = f", the last step finished {now - reading.progress:.1f} s ago" if reading.progress else ""
        yield f"What it was doing: {text}{since}{step}."


_SILENT_S = 5.0
"""Seconds without a sign of life, which comes every second, that say something of a process."""


def _place(reading: Reading, now: float) -> Iterator[str]:
    if not reading.stack:
        return
    frames = reading.stack.partition(" < _guarded (")[0]  # the method's own: the frames that called it are the host's
    yield f"Its main thread was at {frames}."
    if now - reading.alive > _SILENT_S:
        yield (
            f"That was {now - reading.alive:.0f} s ago, and since then no Python code has run in it: it is stopped, or "
            "runs code that keeps Python's lock."
        )


def _memory(reading: Reading, now: float) -> Iterator[str]:
    if reading.rss:
        yield (
            f"Its memory when last seen, {now - reading.alive:.1f} s ago: {shown_GiB(reading.rss)} of the machine's "
            f"{shown_GiB(host_memory())}."
        )


# -- Stderr of forked workers: passed on at once, its end kept for error messages ----------------------------------
_KEPT_BYTES = 64 * 1024


_LINES = 20


_STACK_LINES = 100


_STACKS = ("Fatal Python error:", "The stacks of all threads:", "Timeout (")
"""First words of a stack dump: of a crash, of the watchdog, of faulthandler's timer."""


def end_of_stderr(text: str) -> str:
    """The end of ``text``: twenty lines, or more if a dump of stacks ends it; empty ones are left out."""
    lines = [line for line in text.splitlines() if line.strip()]
    begin = max((i for i, line in enumerate(lines) if line.startswith(_STACKS)), default=None)
    if begin is None:
        return "\n".join(lines[-_LINES:])
    kept = lines[max(0, min(begin - 2, len(lines) - _LINES)) :]
    return "\n".join([*kept[:_STACK_LINES], *(["..."] if len(kept) > _STACK_LINES else [])])


class StderrTail:
    """The driver's end of one worker's stderr.

    Args:
        out: descriptor to pass it on to.
    """

    def __init__(self, out: int = 2):
        self._out = out
        self._kept = bytearray()
        self._ours, self._theirs = os.pipe()
        self._lock = threading.Lock()  # the reading thread and callers of `end`

    def adopt(self) -> None:
        """In the worker: make the pipe this process's stderr, for Python and for libraries alike."""
        os.dup2(self._theirs, 2)
        os.close(self._theirs)
        os.close(self._ours)
        # a new one: the driver's may be a notebook's or a test's, and not write to descriptor 2 at all
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)

    def started(self) -> None:
        """In the driver, after the fork: from now on the worker alone can write."""
        os.close(self._theirs)
        _reader().watch(self)

    def fileno(self) -> int:
        return self._ours

    def end(self) -> str:
        """Return the last lines of what was written until now, as `end_of_stderr` picks them."""
        self.pass_on()
        return end_of_stderr(self._kept.decode(errors="replace"))

    def pass_on(self) -> bool:
        """Read and pass on what was written; False at the end of the stream."""
        with self._lock:
            while self._ours >= 0 and is_readable(self._ours):
                piece = os.read(self._ours, 1 << 16)
                if not piece:
                    return False
                self._kept += piece
                del self._kept[:-_KEPT_BYTES]
                with suppress(OSError):  # the driver's own stderr is closed
                    os.write(self._out, piece)
                # the log alone: the terminal has it by the line above
                log_only(piece.decode(errors="replace"))
        return self._ours >= 0

    def close(self) -> None:
        with self._lock:
            os.close(self._ours)
            self._ours = -1


class _Reader:
    """The one thread that reads all pipes."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._tails: dict[int, StderrTail] = {}
        self._poll = select.poll()
        self._bell, ring = os.pipe()
        self._ring = ring
        self._poll.register(self._bell, select.POLLIN)
        threading.Thread(target=self._read, name="verl-stderr", daemon=True).start()

    def watch(self, tail: StderrTail) -> None:
        self._tails[tail.fileno()] = tail
        self._poll.register(tail.fileno(), select.POLLIN)
        # wakes a poll under way, which does not see what is registered meanwhile
        os.write(self._ring, b".")

    def _read(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._bell:
                    os.read(self._bell, 1 << 10)
                elif not self._tails[fd].pass_on():
                    self._poll.unregister(fd)
                    self._tails.pop(fd).close()


_READER: _Reader | None = None


def _reader() -> _Reader:
    global _READER
    # a fork has the object and not its thread
    if _READER is None or _READER.pid != os.getpid():
        _READER = _Reader()
    return _READER
