"""Containment of a generated program: what of the machine it can reach, and a look whether that holds.

:func:`contain` is called in the program's own process before its first line. It uses Landlock (files, and signals and
traces to processes outside) and a seccomp filter (sockets, signals, owners and modes of files), neither of which needs
rights. Namespaces, where the kernel grants them, were entered before (`supervisor.enter`). Then it tries each of
`PROMISES` and returns those that do not hold. Standard library only.
"""

import ctypes
import functools
import os
import platform
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from verl.utils.exit_codes import ExitCode

PROMISES = {
    "signals": "it cannot signal or trace processes but its own",
    "network": "it cannot reach the network, nor servers of this machine",
    "sockets": "it cannot reach Unix sockets",
    "files": "it cannot read or write files but Python's and those of its own folder",
}
"""What is promised of a contained program, by the name under which it is reported when it does not hold."""

VARIABLE = "VERL_ALLOW_UNCONTAINED_CODE"
"""Environment variable: 1 runs generated programs where containment lacks something, too."""


class Uncontained(RuntimeError):
    """This system lacks what contains a generated program, and nobody allowed to run it so."""

    exit_class = ExitCode.CONFIGURATION

    def __init__(self, missing: Iterable[str]):
        lacking = "; ".join(f"{name} ({PROMISES[name]})" for name in missing)
        super().__init__(
            f"A generated program was not run: this system cannot promise {lacking}. Linux 5.13 or newer with Landlock "
            "and seccomp can, in containers as well. Run programs elsewhere with reward_model.sandbox_fusion.url, or "
            f"allow what they may do here: reward_model.sandbox.allow_uncontained_code=true, or {VARIABLE}=1."
        )


@dataclass(frozen=True)
class Outside:
    """What tells a process of the sandbox from its own: taken before the program is forked."""

    pid: int
    pid_namespace: str
    net_namespace: str
    shared_memory: int
    """Number of the file system at /dev/shm."""

    @classmethod
    def here(cls) -> "Outside":
        return cls(os.getpid(), _namespace("pid"), _namespace("net"), _file_system("/dev/shm"))


def is_allowed() -> bool:
    """Whether the environment allows to run programs without full containment."""
    return os.environ.get(VARIABLE, "").lower() in ("1", "true", "yes")


def contain(outside: Outside, folder: str, reads: Iterable[str] = ()) -> tuple[str, ...]:
    """Contain this process and all it will start, for good; returns the names of `PROMISES` that do not hold.

    Args:
        folder: where it may read and write.
        reads: files and folders that it may read and execute besides `python_folders`.
    """
    if sys.platform == "linux":
        has_own_net = outside.net_namespace not in ("", _namespace("net"))
        has_own_pids = outside.pid_namespace not in ("", _namespace("pid"))
        own = [folder, *(["/dev/shm"] if _file_system("/dev/shm") != outside.shared_memory else [])]
        abi = _restrict_files(own, (*python_folders(), *reads), has_own_pids)
        _restrict_calls(has_own_net, limits_signals=not has_own_pids and abi < _ABI_WITH_SIGNALS)
    return _missing(outside)


def _missing(outside: Outside) -> tuple[str, ...]:
    """Try what was promised; returns the names of what does not hold."""
    tries = {"signals": _reaches_processes, "network": _reaches_network, "sockets": _reaches_sockets}
    found = [name for name, reaches in tries.items() if reaches(outside)]
    return (*found, "files") if _reaches_files() else tuple(found)


def _reaches_processes(outside: Outside) -> bool:
    if outside.pid_namespace not in ("", _namespace("pid")):
        return False
    try:
        os.kill(outside.pid, 0)
    except OSError:
        return False
    return True


def _reaches_network(outside: Outside) -> bool:
    if outside.net_namespace not in ("", _namespace("net")):
        return False
    return _opens(socket.AF_INET) or _opens(socket.AF_INET6)


def _reaches_sockets(outside: Outside) -> bool:
    return _opens(socket.AF_UNIX)


def _reaches_files() -> bool:
    try:
        os.listdir("/")
    except OSError:
        return False
    return True


