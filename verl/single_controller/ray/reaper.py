"""Ends the agents of a Ray whose driver was killed: they would look for their lost cluster for a minute.

A program of its own, ``python reaper.py RAYLET SESSION``, which outlives the driver: it waits until the driver closes
its standard input, and imports nothing of this package. A driver that ends Ray itself writes a word before.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

_RAYLET_S = 30.0
"""Seconds in which a raylet ends after its driver."""
_AGENTS_S = 5.0


def state_and_start(pid: int) -> tuple[str, str] | None:
    """The kernel's letter for what a process does, and when it began; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


def agents_of(session: str) -> list[int]:
    """Ray's own processes that have files of this session open; their environment is overwritten by their names."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/cmdline", "rb") as file:
                is_ray = file.read(5) == b"ray::"
            files = os.listdir(f"/proc/{name}/fd") if is_ray else []
            if any(_target(f"/proc/{name}/fd/{fd}").startswith(f"{session}/") for fd in files):
                found.append(int(name))
    return found


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def main(raylet: int, session: str) -> None:
    """Wait for the end of the driver, then of ``raylet``, and kill what that started in ``session``, a folder."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a signal to all processes is for the driver
        signal.signal(number, signal.SIG_IGN)
    before = state_and_start(raylet)
    if sys.stdin.buffer.read() or before is None:
        return
    deadline = time.monotonic() + _RAYLET_S
    while (now := state_and_start(raylet)) is not None and now[0] != "Z" and now[1] == before[1]:
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)
    deadline = time.monotonic() + _AGENTS_S
    while time.monotonic() < deadline:
        for pid in agents_of(session):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def start_reaper(raylet: int, session: str) -> subprocess.Popen | None:
    """Start this program; None where the system has no /proc."""
    if sys.platform != "linux":
        return None
    # isolated and without site: a process of 10 MB that is there in 20 ms
    command = [sys.executable, "-I", "-S", __file__, str(raylet), session]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
