"""Errors of worker groups in the driver: the role, rank and method that failed, and the cause.

All are raised in the driver, all end the worker group they come from: its processes are stopped, and every later call
raises `WorkerGroupStopped` with the first failure as its cause.
"""

import signal as signals

from verl.telemetry.black_box import STALLED


class WorkerGroupError(RuntimeError):
    """Base of every failure of a worker group."""


class WorkerError(WorkerGroupError):
    """A worker method raised.

    Attributes:
        role, rank, world_size, method: where.
        cause: the remote exception in one line, ``ValueError: no rows``.
        traceback: text of the remote traceback.
        doing: activity of its rollout engine; empty if it was idle.
        explanation: text for a user in place of a traceback; None if only the traceback helps.
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
    ):
        """``explanation``: of the remote exception, if it has one; ``doing``: the state of its rollout engine."""
        self.role, self.rank, self.world_size, self.method = role, rank, world_size, method
        self.cause, self.traceback, self._explanation, self.doing = cause, traceback, explanation, doing
        where = f"{role}.{method} failed on rank {rank} of {world_size}"
        at = f"\nWhat it was doing: {doing}." if doing else ""
        self.explanation = None if explanation is None else f"{where}: {explanation}{at}"
        super().__init__(f"{where}: {cause}{at}\nThe traceback of that worker:\n{traceback.rstrip()}")

    def __reduce__(self):
        where = (self.role, self.rank, self.world_size, self.method)
        return type(self), (*where, self.cause, self.traceback, self._explanation, self.doing)


class WorkerDied(WorkerGroupError):
    """A worker process ended without an answer.

    Attributes:
        role, rank, world_size, method: where; ``method`` is None between calls.
        pid: its process id, None if unknown.
        signal: number of the signal that killed it, or None.
        exit_code: its exit status, or None if killed or unknown.
        stderr_end: the end of its stderr where the controller can read it, else "".
        report: its activity and memory, where known, else "".
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
    ):
        self.role, self.rank, self.world_size, self.method = role, rank, world_size, method
        self.pid, self.signal, self.exit_code, self.stderr_end = pid, signal, exit_code, stderr_end
        self.report = report
        doing = f"while running {role}.{method}" if method else f"between calls of {role}"
        message = f"Rank {rank} of {world_size} died {doing} (pid {pid}): {self._how()}"
        message += f"\n{report}" if report else ""
        super().__init__(message + (f"\nThe end of its stderr:\n{stderr_end.rstrip()}" if stderr_end else ""))

    def _how(self) -> str:
        if self.signal == signals.SIGKILL:
            return "killed by SIGKILL (9); if nobody sent it, it was likely out of memory (see `dmesg`)"
        if self.signal is not None:
            return f"killed by {_signal_name(self.signal)} ({self.signal})"
        if self.exit_code == STALLED:
            return f"ended by its own watchdog (exit code {STALLED}): it made no progress"
        if self.exit_code is not None:
            return f"left with exit code {self.exit_code}"
        return "cause unknown; a process that leaves no trace was most often killed with SIGKILL, out of memory"

    def __reduce__(self):
        where = (self.role, self.rank, self.world_size, self.method)
        return type(self), (*where, self.pid, self.signal, self.exit_code, self.stderr_end, self.report)


class WorkerTimeout(WorkerGroupError, TimeoutError):
    """Some ranks did not answer before the deadline of the group.

    Attributes:
        role, method: of the call.
        ranks: those that have not answered.
        waited: seconds.
        report: activity of those ranks, where known.
    """

    def __init__(self, role: str, method: str, ranks: list[int], world_size: int, waited: float, report: str = ""):
        self.role, self.method, self.ranks = role, method, list(ranks)
        self.world_size, self.waited, self.report = world_size, waited, report
        named = "rank" if len(ranks) == 1 else "ranks"
        super().__init__(
            f"{role}.{method}: {named} {', '.join(map(str, ranks))} of {world_size} did not answer within "
            f"{waited:.1f} s, the timeout of this group. Their Python stacks are on stderr. "
            "Raise the timeout (trainer.worker_timeout) if the work is just slow; None waits for ever."
            + (f"\n{report}" if report else "")
        )

    def __reduce__(self):
        return type(self), (self.role, self.method, self.ranks, self.world_size, self.waited, self.report)


class WorkerGroupStopped(WorkerGroupError):
    """A call to a group whose processes have ended: stopped on purpose, or after the failure that is the cause."""


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return "an unnamed signal"
