"""Limits of a child process and of all it starts: the supervisor that watches them, and the namespaces they live in.

A fresh child calls :func:`enter` before anything else. It becomes three processes:

    supervisor  the child as its parent knows it; watches the two others, and exits with the program's status
    init        pid 1 of a pid namespace: when it ends, the kernel ends every process in there
    program     goes on after ``enter``

The supervisor ends everything when the parent dies, when the wall clock is up, or when the processes below it are too
many or hold too much memory. Where the kernel grants no pid namespace, init is left out and the supervisor goes by the
process tree. `enter` returns what could not be had. Standard library only: a child is there in some 20 ms.
"""

import contextlib
import ctypes
import functools
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.sandbox.outcomes import Outcome

MIB = 1024 * 1024
LOOK_EVERY_S = 0.02
IDLE_LOOK_EVERY_S = 0.1
"""Seconds between two looks while nothing inside uses the processor, as between two batches."""
LOOK_SHARE = 0.03
"""Share of a processor that looks may take: each thread inside makes them dearer."""

CODES = {Outcome.TIMEOUT: 121, Outcome.MEMORY: 122, Outcome.PROCESSES: 123}
"""Exit codes of a supervisor that ended its program."""


def outcome_of(returncode: int) -> Outcome:
    """Return the outcome behind a return code as of ``subprocess``, of a process that called :func:`enter`."""
    for outcome, code in CODES.items():
        if returncode == code:
            return outcome
    if returncode >= 0:
        return Outcome.EXIT if returncode else Outcome.DONE
    return Outcome.CPU if -returncode == signal.SIGXCPU else Outcome.CRASH


def descendants(pid: int) -> Iterator[int]:
    """Processes below ``pid``, parents before children; some may be gone by the time they are looked at."""
    waiting = [pid]
    while waiting:
        try:
            # the kernel lists children by the thread that forked them: every thread of a process is asked
            threads = os.listdir(f"/proc/{waiting[-1]}/task")
        except OSError:
            threads = []
        parent = waiting.pop()
        children: list[int] = []
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
            # by itself, too: one that is still in this process's own group was left out above
            os.kill(pid, signal.SIGKILL)


