"""Memory of a process and its machine, and of each phase of a step: weights, optimizer, engine and cache take turns.

Readings cost microseconds: small files of the kernel, and counters of torch where this process uses a GPU. Where the
system has no such file (no Linux) a number is 0 or None. torch is not imported here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.telemetry.profiler import process_trace

if TYPE_CHECKING:
    from torch import Tensor

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CGROUP = Path("/sys/fs/cgroup")
_MiB, _GiB = 2**20, 2**30


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
    limit = _container_limit()
    return physical if limit is None else min(physical, limit)


def _container_limit() -> int | None:
    """Bytes that the container of this process may use; None without a limit, or without cgroups of version 2."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
    except OSError:
        return None
    return int(limit) if limit.isdigit() else None  # "max" is no limit


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
            return file.read().rsplit(b")", 1)[1].split()[0].decode()  # the name before it may hold spaces
    except (OSError, IndexError):
        return None


def shown_GiB(nbytes: float) -> str:
    """``3.1 GiB``."""
    return f"{nbytes / _GiB:.1f} GiB"


# -- Memory of all processes of a run, at each step --------------------------------------------------------------------


class ProcessMemory(NamedTuple):
    """Memory of one process, bytes."""

    name: str
    pid: int
    own: int
    """Resident, and in no file and no shared memory: what ends with the process."""
    shared: int
    """Resident pages of files, libraries and shared memory, which others may hold too."""


class RunMemory:
    """Memory of this process and of all it has started on this machine, directly or not, a line a step.

    Workers of a Ray cluster that was there before, and of other machines, are not among them.

    Args:
        path: file of JSON lines to write; None: none is kept.

    Attributes:
        own_MiB: of each process by name, in the last step noted.
        free_MiB: of the machine, then.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.own_MiB: dict[str, float] = {}
        self.free_MiB = 0.0

    def note(self, step: int, worker_groups: Mapping[Any, Any]) -> dict[str, float]:
        """Read the memory of every process; returns metrics, GiB.

        Args:
            worker_groups: by role, each with ``pids`` by rank: names of processes. Others have those of the kernel.
        """
        processes = processes_below(os.getpid(), _names(worker_groups))
        shared, free = shared_memory_bytes(process.pid for process in processes), free_memory()
        self.own_MiB = {process.name: process.own / _MiB for process in processes}
        self.free_MiB = free / _MiB
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            rows = [process._asdict() for process in processes]
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "free": free, "shared_memory": shared, "processes": rows}) + "\n")
        return {
            "perf/memory_driver_gb": processes[0].own / _GiB,
            "perf/memory_processes_gb": sum(process.own for process in processes) / _GiB,
            "perf/memory_shared_gb": shared / _GiB,
            "perf/memory_free_gb": free / _GiB,
        }


def _names(worker_groups: Mapping[Any, Any]) -> dict[int, str]:
    """Process -> its roles and its rank; without this process, which one local worker shares with the driver."""
    roles: dict[int, list[str]] = {}
    ranks: dict[int, int] = {}
    for role, group in worker_groups.items():
        for rank, pid in enumerate(getattr(group, "pids", ())):  # groups of a user's own may lack it
            roles.setdefault(pid, []).append(str(role))
            ranks[pid] = rank
    return {pid: f"{'+'.join(names)} {ranks[pid]}" for pid, names in roles.items() if pid != os.getpid()}


def processes_below(root: int, names: Mapping[int, str]) -> list[ProcessMemory]:
    """Return the memory of a process and of its living descendants, itself first."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found, left = [], [root]
    while left:
        pid = left.pop(0)
        left += children.get(pid, ())
        try:
            resident, shared = (int(pages) * _PAGE for pages in Path(f"/proc/{pid}/statm").read_text().split()[1:3])
            called = Path(f"/proc/{pid}/comm").read_text().strip()
        except (OSError, ValueError):  # it ended meanwhile
            continue
        name = f"{names.get(pid, 'driver' if pid == root else called)} (pid {pid})"
        found.append(ProcessMemory(name, pid, resident - shared, shared))
    return found


def _parents() -> dict[int, int]:
    """Process -> its parent, of all that can be read."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parents[int(name)] = int(file.read().rsplit(b")", 1)[1].split()[1])
            except (OSError, IndexError):  # it ended meanwhile
                continue
    return parents


def shared_memory_bytes(pids: Iterable[int]) -> int:
    """Return the bytes in memory of all shared memory that these processes have open, each file counted once.

    Batches between processes, and Ray's object store, are such files.
    """
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            for entry in os.scandir(f"/proc/{pid}/fd"):
                if os.readlink(entry.path).startswith(("/memfd:", "/dev/shm/")):
                    status = os.stat(entry.path)
                    sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
        except OSError:  # it ended meanwhile, or closed the file
            continue
    return sum(sizes.values())


def free_memory() -> int:
    """Bytes that this machine, or the container it is, can still give; 0 if unknown."""
    free: list[int] = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    except OSError:
        return 0
    limit = _container_limit()
    if limit is not None:
        held = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        free.append(limit - held + int(stat.get("inactive_file", 0)))  # the cache of files is given back
    return max(0, min(free, default=0))


# -- Memory of the phases of a step, by rank: `trainer.memory_ledger` --------------------------------------------------


class Entry(NamedTuple):
    """Memory at the end of one phase, bytes."""

    phase: str
    at: float
    """``time.monotonic()`` at its end."""
    seconds: float
    host: int
    """Resident host memory of the process."""
    allocated: int = 0
    """Device memory of torch's tensors."""
    peak: int = 0
    """The most of it within the phase."""
    reserved: int = 0
    """Device memory torch holds, free parts included."""
    device: int = 0
    """Device memory in use by all processes; the engine's cache counts here only while it is awake."""
    parts: Mapping[str, int] = MappingProxyType({})
    """Its known parts by name: weights, optimizer, rollout weights, cache."""


