"""Host memory of a process and of its machine, read from the kernel's files; cheap enough for every second.

Where the system has no such file (no Linux) a number is 0 or None.
"""

from __future__ import annotations

import os
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def rss_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process, shared pages included; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def host_memory() -> int:
    """Bytes of memory of this machine, or of the container it is."""
    physical = _PAGE * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def oom_kills() -> int:
    """Return how often the kernel has killed a process for lack of memory: in this container, else on this machine."""
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def process_state(pid: int) -> str | None:
    """The kernel's letter for what a process does: R runs, S sleeps, D waits for a disk, T is stopped, Z is dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[0].decode()
    except (OSError, IndexError):
        return None


def shown_GiB(nbytes: float) -> str:
    """``3.1 GiB``."""
    return f"{nbytes / 2**30:.1f} GiB"