class Supervisor:
    """Watches a program from outside its namespace, and exits with the program's status."""

    def __init__(self, limits: Any, parent: int, child: int, status: int, child_is_init: bool):
        self.limits, self.parent, self.child, self.status = limits, parent, child, status
        self.child_is_init = child_is_init
        self.deadline = time.monotonic() + limits.wall_s if limits.wall_s else None
        self._ticks_seen = 0

    def run(self) -> None:
        code = 1
        try:
            # blocked, so that sigtimedwait takes it: a child that ends between two looks is not missed
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            # default actions: a supervisor that is ended takes init along, by init's death signal (`die_with_parent`)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            code = self._watch()
        finally:
            self._sweep()
            # ends by the signal that ended the program, so that `subprocess` reports it; without a core file of its own
            if code < 0:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                if -code != signal.SIGKILL:
                    signal.signal(-code, signal.SIG_DFL)
                os.kill(os.getpid(), -code)
            os._exit(code if code >= 0 else 128 - code)

    def _watch(self) -> int:
        while True:
            # first: a program that ended by itself keeps its own outcome, even if a limit was reached meanwhile
            code = self._ended()
            if code is not None:
                return code
            # looked up: a death signal would follow the thread that started this, which may end long before the parent
            if os.getppid() != self.parent:
                return 1
            if self.deadline and time.monotonic() >= self.deadline:
                return CODES[Outcome.TIMEOUT]
            start = time.thread_time()
            excess = self._excess()
            if excess:
                return CODES[excess]
            ticks = sum(map(_ticks, [self.child, *descendants(self.child)]))
            pause = IDLE_LOOK_EVERY_S if ticks == self._ticks_seen else LOOK_EVERY_S
            _wait_for_child(max(pause, (time.thread_time() - start) / LOOK_SHARE))
            self._ticks_seen = ticks

    def _ended(self) -> int | None:
        """Return the return code of the program; None while it runs."""
        code = None
        while True:
            try:
                # any child: as subreaper this process inherits the program's orphans, and must reap them as well
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return code
            if not pid:
                return code
            if pid == self.child:
                reported = _read_status(self.status)  # by init, of the program
                code = os.waitstatus_to_exitcode(status if reported is None else reported)

    def _excess(self) -> Outcome | None:
        if self.limits.processes is None and self.limits.memory_mb is None:
            return None
        below = list(descendants(self.child))
        # the program counts, init does not
        inside = len(below) + (not self.child_is_init)
        if self.limits.processes is not None and inside > self.limits.processes:
            return Outcome.PROCESSES
        if self.limits.memory_mb is not None:
            for measure in (_resident, _proportional):  # the second is exact, and slow
                if sum(map(measure, [self.child, *below])) <= self.limits.memory_mb * MIB:
                    return None
            return Outcome.MEMORY
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
    """Return the processor time of a process so far, user and system, in clock ticks; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # the name before it may hold spaces and parentheses; behind it fields 11 and 12 are user and system time
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
    """Return resident bytes with shared pages divided among those who share them."""
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
    """Reap orphans as init until the program ends; write its wait status, an int32, to ``status``. Never returns."""
    try:
        while True:
            pid, code = os.waitpid(-1, 0)
            if pid == program:
                os.write(status, struct.pack("=i", code))
                break
    finally:
        os._exit(0)


def _read_status(status: int) -> int | None:
    poll = select.poll()  # `select` takes no file numbers above 1023, which a trainer may reach
    poll.register(status, select.POLLIN)
    data = os.read(status, 4) if poll.poll(0) else b""
    return struct.unpack("=i", data)[0] if len(data) == 4 else None


# -- Linux namespaces (processes, users, network, mounts) and capabilities ---------------------------------------------
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
_CLONE_NEWIPC = 0x08000000

NO_NETWORK = _CLONE_NEWUSER | _CLONE_NEWNET

_MS_REC, _MS_SLAVE, _MS_NOSUID_NODEV, _MS_NOSUID_NODEV_NOEXEC = 0x4000, 0x80000, 0x6, 0xE
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_CAP_SYS_ADMIN, _LAST_CAP, _NOBODY = 21, 40, 65534


def leave_namespaces(network: bool, processes: bool = True, ipc: bool = True) -> tuple[bool, bool, bool]:
    """Leave what the parent shares; returns whether there is a new namespace of (users, processes, network)."""
    net = 0 if network else _CLONE_NEWNET
    flags = net | (_CLONE_NEWPID if processes else 0) | (0 if ipc else _CLONE_NEWIPC)
    is_admin = int(status_of_self("CapEff") or "0", 16) >> _CAP_SYS_ADMIN & 1
    if network and is_admin and flags and unshare(flags):
        return False, processes, False  # root keeps its rights on files
    uid, gid = os.getuid(), os.getgid()  # read before: in the new namespace they are nobody's until they are mapped
    for some in (flags, net):
        if some and unshare(_CLONE_NEWUSER | some):
            # without maps nothing below could have a namespace of its own; some systems grant the one, not the other
            with contextlib.suppress(OSError):
                _write("/proc/self/setgroups", "deny")  # the kernel's condition for mapping the group
            with contextlib.suppress(OSError):
                # root goes by the name of nobody: for root's number a namespace below would need a capability
                _write("/proc/self/uid_map", f"{uid or _NOBODY} {uid} 1")
                _write("/proc/self/gid_map", f"{gid or _NOBODY} {gid} 1")
            return True, bool(some & _CLONE_NEWPID), bool(some & _CLONE_NEWNET)
    return False, False, False


def own_mounts(folder: str | None = None) -> None:
    """Mount a /proc that shows the processes of this namespace, where the system allows it.

    Args:
        folder: gets a file system of its own in memory, as /dev/shm does: what is written there ends with the program.
    """
    if not unshare(_CLONE_NEWNS):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    # slave first: where / is shared, as under systemd, the new /proc would appear in the whole system
    if libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None) == 0:
        libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID_NODEV_NOEXEC, None)
        for place, size in ((folder, b"256m"), ("/dev/shm", b"64m")) if folder else ():
            libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", _MS_NOSUID_NODEV, b"mode=700,size=" + size)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends: its parent must have no other."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def status_of_self(field: str) -> str:
    """The first word of a field of /proc/self/status; empty without it."""
    with open("/proc/self/status") as file:
        return next((line.split()[1] for line in file if line.startswith(f"{field}:")), "")


def drop_capabilities() -> None:
    """Give up what a new user namespace brings: now, and for every program started later."""
    # the bounding set first, while there still is the capability to change it
    for capability in range(_LAST_CAP + 1):
        _prctl(_PR_CAPBSET_DROP, capability)
    libc = ctypes.CDLL(None, use_errno=True)
    # version 3 of the interface, this process; two words each of effective, permitted and inheritable ones
    libc.capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *[0] * 6))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def unshare(flags: int) -> bool:
    return ctypes.CDLL(None, use_errno=True).unshare(flags) == 0


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


# -- Limits: put a child under them, run a program under them, kill it ------------------------------------------------


_LAUNCH = "import sys; sys.path.insert(0, sys.argv.pop(1)); from verl.sandbox.supervisor import launch; launch()"


@dataclass(frozen=True)
class Limits:
    """Limits of a program and everything it starts; null: no limit."""

    wall_s: float | None = None
    """Seconds from start to end."""

    cpu_s: float | None = None
    """CPU seconds of one process, rounded up to whole ones."""

    memory_mb: int | None = None
    """MiB of private memory of one process, and of memory in use by all of them together."""

    output_mb: int | None = None
    """MiB of any file it writes. What it writes into a pipe is for the reader of the pipe to count."""

    processes: int | None = None
    """Processes at a time, the program included."""

    network: bool = True
    """Whether it may reach anything, the machine's own servers included."""


