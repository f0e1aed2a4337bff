"""Who watches a program under limits from outside, and who buries the orphans inside."""

import contextlib
import os
import resource
import select
import signal
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Any

from verl.utils.sandbox.endings import CODES, Ending

MIB = 1024 * 1024
LOOK_EVERY_S = 0.02
IDLE_LOOK_EVERY_S = 0.1
"""While nothing inside uses the processor, as between two batches."""


def can_see_descendants() -> bool:
    """Whether this system tells whose child a process is."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def descendants(pid: int) -> Iterator[int]:
    """Processes below ``pid``, parents before children; some may be gone by the time they are looked at."""
    waiting = [pid]
    while waiting:
        try:
            threads = os.listdir(f"/proc/{waiting[-1]}/task")
        except OSError:
            threads = []
        parent, children = waiting.pop(), []
        for thread in threads:
            with contextlib.suppress(OSError):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    children += map(int, file.read().split())
        yield from children
        waiting += children


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes and their groups, but for this process's own group.

    A group is killed at one stroke: what forks faster than one can look at the children does not get away.
    """
    own, groups = os.getpgid(0), set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            group = os.getpgid(pid)
            if group not in groups and group != own:
                groups.add(group)
                os.killpg(group, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)


class Keeper:
    """Stays outside, watches, and leaves with the program's status."""

    def __init__(self, limits: Any, parent: int, child: int, status: int, child_is_init: bool):
        self.limits, self.parent, self.child, self.status = limits, parent, child, status
        self.child_is_init = child_is_init
        self.deadline = time.monotonic() + limits.wall_s if limits.wall_s else None
        self._ticks_seen = 0

    def run(self) -> None:
        code = 1
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            code = self._watch()
        finally:
            self._sweep()
            if code < 0:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                if -code != signal.SIGKILL:
                    signal.signal(-code, signal.SIG_DFL)
                os.kill(os.getpid(), -code)
            os._exit(code if code >= 0 else 128 - code)

    def _watch(self) -> int:
        while True:
            code = self._ended()
            if code is not None:
                return code
            if os.getppid() != self.parent:
                return 1
            if self.deadline and time.monotonic() >= self.deadline:
                return CODES[Ending.WALL]
            excess = self._excess()
            if excess:
                return CODES[excess]
            _wait_for_child(LOOK_EVERY_S if self._is_at_work() else IDLE_LOOK_EVERY_S)

    def _is_at_work(self) -> bool:
        """Whether anything inside has used the processor since the last look."""
        before, self._ticks_seen = self._ticks_seen, sum(map(_ticks, [self.child, *descendants(self.child)]))
        return self._ticks_seen != before

    def _ended(self) -> int | None:
        """The return code of the program, if it has ended."""
        code = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return code
            if not pid:
                return code
            if pid == self.child:
                told = _read_status(self.status)  # by init, of the program
                code = os.waitstatus_to_exitcode(status if told is None else told)

    def _excess(self) -> Ending | None:
        if self.limits.processes is None and self.limits.memory_mb is None:
            return None
        below = list(descendants(self.child))
        inside = len(below) + (not self.child_is_init)
        if self.limits.processes is not None and inside > self.limits.processes:
            return Ending.PROCESSES
        if self.limits.memory_mb is not None:
            for measure in (_resident, _proportional):  # the second is exact, and slow
                if sum(map(measure, [self.child, *below])) <= self.limits.memory_mb * MIB:
                    return None
            return Ending.MEMORY
        return None

    def _sweep(self) -> None:
        """Kill everything below; a process killed hands its children to this one, so look again until none is left."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child, signal.SIGKILL)
        for _ in range(1000):
            kill_all(descendants(os.getpid()))
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            _wait_for_child(0.002)


def _ticks(pid: int) -> int:
    """Processor time of a process so far, in clock ticks."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, IndexError):
        return 0


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _proportional(pid: int) -> int:
    """Resident memory with shared pages divided among those who share them."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return _resident(pid)


def _wait_for_child(seconds: float) -> None:
    if hasattr(signal, "sigtimedwait"):
        signal.sigtimedwait({signal.SIGCHLD}, seconds)
    else:
        time.sleep(seconds)


def reap_until_end_of(program: int, status: int) -> None:
    """The life of init: bury the orphans, and tell the keeper how the program ended."""
    try:
        while True:
            pid, code = os.waitpid(-1, 0)
            if pid == program:
                os.write(status, struct.pack("=i", code))
                break
    finally:
        os._exit(0)


def _read_status(status: int) -> int | None:
    data = os.read(status, 4) if _is_readable(status) else b""
    return struct.unpack("=i", data)[0] if len(data) == 4 else None


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
