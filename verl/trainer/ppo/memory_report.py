"""The memory ledger of all ranks as metrics, and as a table for a person: `trainer.memory_ledger`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from verl.workers.memory_ledger import Entry

_GiB = 2**30


class MemoryReport:
    """What each phase of a step took, and a table of the first step.

    Args:
        say: tells the user a sentence.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.has_shown_table = False

    def metrics(self, groups: Iterable[Any]) -> dict[str, float]:
        """`memory_metrics` of these worker groups since the last call."""
        by_rank = gather(group for group in groups if hasattr(group, "memory_entries"))
        if not self.has_shown_table and any(by_rank):
            self.has_shown_table = True
            self.say(memory_table(by_rank[0]))
        return memory_metrics(by_rank)


def gather(groups: Iterable[Any]) -> list[list[Entry]]:
    """Per rank, the entries of all roles since the last call in the order of time."""
    by_rank: list[list[Entry]] = []
    for group in groups:
        for rank, entries in enumerate(group.memory_entries()):
            by_rank += [[] for _ in range(rank + 1 - len(by_rank))]
            by_rank[rank].extend(entries)
    return [sorted(entries, key=lambda entry: entry.at) for entries in by_rank]


def memory_metrics(by_rank: Sequence[Sequence[Entry]]) -> dict[str, float]:
    """``memory/{phase}_gb``, GiB, of the rank with most: torch's peak on a device, else resident memory."""
    metrics: dict[str, float] = {}
    for entries in by_rank:
        for entry in entries:
            name = f"memory/{entry.phase}_gb"
            metrics[name] = max(metrics.get(name, 0.0), (entry.peak or entry.host) / _GiB)
    return metrics


def memory_table(entries: Sequence[Entry]) -> str:
    """One line a phase: what one rank held when the phase ended."""
    on_device = any(entry.device for entry in entries)
    largest = max(max(entry.host, entry.device) for entry in entries)
    unit, size = ("GiB", 2**30) if largest >= 8 * 2**30 else ("MiB", 2**20)
    numbers = {"host": "host"}
    if on_device:
        numbers = {"device": "device", "reserved": "reserved", "allocated": "torch", "peak": "peak"} | numbers
    parts = list(dict.fromkeys(name for entry in entries for name in entry.parts if entry.parts[name]))
    header = ["phase", "seconds", *numbers.values(), *parts]
    rows = [
        [
            entry.phase,
            f"{entry.seconds:.2f}",
            *(_shown(getattr(entry, name), size) for name in numbers),
            *(_shown(entry.parts.get(name, 0), size) for name in parts),
        ]
        for entry in entries
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    explained = "in use by all processes, held by torch, in tensors, the most of it in the phase, " if on_device else ""
    title = f"Memory at the end of each phase of the first step, rank 0, {unit} ({explained}resident):"
    return "\n".join([title, *lines])


def _shown(nbytes: int, unit: int) -> str:
    return f"{nbytes / unit:.2f}" if nbytes else "-"