def command(limits: Limits, program: Sequence[str]) -> list[str]:
    """The command line that runs ``program`` under ``limits``; its start takes some 20 ms.

    For ``subprocess.Popen``, with its pipes, folder and environment; then :func:`outcome_of` or :func:`end`.
    """
    root = str(Path(__file__).parents[2])
    # -S: no site-packages, for a quick start; so what `launch` imports must be the standard library alone
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, root, json.dumps(asdict(limits)), *program]


def launch() -> None:
    """Entry point of :func:`command`: set the limits, then run the program in place of this one."""
    for words in enter(Limits(**json.loads(sys.argv[1]))):
        print(f"verl sandbox: this system does not grant {words}", file=sys.stderr)
    os.execvp(sys.argv[2], sys.argv[2:])


def enter(limits: Limits, processes: bool = True, folder: str | None = None) -> tuple[str, ...]:
    """Put this process, a fresh single-threaded child, and all it starts under ``limits``.

    It leads a session of its own, dies with its parent, and can gain no rights. Only the program comes back from this
    call; the process the parent knows stays in it as supervisor.

    Args:
        processes: with a process namespace of its own; without one, programs below may still have theirs.
        folder: the folder of a generated program, which gets a file system and shared memory of its own where the
            kernel grants them; what it may reach besides is for `containment.contain`.

    Returns:
        in words, what this system does not grant; empty on a usual Linux.
    """
    parent = os.getppid()
    # setsid raises in a process that leads a session already, as one started with start_new_session does
    if os.getpid() != os.getsid(0):
        os.setsid()
    missing, has_user, has_pids, has_no_network = [], False, False, False
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # under memory pressure the kernel ends this before the trainer
            _write("/proc/self/oom_score_adj", "1000")
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # processes below that lose their parent become this one's
        has_user, has_pids, has_no_network = leave_namespaces(limits.network, processes, folder is None)
        if not has_pids:
            missing.append("a process namespace: what moves to a session of its own is found by its parents only")
        if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
            missing.append("a list of a process's children: processes and their memory are not counted")
    else:
        missing.append(f"limits of {sys.platform}: processes and their memory are not watched as on Linux")
    if not limits.network and not has_no_network:
        missing.append("a network namespace: the network is not cut")
    status = os.pipe()
    # after `unshare`, which moves no process but the next child: that becomes pid 1 of the namespace
    child = os.fork()
    if child:
        os.close(status[1])
        Supervisor(limits, parent, child, status[0], has_pids).run()
    os.close(status[0])
    die_with_parent()
    if has_pids:
        own_mounts(folder)
        # pid 1 ignores signals of its own namespace that it does not handle, abort() included: the program is another
        program = os.fork()
        if program:
            reap_until_end_of(program, status[1])
        die_with_parent()
    # or the program could report an end of its own making
    os.close(status[1])
    os.setsid()  # a signal to its own group stays below the supervisor
    _set_limits(limits, has_user)
    if has_user:
        drop_capabilities()
    return tuple(missing)


