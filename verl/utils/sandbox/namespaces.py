"""What Linux lets a process leave: the sight of other processes, the network, its rights."""

import contextlib
import ctypes
import os
import signal
import struct
import sys

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
NO_NETWORK = _CLONE_NEWUSER | _CLONE_NEWNET
_MS_REC, _MS_SLAVE, _MS_NOSUID_NODEV_NOEXEC = 0x4000, 0x80000, 0xE
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_CAP_SYS_ADMIN, _LAST_CAP = 21, 40


def become_keeper() -> None:
    """Gain no rights from here on, and inherit every process below that loses its parent."""
    with contextlib.suppress(OSError):  # under memory pressure the kernel ends this before the trainer
        _write("/proc/self/oom_score_adj", "1000")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def leave_namespaces(network: bool) -> tuple[bool, bool, bool]:
    """Leave what the parent shares; whether there is a new namespace of (users, processes, network)."""
    wanted = _CLONE_NEWPID | (0 if network else _CLONE_NEWNET)
    if network and _has_capability(_CAP_SYS_ADMIN) and unshare(wanted):
        return False, True, False  # root keeps its rights on files
    ids = os.getuid(), os.getgid()
    for flags in (wanted, _CLONE_NEWNET if not network else 0):
        if flags and unshare(_CLONE_NEWUSER | flags):
            _map_ids(*ids)
            return True, bool(flags & _CLONE_NEWPID), bool(flags & _CLONE_NEWNET)
    return False, False, False


def _map_ids(uid: int, gid: int) -> None:
    """In the new user namespace this user is the one it was."""
    with contextlib.suppress(OSError):
        _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")


def own_proc() -> None:
    """A /proc that shows the processes of this namespace, where the system allows it."""
    if not unshare(_CLONE_NEWNS):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None) == 0:
        libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID_NODEV_NOEXEC, None)


def die_with_parent() -> None:
    """For a child whose parent has one thread: the signal goes by the thread that forked."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _has_capability(number: int) -> bool:
    with open("/proc/self/status") as file:
        mask = next((int(line.split()[1], 16) for line in file if line.startswith("CapEff:")), 0)
    return bool(mask >> number & 1)


def drop_capabilities() -> None:
    """Give up what a new user namespace brings: now, and for every program started later."""
    for capability in range(_LAST_CAP + 1):
        _prctl(_PR_CAPBSET_DROP, capability)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *[0] * 6))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def unshare(flags: int) -> bool:
    return ctypes.CDLL(None, use_errno=True).unshare(flags) == 0


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