def _opens(family: int) -> bool:
    try:
        socket.socket(family, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


def _namespace(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{name}")
    except OSError:
        return ""


def _file_system(path: str) -> int:
    try:
        return os.stat(path).st_dev
    except OSError:
        return 0


@functools.cache
def python_folders() -> tuple[str, ...]:
    """Return the folders of Python, its packages and the system's libraries; not those of other modules of a run."""
    paths = {
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        os.path.dirname(os.__file__),
    }
    # `pip install --user`, and a venv that is a link: the folder under which the packages were found
    paths.update(path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages"))
    home = os.path.realpath(os.path.expanduser("~"))
    # a prefix that holds everything, such as / or the home, would grant what is to be kept
    return tuple(sorted(path for path in paths if os.path.realpath(path) not in ("/", home)))


# -- Landlock ---------------------------------------------------------------------------------------------------------
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ABI_WITH_SIGNALS = 6
_EXECUTE, _WRITE, _READ, _LIST = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
"""Rights on files that Landlock of a version knows; from 5 on 16 of them."""

_SYSTEM = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt/conda/lib"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf", "/etc/passwd", "/etc/group", "/etc/mime.types"),
    *("/dev/zero", "/dev/urandom", "/dev/random", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/self"),
    *("/sys/devices/system/cpu", "/sys/devices/system/node"),
)


def landlock_version() -> int:
    """Return the version of Landlock that the kernel has; 0 without it."""
    if sys.platform != "linux":
        return 0
    return max(0, ctypes.CDLL(None, use_errno=True).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def _restrict_files(own: Iterable[str], reads: Iterable[str], has_own_pids: bool) -> int:
    """Leave ``own`` to be written, and ``reads`` to be read; returns Landlock's version, 0 where it did nothing."""
    libc, abi = ctypes.CDLL(None, use_errno=True), landlock_version()
    if not abi:
        return 0
    everything = _RIGHTS.get(abi, (1 << 16) - 1)
    # rights on files, TCP ports (bind, connect), and scopes: abstract sockets, signals
    attributes = struct.pack("=3Q", everything, 3 if abi >= 4 else 0, 3 if abi >= _ABI_WITH_SIGNALS else 0)
    size = 8 if abi < 4 else 16 if abi < _ABI_WITH_SIGNALS else 24
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return 0
    to_read = _EXECUTE | _READ | _LIST
    for path in own:
        _grant(libc, ruleset, path, everything)
    _grant(libc, ruleset, "/dev/null", (_READ | _WRITE | _TRUNCATE | _IOCTL) & everything)
    for path in (*_SYSTEM, *reads, *(["/proc"] if has_own_pids and _shows_own_processes() else [])):
        _grant(libc, ruleset, path, to_read)
    is_restricted = libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return abi if is_restricted else 0


def _grant(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # a folder that this system does not have
        return
    try:
        if not os.path.isdir(path):
            rights &= _OF_FILES
        libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, opened), 0)
    finally:
        os.close(opened)


def _shows_own_processes() -> bool:
    """Whether /proc is that of this process namespace: another shows this process under another number."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


# -- seccomp ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Machine:
    """Numbers of system calls on one kind of processor."""

    audit: int
    socket: int
    own_pid_only: tuple[int, ...]
    """Those whose first argument is a process: kill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, prlimit64."""
    refused: tuple[int, ...]
    """Signals to a thread by number or file, other processes' memory and files, owners, modes and attributes of files
    (over which Landlock has no say), truncation by path, namespaces, keys, bpf and the like."""


_MACHINES = {
    "x86_64": _Machine(
        audit=0xC000003E,
        socket=41,
        own_pid_only=(62, 234, 129, 297, 302),
        refused=(
            *(200, 424, 101, 310, 311, 438, 90, 91, 268, 452, 92, 93, 94, 260, 188, 189, 190, 197, 198, 199, 463, 466),
            *(76, 272, 308, 248, 249, 250, 321, 298, 323, 165, 166, 155, 161),
        ),
    ),
    "aarch64": _Machine(
        audit=0xC00000B7,
        socket=198,
        own_pid_only=(129, 131, 138, 240, 261),
        refused=(
            *(130, 424, 117, 270, 271, 438, 52, 53, 452, 54, 55, 5, 6, 7, 14, 15, 16, 463, 466),
            *(45, 97, 268, 217, 218, 219, 280, 241, 282, 40, 39, 41, 51),
        ),
    ),
}
_IO_URING_SETUP = 425
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _ABSENT = 0x7FFF0000, 0x00050000 | 13, 0x00050000 | 38
"""Let a call through; fail it with EACCES, or with ENOSYS."""


def _restrict_calls(has_own_net: bool, limits_signals: bool) -> bool:
    """Filter the system calls of this process and of all it starts; returns whether the kernel took the filter."""
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return False
    program = _filter(machine, os.getpid(), has_own_net, limits_signals)
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: the number of lines, and where they are
    head = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, ctypes.c_ulong(1), 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, the condition for a filter
    return libc.prctl(22, ctypes.c_ulong(2), head, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _filter(machine: _Machine, pid: int, has_own_net: bool, limits_signals: bool) -> list[tuple[int, int, int, int]]:
    """Return a filter in the kernel's classic BPF: lines of (code, jump if so, jump if not, value)."""
    # struct seccomp_data: number of the call at 0, kind of processor at 4, first argument at 16 (its low half)
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine.audit), (_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, 0)]
    if machine.audit == _MACHINES["x86_64"].audit:
        lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _REFUSE)]
    lines += [(_EQUAL, 0, 1, _IO_URING_SETUP), (_RETURN, 0, 0, _ABSENT)]  # it opens sockets past this filter
    for number in machine.refused:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    families = (int(socket.AF_INET), int(socket.AF_INET6)) if has_own_net else ()
    lines += _first_argument(machine.socket, families)
    for number in machine.own_pid_only if limits_signals else ():
        lines += _first_argument(number, (pid, 0) if number == machine.own_pid_only[-1] else (pid,))
    return [*lines, (_RETURN, 0, 0, _ALLOW)]


def _first_argument(number: int, allowed: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Return lines that refuse a call unless its first argument is one of ``allowed``."""
    inside = [(_LOAD, 0, 0, 16)]
    for value in allowed:
        inside += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    inside.append((_RETURN, 0, 0, _REFUSE))
    return [(_EQUAL, 0, len(inside), number), *inside]


def containment(timeout_s: float = 20.0) -> tuple[str, ...]:
    """Return the names of `PROMISES` that do not hold on this system, tried in a child process.

    What is tried is what a program gets at most; `contain` tries again in the process of each.
    """
    return _tried(sys.executable, timeout_s)


@functools.cache
def _tried(python: str, timeout_s: float) -> tuple[str, ...]:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = (
        f"import sys; sys.path.insert(0, {root!r})\n"
        "from verl.sandbox.containment import Outside, contain\n"
        "from verl.sandbox.supervisor import Limits, enter\n"
        "outside = Outside.here(); enter(Limits(network=False), folder='/tmp')\n"
        "print('missing', *contain(outside, '/tmp'), flush=True)"
    )
    done = subprocess.run([python, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=timeout_s)
    words = done.stdout.split()
    return tuple(words[1:]) if words[:1] == ["missing"] else tuple(PROMISES)


__all__ = ["PROMISES", "Outside", "Uncontained", "contain", "containment", "is_allowed", "landlock_version"]