class MemoryLedger:
    """Entries of one role of one process, in the order of their ends.

    Args:
        parts: names what is held now; called after each phase until the ledger is first taken.
    """

    def __init__(self, parts: Callable[[], Mapping[str, int]] = dict):
        self._parts: Callable[[], Mapping[str, int]] | None = parts
        self._entries: list[Entry] = []
        self._highest = {"allocated": 0, "reserved": 0}  # torch's own peaks are reset at each phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter what is held when the block ends. Phases do not nest. Two of one name become two entries."""
        start = time.monotonic()
        if (cuda := _cuda_in_use()) is not None:
            self._remember_peaks(cuda)
            cuda.reset_peak_memory_stats()
        with process_trace.mark(name):
            yield
        now = time.monotonic()
        entry = Entry(name, now, now - start, rss_bytes(), parts=dict(self._parts()) if self._parts else {})
        if (cuda := _cuda_in_use()) is not None:  # the block may have been the first to use it
            free, total = cuda.mem_get_info()
            entry = entry._replace(
                allocated=cuda.memory_allocated(),
                peak=cuda.max_memory_allocated(),
                reserved=cuda.memory_reserved(),
                device=total - free,
            )
        self._entries.append(entry)
        del self._entries[:-256]  # nobody has taken them for many steps

    def take(self) -> list[Entry]:
        """All entries since the last call."""
        entries, self._entries, self._parts = self._entries, [], None
        return entries

    def metrics(self) -> dict[str, float]:
        """Memory of this process in GiB, under the names users know; ``max`` since it started."""
        found = {"perf/cpu_memory_used_gb": rss_bytes() / _GiB}
        if (cuda := _cuda_in_use()) is not None:
            self._remember_peaks(cuda)
            found |= {f"perf/max_memory_{name}_gb": peak / _GiB for name, peak in self._highest.items()}
        return found

    def _remember_peaks(self, cuda: Any) -> None:
        now = {"allocated": cuda.max_memory_allocated(), "reserved": cuda.max_memory_reserved()}
        self._highest = {name: max(peak, now[name]) for name, peak in self._highest.items()}


def _cuda_in_use() -> Any:
    """``torch.cuda`` if this process has started it; asking neither imports torch nor starts CUDA."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def bytes_by_place(tensors: Iterable[Any], device: str) -> int:
    """Bytes of the distinct storages of ``tensors`` on ``device``, of sharded ones this rank's part."""
    found: dict[int, int] = {}
    for tensor in tensors:
        # shards: of FSDP2's weights, of DeepSpeed's at stage 3; others are whole
        local = getattr(tensor, "_local_tensor", getattr(tensor, "ds_tensor", tensor))
        if hasattr(local, "untyped_storage") and local.device.type == device:
            storage = local.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """The state of an optimizer, such as Adam's moments."""
    for state in getattr(optimizer, "state", {}).values():
        yield from (value for value in state.values() if hasattr(value, "untyped_storage"))


class MemoryReport:
    """Memory of each phase of a step as metrics, and as a table for the first step.

    Args:
        say: prints a message to the user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.has_shown_table = False

    def metrics(self, groups: Iterable[Any]) -> dict[str, float]:
        """`memory_metrics` of these worker groups since the last call."""
        by_rank: list[list[Entry]] = []  # of all roles of a rank
        for group in groups:
            if hasattr(group, "memory_entries"):  # workers of a user's own may lack it
                for rank, entries in enumerate(group.memory_entries()):
                    by_rank += [[] for _ in range(rank + 1 - len(by_rank))]
                    by_rank[rank].extend(entries)
        if not self.has_shown_table and any(by_rank):
            self.has_shown_table = True
            self.say(memory_table(sorted(by_rank[0], key=lambda entry: entry.at)))
        return memory_metrics(by_rank)


def memory_metrics(by_rank: Sequence[Sequence[Entry]]) -> dict[str, float]:
    """``memory/{phase}_gb``, GiB, of the rank with most: torch's peak on a device, else resident memory."""
    metrics: dict[str, float] = {}
    for entry in (entry for entries in by_rank for entry in entries):
        name = f"memory/{entry.phase}_gb"
        metrics[name] = max(metrics.get(name, 0.0), (entry.peak or entry.host) / _GiB)
    return metrics


def memory_table(entries: Sequence[Entry]) -> str:
    """One line a phase: what one rank held when the phase ended."""
    on_device = any(entry.device for entry in entries)
    largest = max(max(entry.host, entry.device) for entry in entries)
    unit, size = ("GiB", _GiB) if largest >= 8 * _GiB else ("MiB", _MiB)
    numbers = {"host": "host"}
    if on_device:
        numbers = {"device": "device", "reserved": "reserved", "allocated": "torch", "peak": "peak"} | numbers
    parts = list(dict.fromkeys(name for entry in entries for name in entry.parts if entry.parts[name]))
    rows = [["phase", "seconds", *numbers.values(), *parts]]
    for entry in entries:
        held = [getattr(entry, name) for name in numbers] + [entry.parts.get(name, 0) for name in parts]
        shown = [f"{nbytes / size:.2f}" if nbytes else "-" for nbytes in held]
        rows.append([entry.phase, f"{entry.seconds:.2f}", *shown])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    explained = "in use by all processes, held by torch, in tensors, the most of it in the phase, " if on_device else ""
    title = f"Memory at the end of each phase of the first step, rank 0, {unit} ({explained}resident):"
    return "\n".join([title, *lines])
