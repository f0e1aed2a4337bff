"""Child processes of the driver: started by fork, watched, reaped with their exit status.

Linux gives every guarantee: a child dies with the driver however that ends, and its death is seen at once. Elsewhere a
child sees the end of the driver when it next reads from it, and its death is seen when its connection closes.
"""

import ctypes
import os
import queue
import select
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes), Linux 6.15
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("=QQ11Ii")  # mask, cgroup id, pid and ids, exit status as from waitpid


class Child:
    """A forked process, leader of a process group of its own."""

    def __init__(self, target: Callable[[], None]):
        self.pid = _forker().fork(target)
        self._parent = os.getpid()
        self.pidfd = open_pidfd(self.pid)
        # as from waitpid; -1: ended, and how is not known
        self._status: int | None = None

    def has_ended(self) -> bool:
        """True once the process has ended, reaped or not."""
        if self._status is not None:
            return True
        if self.pidfd is not None:
            return is_readable(self.pidfd)
        return self._reap(os.WNOHANG)

    def end(self, grace: float = 0.0) -> None:
        """Wait ``grace`` seconds for it to leave by itself, then kill it and what it started."""
        if os.getpid() != self._parent:  # a copy of this object in another child
            return
        self.await_end(grace)
        if self._status is None:
            _kill_group(self.pid)
        self.outcome()

    def await_end(self, seconds: float) -> bool:
        """Wait until it has ended, at most ``seconds``; returns whether it has."""
        deadline = time.monotonic() + seconds
        while not self.has_ended():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        return True

    def outcome(self) -> tuple[int | None, int | None]:
        """(signal, exit code) of a child that has ended or is about to; waits for it, and kills what it started."""
        self._reap(0)
        return split_status(self._status)

    def _reap(self, flags: int) -> bool:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, flags)
            except ChildProcessError:  # another waitpid reaped it
                pid, status = self.pid, -1
            if not pid:
                return False
            self._status = status
            # what it had started goes on in its group: servers, loaders, compilers
            _kill_group(self.pid, leader=False)
            if self.pidfd is not None:
                os.close(self.pidfd)
                self.pidfd = None
        return True


def is_readable(fd: int) -> bool:
    poll = select.poll()  # select.select would refuse descriptors above 1023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def split_status(status: int | None) -> tuple[int | None, int | None]:
    """A status as from waitpid -> (signal, exit code); (None, None) if unknown."""
    if status is None or status < 0:
        return None, None
    return (os.WTERMSIG(status), None) if os.WIFSIGNALED(status) else (None, os.WEXITSTATUS(status))


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where the system has no such thing."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def outcome_by_pidfd(pidfd: int) -> tuple[int | None, int | None]:
    """(signal, exit code) of a dead process that is not a child of ours; (None, None) before Linux 6.15."""
    if sys.platform != "linux":
        return None, None
    import fcntl

    buffer = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, buffer, True)
    except OSError:
        return None, None
    mask, *_, status = _PIDFD_INFO.unpack(buffer)
    return split_status(status) if mask & _PIDFD_INFO_EXIT else (None, None)


class _Forker:
    """The one thread that forks.

    A child lives as long as the thread that forked it (PR_SET_PDEATHSIG goes by thread): this one lives as long as the
    driver. And OpenMP cannot go on in the child of a thread that used it: this one never has, so that in the child,
    where it is the main thread, torch can start threads afresh.
    """

    def __init__(self):
        self.driver = os.getpid()
        self._requests: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="verl-forker", daemon=True).start()

    def fork(self, target: Callable[[], None]) -> int:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the child would print it again
        # This thread's cache of DTensor operations can hold the last reference to a process group. A forked child frees
        # the caches of all threads but its own, and a group cannot be destroyed there: it waits for threads that only
        # the parent has.
        clear = getattr(sys.modules.get("torch._C"), "_clear_DTensor_sharding_propagator_cache", None)
        if clear is not None:
            clear()
        pid: Future[int] = Future()
        self._requests.put((target, pid))
        return pid.result()

    def _serve(self) -> None:
        while True:
            target, answer = self._requests.get()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork in a process with threads
                    pid = os.fork()
            except OSError as error:
                answer.set_exception(error)
                continue
            if not pid:
                self._run_child(target)
            answer.set_result(pid)

    def _run_child(self, target: Callable[[], None]) -> None:
        """Run the target in the child, then exit."""
        code = 1
        try:
            self._prepare()
            target()
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)  # not sys.exit: the exit handlers are the driver's

    def _prepare(self) -> None:
        global _FORKER
        _FORKER = None
        os.setpgid(0, 0)  # Ctrl-C is for the driver, which then ends its children
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self.driver:  # it died in between
                os._exit(1)


_FORKER: _Forker | None = None


def _forker() -> _Forker:
    global _FORKER
    if _FORKER is None or _FORKER.driver != os.getpid():
        _FORKER = _Forker()
    return _FORKER


def _kill_group(pid: int, leader: bool = True) -> None:
    """Kill a child and what it started, or without ``leader`` only the latter."""
    for kill in (os.killpg, os.kill)[: 2 if leader else 1]:  # os.kill for a child that has not made its group yet
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def torchrun_size() -> tuple[int, int] | None:
    """Nodes, and ranks on each, where torchrun or a launcher with its variables started this process; else None.

    Ranks of a worker group, and processes that they start, have these variables too, and ``WG_BACKEND`` beside them.
    torchrun sets ``TORCHELASTIC_RUN_ID``, also where such a rank started it.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    is_of_group = "WG_BACKEND" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    if is_of_group or not all(name in os.environ for name in names):
        return None
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return int(os.environ["WORLD_SIZE"]) // local, local
