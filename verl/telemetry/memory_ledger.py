"""Memory that each phase of a step takes, by rank: weights, optimizer, engine and cache take turns on one device.

A reading costs some microseconds: counters of torch on a GPU, one small file of the kernel on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.telemetry.memory import rss_bytes


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
    """What is known of it by name: weights, optimizer, rollout weights, cache."""


class MemoryLedger:
    """Entries of one role of one process, in the order of their ends.

    Args:
        parts: names what is held now; asked after each phase until the ledger is first taken.
    """

    def __init__(self, parts: Callable[[], Mapping[str, int]] = dict):
        self._parts: Callable[[], Mapping[str, int]] | None = parts
        self._entries: list[Entry] = []
        self._highest = (0, 0)  # allocated, reserved: torch's own peaks begin anew with each phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter what is held when the block ends. Phases do not nest. Two of one name become two entries."""
        start = time.monotonic()
        if _uses_device():
            self._remember_peaks()
            torch.cuda.reset_peak_memory_stats()
        yield
        now = time.monotonic()
        parts = dict(self._parts()) if self._parts is not None else {}
        self._entries.append(Entry(name, now, now - start, rss_bytes(), *_device_bytes(), parts=parts))
        del self._entries[:-256]  # nobody has taken them for many steps

    def take(self) -> list[Entry]:
        """All entries since the last call."""
        entries, self._entries, self._parts = self._entries, [], None
        return entries

    def metrics(self) -> dict[str, float]:
        """Memory of this process in GiB, under the names users know; ``max`` since it started."""
        found = {"perf/cpu_memory_used_gb": rss_bytes() / 2**30}
        if _uses_device():
            self._remember_peaks()
            for name, peak in zip(("allocated", "reserved"), self._highest, strict=True):
                found[f"perf/max_memory_{name}_gb"] = peak / 2**30
        return found

    def _remember_peaks(self) -> None:
        now = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        self._highest = tuple(map(max, self._highest, now))


def _uses_device() -> bool:
    """Whether this process has started CUDA; asking does not start it."""
    return torch.cuda.is_initialized()


def _device_bytes() -> tuple[int, ...]:
    """Allocated, peak, reserved, in use by all; nothing on a CPU."""
    if not _uses_device():
        return ()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), total - free


def bytes_by_place(tensors: Iterable[Any], device: str) -> int:
    """Bytes of the distinct storages of ``tensors`` on ``device``, of sharded ones this rank's part."""
    found: dict[int, int] = {}
    for tensor in tensors:
        # of FSDP2's weights, of DeepSpeed's at stage 3, of others
        local = getattr(tensor, "_local_tensor", getattr(tensor, "ds_tensor", tensor))
        if isinstance(local, Tensor) and local.device.type == device:
            storage = local.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """The state of an optimizer, such as Adam's moments."""
    for state in getattr(optimizer, "state", {}).values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
