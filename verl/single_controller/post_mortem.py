"""What is known of a worker that died or does not answer: what it was doing, how large it was, what the kernel counted.

Each worker notes what it does in its black box (`verl.utils.black_box`), which is the driver's. Of a worker on another
machine nothing is known here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from verl.utils.black_box import BOX_VARIABLE, OwnedBox, Reading
from verl.utils.process_memory import host_memory, oom_kills, process_state, shown_GiB


class PostMortem:
    """The black boxes of a group, by rank."""

    def __init__(self, world_size: int):
        self._boxes = [OwnedBox() for _ in range(world_size)]
        self._kills = oom_kills()

    def place(self, rank: int) -> dict[str, str]:
        """What to add to the environment of a rank."""
        return {BOX_VARIABLE: self._boxes[rank].address}

    def report(self, rank: int, pid: int | None = None) -> str:
        """Lines on one rank; empty if nothing is known.

        Args:
            pid: of a process of this machine that lives, for the state the kernel knows.
        """
        if not 0 <= rank < len(self._boxes):
            return ""
        reading, now = self._boxes[rank].read(), time.monotonic()
        lines = [*_doing(reading, now), *_memory(reading, now)]
        if (new := oom_kills() - self._kills) > 0:
            lines.append(f"The kernel killed {new} processes for lack of memory since this group started.")
        if pid is not None and process_state(pid) == "T":
            lines.append(f"Process {pid} is stopped by a signal (SIGSTOP); `kill -CONT {pid}` lets it go on.")
        return "\n".join(lines)

    def close(self) -> None:
        for box in self._boxes:
            box.close()
        self._boxes = []


def describe(facts: Mapping[str, Any]) -> str:
    """The engine, the phase and the requests of a note, in one line; empty if it names no engine."""
    if "engine" not in facts:
        return ""
    text = f"rollout engine {facts['engine']}"
    if facts.get("phase"):
        text += f", phase {facts['phase']}"
    if facts.get("requests"):
        text += f", {facts['requests']} requests"
    if facts.get("longest_prompts"):
        text += f", longest prompts of {', '.join(map(str, facts['longest_prompts']))} tokens"
    if facts.get("first_requests"):
        text += f", the first of them {', '.join(map(str, facts['first_requests']))}"
    return text


def _doing(reading: Reading, now: float) -> Iterator[str]:
    facts = reading.facts
    if facts.get("ended"):
        yield f"It was ended by its watchdog: {facts['ended']}"
    if text := describe(facts):
        since = f", since {now - facts['since']:.1f} s" if "since" in facts else ""
        step = f", the last step finished {now - reading.progress:.1f} s ago" if reading.progress else ""
        yield f"What it was doing: {text}{since}{step}."


def _memory(reading: Reading, now: float) -> Iterator[str]:
    if reading.rss:
        yield (
            f"Its memory when last seen, {now - reading.alive:.1f} s ago: {shown_GiB(reading.rss)} of the machine's "
            f"{shown_GiB(host_memory())}."
        )
