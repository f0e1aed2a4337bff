"""Limits of a child process and of all it starts, and its end with everything below it.

A fresh child calls :func:`enter` before anything else. It becomes three processes:

    keeper     the child as its parent knows it; watches the two others, and leaves with the program's status
    init       pid 1 of a pid namespace: when it ends, the kernel ends every process in there
    program    goes on after ``enter``

The keeper ends everything when the parent dies, when the wall clock is up, or when the processes below it are too many
or hold too much memory. Where the kernel grants no pid namespace, init is left out and the keeper goes by the process
tree. `enter` returns what could not be had. Standard library only: a child is there in some 20 ms.
"""

import functools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from verl.sandbox.supervisor import (
    MIB,
    NO_NETWORK,
    Ending,
    Keeper,
    become_keeper,
    can_see_descendants,
    descendants,
    die_with_parent,
    drop_capabilities,
    how_ended,
    kill_all,
    leave_namespaces,
    own_proc,
    reap_until_end_of,
)

__all__ = ["Ending", "Limits", "can_cut_network", "command", "end", "enter", "how_ended"]

_LAUNCH = "import sys; sys.path.insert(0, sys.argv.pop(1)); from verl.sandbox.limits import launch; launch()"


@dataclass(frozen=True)
class Limits:
    """What a program and everything it starts may use; null: no limit."""

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

    For ``subprocess.Popen``, with its pipes, folder and environment; then :func:`how_ended` or :func:`end`.
    """
    root = str(Path(__file__).parents[2])
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, root, json.dumps(asdict(limits)), *program]


def launch() -> None:
    """What :func:`command` starts: the limits, then the program in place of this one."""
    for words in enter(Limits(**json.loads(sys.argv[1]))):
        print(f"verl sandbox: this system does not grant {words}", file=sys.stderr)
    os.execvp(sys.argv[2], sys.argv[2:])


def enter(limits: Limits) -> tuple[str, ...]:
    """Put this process, a fresh single-threaded child, and all it starts under ``limits``.

    It leads a session of its own, dies with its parent, and can gain no rights. Only the program comes back from this
    call; the process the parent knows stays in it as keeper.

    Returns:
        in words, what this system does not grant; empty on a usual Linux.
    """
    parent = os.getppid()
    if os.getpid() != os.getsid(0):
        os.setsid()
    missing, has_user, has_pids, has_no_network = [], False, False, False
    if sys.platform == "linux":
        become_keeper()
        has_user, has_pids, has_no_network = leave_namespaces(limits.network)
        if not has_pids:
            missing.append("a process namespace: what moves to a session of its own is found by its parents only")
        if not can_see_descendants():
            missing.append("a list of a process's children: processes and their memory are not counted")
    else:
        missing.append(f"limits of {sys.platform}: processes and their memory are not watched as on Linux")
    if not limits.network and not has_no_network:
        missing.append("a network namespace: the network is not cut")
    status = os.pipe()
    child = os.fork()
    if child:
        os.close(status[1])
        Keeper(limits, parent, child, status[0], has_pids).run()
    os.close(status[0])
    die_with_parent()
    if has_pids:
        own_proc()
        program = os.fork()
        if program:
            reap_until_end_of(program, status[1])
        die_with_parent()
    os.close(status[1])
    os.setsid()  # a signal to its own group stays below the keeper
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
        kill_all([process.pid, *descendants(process.pid)])
    return process.wait(patience_s)


def _set_limits(limits: Limits, has_user: bool) -> None:
    _lower(resource.RLIMIT_CORE, 0)
    if limits.cpu_s is not None:
        seconds = max(1, int(-(-limits.cpu_s // 1)))
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