@functools.cache
def can_cut_network() -> bool:
    """Whether this system lets a child have no network; tried once, in a child."""
    if sys.platform != "linux":
        return False
    code = f"import ctypes; raise SystemExit(ctypes.CDLL(None).unshare({NO_NETWORK}) != 0)"
    return subprocess.run([sys.executable, "-I", "-S", "-c", code], stderr=subprocess.DEVNULL).returncode == 0


def end(process: subprocess.Popen, patience_s: float = 5.0) -> int:
    """Kill a child that called :func:`enter`, and all below it; wait for it. Returns its return code.

    Raises:
        subprocess.TimeoutExpired: the kernel has not let go of it within ``patience_s``.
    """
    if process.poll() is None:
        # listed before the first is killed: once a parent is gone its children hang elsewhere
        kill_all([process.pid, *descendants(process.pid)])
    return process.wait(patience_s)


def kill_tree(pid: int) -> int:
    """Kill a forked child and everything below it; wait for it. Returns its return code, as of ``subprocess``."""
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        kill_all([pid, *descendants(pid)])
        status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status)


def _set_limits(limits: Limits, has_user: bool) -> None:
    _lower(resource.RLIMIT_CORE, 0)
    if limits.cpu_s is not None:
        seconds = max(1, int(-(-limits.cpu_s // 1)))
        # SIGXCPU first, by which `outcome_of` knows the cause; 2 s later SIGKILL, which cannot be caught
        _lower(resource.RLIMIT_CPU, seconds, above=2)
    if limits.memory_mb is not None:  # of mappings, DATA counts what can be written to: a reservation costs nothing
        kind = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
        _lower(kind, limits.memory_mb * MIB)
    if limits.output_mb is not None:
        _lower(resource.RLIMIT_FSIZE, limits.output_mb * MIB)
    if limits.processes is not None and has_user and os.getuid():
        # counted per user: only in a namespace of its own it counts these alone, each thread as one
        _lower(resource.RLIMIT_NPROC, limits.processes + 64)


def _lower(kind: int, value: int, above: int = 0) -> None:
    """Lower a soft limit to ``value`` and the hard one to just above it; one that is lower already stays."""
    soft, hard = resource.getrlimit(kind)
    cap = value + above if hard == resource.RLIM_INFINITY else min(hard, value + above)
    soft = value if soft == resource.RLIM_INFINITY else min(soft, value)
    resource.setrlimit(kind, (min(soft, cap), cap))
