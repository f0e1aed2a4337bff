"""What a process is doing, written where it outlives the process: a flight recorder.

The driver makes a box for each worker and keeps it; the worker maps the same memory, so a note is a memory copy and is
there however the worker ends. Boxes have no name in any file system: nothing is left behind. Knows bytes and facts, not
what they mean.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import struct
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.utils.process_memory import rss_bytes

BOX_VARIABLE = "VERL_BLACK_BOX"
"""Environment variable that tells a worker where its box is: ``path:token``."""

_TOKEN_BYTES = 16
_HEADER = struct.Struct("=16sQddQ")  # token, number of notes, last sign of life, last progress, resident bytes
_NOTES, _ALIVE, _PROGRESS, _RSS = 16, 24, 32, 40  # offsets in the header
_SLOT = 4096
_SIZE = 64 + 2 * _SLOT


@dataclass(frozen=True)
class Reading:
    """What a box says. Times are of ``time.monotonic``, which all processes of a machine share; 0 is never."""

    facts: dict[str, Any] = field(default_factory=dict)
    alive: float = 0.0
    """Last sign of life."""
    progress: float = 0.0
    """Last progress of what the facts describe."""
    rss: int = 0
    """Resident memory at the last sign of life, bytes."""


class BlackBox:
    """Shared memory with the newest note; of two slots one is always whole, whenever the writer dies.

    Args:
        fd: a descriptor of the memory; None makes memory of this process alone.
    """

    def __init__(self, fd: int | None = None):
        self._memory = mmap.mmap(-1 if fd is None else fd, _SIZE)
        self._lock = threading.Lock()
        self._facts: dict[str, Any] = {}

    def note(self, **facts: Any) -> None:
        """Add facts, JSON values, to those noted; None takes one away. What is too long is cut off."""
        with self._lock:
            merged = {name: value for name, value in {**self._facts, **facts}.items() if value is not None}
            self._facts = merged
            text = json.dumps(merged).encode()
            if len(text) > _SLOT - 4:
                text = json.dumps({name: _short(value) for name, value in merged.items()}).encode()[: _SLOT - 4]
            (number,) = struct.unpack_from("=Q", self._memory, _NOTES)
            start = 64 + (number + 1) % 2 * _SLOT
            struct.pack_into("=I", self._memory, start, len(text))
            self._memory[start + 4 : start + 4 + len(text)] = text
            struct.pack_into("=Q", self._memory, _NOTES, number + 1)

    @property
    def facts(self) -> dict[str, Any]:
        """What is noted now."""
        return dict(self._facts)

    def forget(self) -> None:
        """Take all facts away."""
        self._facts = {}
        self.note()

    def tick(self) -> None:
        """Say that what the facts describe goes on; costs less than a microsecond."""
        struct.pack_into("=d", self._memory, _PROGRESS, time.monotonic())

    def beat(self) -> None:
        """Say that this process lives, and how large it is."""
        struct.pack_into("=d", self._memory, _ALIVE, time.monotonic())
        struct.pack_into("=Q", self._memory, _RSS, rss_bytes())

    def read(self) -> Reading:
        """The newest whole note; an empty one if there is none."""
        _, number, alive, progress, rss = _HEADER.unpack_from(self._memory, 0)
        start = 64 + number % 2 * _SLOT
        (length,) = struct.unpack_from("=I", self._memory, start)
        try:
            facts = json.loads(self._memory[start + 4 : start + 4 + length]) if number else {}
        except ValueError:  # cut off, or overwritten while it was read
            facts = {}
        return Reading(facts, alive, progress, rss)

    def close(self) -> None:
        self._memory.close()


class OwnedBox(BlackBox):
    """The driver's end: makes the memory, and knows how a process of this machine and user finds it."""

    def __init__(self) -> None:
        self._fd = _anonymous_file()
        os.ftruncate(self._fd, _SIZE)
        super().__init__(self._fd)
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._memory[:_TOKEN_BYTES] = token
        self.address = f"/proc/{os.getpid()}/fd/{self._fd}:{token.hex()}"

    def close(self) -> None:
        super().close()
        os.close(self._fd)


def _open(address: str | None) -> BlackBox:
    """The box at an address; one of its own where that is not to be had, on another machine for example.

    The token is compared before anything is written: there the path may lead to a file of somebody else's.
    """
    path, _, token = (address or "").rpartition(":")
    if not path:
        return BlackBox()
    try:
        with open(path, "rb") as file:
            if file.read(_TOKEN_BYTES).hex() != token:
                return BlackBox()
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return BlackBox()
    try:
        return BlackBox(fd)
    finally:
        os.close(fd)


_BOX: tuple[int, str | None, BlackBox] | None = None


def black_box() -> BlackBox:
    """The box of this process: the one that ``VERL_BLACK_BOX`` names, made at the first call."""
    global _BOX
    place = (os.getpid(), os.environ.get(BOX_VARIABLE))
    if _BOX is None or _BOX[:2] != place:  # a fork has another one than its parent
        _BOX = (*place, _open(place[1]))
    return _BOX[2]


def _short(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _short(item) for name, item in list(value.items())[:8]}
    return [_short(item) for item in value[:4]] if isinstance(value, list) else str(value)[:80]


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("verl-black-box", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
