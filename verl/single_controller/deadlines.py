"""Deadlines of calls to workers: how long the driver waits for an answer, what it says meanwhile, when it gives up.

A deadline belongs to a class of calls (load, generate, score, update, sync, save, other). Unless one is configured it
follows what the call took before. It counts from the last progress of the ranks that have not answered, where they
report it: a generation that finishes steps, an update that finishes micro-batches, is not late however long it takes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.telemetry.memory import process_state

CLASSES = ("load", "generate", "score", "update", "sync", "save", "other")

_METHODS = {
    "__init__": "load",
    "init_model": "load",
    "load_checkpoint": "load",
    "start_server": "load",
    "generate_sequences": "generate",
    "start_generating": "generate",
    "serve": "sync",  # the weights; requests come after
    "send_weights": "sync",
    "receive_weights": "sync",
    "join_link": "sync",
    "open_link": "sync",
    "measure_loss": "score",
    "export_model": "save",
    "save_checkpoint": "save",
    "finish_saving": "save",
    "delete_checkpoints": "save",
}
_PREFIXES = (("compute_", "score"), ("update_", "update"), ("generate", "generate"))

_UNMEASURED_S = 7200.0
_LEAST_S = {"load": 7200.0, "save": 7200.0}
_LEAST_OTHER_S = 1800.0
_FACTOR = 20.0
"""A call is late after so many times the longest that was seen, and after the least of its class."""

_NOTICE_S, _NOTICE_UNMEASURED_S, _NOTICE_FACTOR = 60.0, 600.0, 5.0
_SLICE_S = 5.0
"""Seconds between two looks at the ranks that are waited for."""
STOPPED_S = 300.0
"""Seconds that a worker may be stopped by a signal (SIGSTOP) before the wait for it ends."""


def class_of(method: str) -> str:
    """The class of a method of a role."""
    return _METHODS.get(method) or next((name for prefix, name in _PREFIXES if method.startswith(prefix)), "other")


@dataclass
class Deadlines:
    """Limits of the calls of one group, and how long its calls took.

    Attributes:
        seconds: class -> limit; None, or no entry: measured; 0: none.
    """

    seconds: Mapping[str, float | None] = field(default_factory=dict)
    _longest: dict[tuple[str, str], float] = field(default_factory=dict)

    def limit(self, role: str, method: str) -> float | None:
        """Seconds without progress after which a call has failed; None: no limit."""
        given = self.seconds.get(class_of(method))
        if given is not None:
            return given or None
        least = _LEAST_S.get(class_of(method), _LEAST_OTHER_S)
        longest = self.longest(role, method)
        return max(_UNMEASURED_S, least) if longest is None else max(least, _FACTOR * longest)

    def notice(self, role: str, method: str) -> float:
        """Seconds after which the user is told what is waited for."""
        longest = self.longest(role, method)
        return _NOTICE_UNMEASURED_S if longest is None else max(_NOTICE_S, _NOTICE_FACTOR * longest)

    def longest(self, role: str, method: str) -> float | None:
        """Seconds of the longest call that was answered; None: there was none."""
        return self._longest.get((role, method))

    def answered(self, role: str, method: str, seconds: float) -> None:
        self._longest[role, method] = max(seconds, self._longest.get((role, method), 0.0))


class Wait:
    """One wait of the driver for answers to a call.

    Args:
        deadlines: of the group.
        role, method: of the call.
        world_size: ranks of the group.
        ahead: (role, method) of calls that the same processes answer first.
        timeout: seconds the wait may take in all, whatever ``deadlines`` say; None: those hold.
        progress: rank -> the last progress that it reported, of ``time.monotonic``; 0: never.
        pid: rank -> its process id if it is a process of this machine.
        describe: rank -> what is known of it, as lines.
    """

    def __init__(
        self,
        deadlines: Deadlines,
        role: str,
        method: str,
        world_size: int,
        *,
        ahead: Iterable[tuple[str, str]] = (),
        timeout: float | None = None,
        progress: Callable[[int], float],
        pid: Callable[[int], int | None],
        describe: Callable[[int], str],
    ):
        self._deadlines, self._role, self._method, self._world_size = deadlines, role, method, world_size
        self._timeout, self._progress, self.pid, self.describe = timeout, progress, pid, describe
        limits = [deadlines.limit(*call) for call in {(role, method), *ahead}]
        self.limit: float | None = None if None in limits else sum(limit or 0.0 for limit in limits)
        self._notice = deadlines.notice(role, method)
        self.waited = 0.0
        self._last = self._moved = time.monotonic()
        self._idle = 0.0
        self._stopped: dict[int, float] = {}
        """Rank -> seconds for which it has been seen stopped."""
        self._said_stopped: set[int] = set()

    @property
    def slice_s(self) -> float:
        """Seconds until the next `reason_to_stop` is due."""
        left = _SLICE_S if self._timeout is None else min(_SLICE_S, self._timeout - self.waited)
        if self.limit is not None:
            left = min(left, self.limit - self._idle)
        return max(0.0, left)

    def finish(self) -> None:
        """Note that all answers are there."""
        self._deadlines.answered(self._role, self._method, self.waited + time.monotonic() - self._last)

    def reason_to_stop(self, late: Sequence[int]) -> str | None:
        """Look at the ranks that have not answered; returns why they are waited for no longer, or None.

        Says on stderr what is waited for when a rank is stopped, and when the wait has become long.
        """
        now = time.monotonic()
        # the driver, too, may have been stopped: a time that it did not see does not count
        passed = min(now - self._last, 2 * _SLICE_S)
        self._last, self.waited, self._idle = now, self.waited + passed, self._idle + passed
        moved = max((self._progress(rank) for rank in late), default=0.0)
        if moved > self._moved:
            self._moved, self._idle = moved, min(self._idle, max(0.0, now - moved))
        if self._timeout is not None and self.waited >= self._timeout:
            return f"within {self._timeout:.1f} s, the timeout of this group (trainer.worker_timeout)"
        if self.limit is not None and self._idle >= self.limit:
            name = class_of(self._method)
            return f"and made no progress for {self._idle:.1f} s, which is more than trainer.deadlines.{name} allows"
        why = self._look_for_stopped(late, passed)
        if why is None and self._idle >= self._notice:
            self._say_long(late)
        return why

    def _look_for_stopped(self, late: Sequence[int], passed: float) -> str | None:
        pids = {rank: pid for rank in late if (pid := self.pid(rank)) is not None}
        states = {rank: process_state(pid) for rank, pid in pids.items()}
        seen = {rank: self._stopped.get(rank, 0.0) + passed for rank, state in states.items() if state == "T"}
        self._stopped = seen
        for rank in sorted(seen.keys() - self._said_stopped):
            self._said_stopped.add(rank)
            say(
                f"warning: {self._role}.{self._method} waits for rank {rank} of {self._world_size}, whose process "
                f"{pids[rank]} is stopped by a signal (SIGSTOP). `kill -CONT {pids[rank]}` resumes it; else the run "
                f"ends in {STOPPED_S:.0f} s."
            )
        for rank, seconds in seen.items():
            if seconds >= STOPPED_S:
                return f"and the process of rank {rank} has been stopped by a signal for {seconds:.0f} s"
        return None

    def _say_long(self, late: Sequence[int]) -> None:
        self._notice = 2 * self._idle  # said again after as long again
        longest = self._deadlines.longest(self._role, self._method)
        before = "it is the first such call" if longest is None else f"the longest before took {longest:.1f} s"
        ends = "there is no limit" if self.limit is None else f"the run ends after {self.limit:.0f} s without progress"
        lines = [
            f"warning: {waiting_for(self._role, self._method, late, self._world_size)} for {self.waited:.0f} s, the "
            f"last {self._idle:.0f} s without progress; {before}, {ends} (trainer.deadlines.{class_of(self._method)})."
        ]
        lines += [f"Rank {rank}:\n{text}" for rank in late[:4] if (text := self.describe(rank))]
        say("\n".join(lines))


def waiting_for(role: str, method: str, late: Sequence[int], world_size: int) -> str:
    """Who waits for whom: the frame of the driver outside this package, the call, the ranks."""
    named = "rank" if len(late) == 1 else "ranks"
    place = f"the driver, at {found}," if (found := driver_place()) else "the driver"
    return f"{place} waits in {role}.{method} for {named} {', '.join(map(str, late))} of {world_size}"


def driver_place() -> str:
    """``function (file:line)`` of the code that called a worker group."""
    frame: Any = sys._getframe(1)
    while frame is not None and "verl/single_controller/" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return ""
    folder, _, name = frame.f_code.co_filename.rpartition("/")
    return f"{frame.f_code.co_name} ({folder.rpartition('/')[2]}/{name}:{frame.f_lineno})"


def say(text: str) -> None:
    """Print on stderr, which the log of the run copies."""
    print(text, file=sys.stderr, flush=True)
