"""Flight recorder: the current activity of a process, in memory that outlives the process; and the watchdog on it.

The driver makes a recorder for each worker and keeps it; the worker maps the same memory, so a note is a memory copy
and is there however the worker ends. The memory has no name in any file system: nothing is left behind. Knows bytes and
notes, not what they mean.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import secrets
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.telemetry.memory import rss_bytes
from verl.utils.exit_codes import ExitCode

RECORDER_VARIABLE = "VERL_FLIGHT_RECORDER"
"""Environment variable with the address of a worker's recorder: ``path:token``."""

_TOKEN_BYTES = 16
_HEADER = struct.Struct("=16sQddQ")  # token, number of notes, last sign of life, last progress, resident bytes
_NOTES, _ALIVE, _PROGRESS, _RSS = 16, 24, 32, 40  # offsets in the header
_SLOT = 4096
_STACK = 64 + 2 * _SLOT  # offset of the stack, which is the watchdog's alone to write
_SIZE = _STACK + _SLOT
_FRAMES = 8


@dataclass(frozen=True)
class Reading:
    """Contents of a recorder. Times are of ``time.monotonic``, which all processes of a machine share; 0 is never."""

    notes: dict[str, Any] = field(default_factory=dict)
    alive: float = 0.0
    """Last sign of life."""
    progress: float = 0.0
    """Last progress of the noted activity."""
    rss: int = 0
    """Resident memory at the last sign of life, bytes."""
    stack: str = ""
    """Innermost frames of the main thread at the last sign of life, as ``function (file:line)``, the newest first."""


class FlightRecorder:
    """Shared memory with the newest note; of two slots one is always whole, whenever the writer dies.

    Args:
        fd: a descriptor of the memory; None makes memory of this process alone.
    """

    def __init__(self, fd: int | None = None):
        self._memory = mmap.mmap(-1 if fd is None else fd, _SIZE)
        self._lock = threading.Lock()
        self._notes: dict[str, Any] = {}

    def note(self, **notes: Any) -> None:
        """Add notes, JSON values; None removes one. What is too long is cut off."""
        with self._lock:
            merged = {name: value for name, value in {**self._notes, **notes}.items() if value is not None}
            self._notes = merged
            text = json.dumps(merged).encode()
            if len(text) > _SLOT - 4:
                text = json.dumps({name: _short(value) for name, value in merged.items()}).encode()[: _SLOT - 4]
            (number,) = struct.unpack_from("=Q", self._memory, _NOTES)
            start = 64 + (number + 1) % 2 * _SLOT
            struct.pack_into("=I", self._memory, start, len(text))
            self._memory[start + 4 : start + 4 + len(text)] = text
            struct.pack_into("=Q", self._memory, _NOTES, number + 1)

    @property
    def notes(self) -> dict[str, Any]:
        """Return the current notes."""
        return dict(self._notes)

    def forget(self) -> None:
        """Remove all notes."""
        self._notes = {}
        self.note()

    def tick(self) -> None:
        """Record progress of the noted activity; costs less than a microsecond."""
        struct.pack_into("=d", self._memory, _PROGRESS, time.monotonic())

    def beat(self) -> None:
        """Say that this process lives, and how large it is."""
        struct.pack_into("=d", self._memory, _ALIVE, time.monotonic())
        struct.pack_into("=Q", self._memory, _RSS, rss_bytes())
        text = main_stack().encode()[: _SLOT - 4]
        struct.pack_into("=I", self._memory, _STACK, len(text))
        self._memory[_STACK + 4 : _STACK + 4 + len(text)] = text

    def read(self) -> Reading:
        """The newest whole note; an empty one if there is none."""
        _, number, alive, progress, rss = _HEADER.unpack_from(self._memory, 0)
        start = 64 + number % 2 * _SLOT
        (length,) = struct.unpack_from("=I", self._memory, start)
        try:
            notes = json.loads(self._memory[start + 4 : start + 4 + length]) if number else {}
        except ValueError:  # cut off, or overwritten while it was read
            notes = {}
        (length,) = struct.unpack_from("=I", self._memory, _STACK)
        stack = self._memory[_STACK + 4 : _STACK + 4 + min(length, _SLOT - 4)].decode(errors="replace")
        return Reading(notes, alive, progress, rss, stack)

    def close(self) -> None:
        self._memory.close()


def main_stack() -> str:
    """The innermost frames of this process's main thread, ``function (folder/file:line) < caller < ...``."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[str] = []
    while frame is not None and len(frames) < _FRAMES:
        parts = frame.f_code.co_filename.split(os.sep)
        frames.append(f"{frame.f_code.co_name} ({'/'.join(parts[-2:])}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(frames)


class OwnedRecorder(FlightRecorder):
    """The driver's end: makes the memory, and has the address by which a process of this machine and user finds it."""

    def __init__(self) -> None:
        self._fd = anonymous_file()
        os.ftruncate(self._fd, _SIZE)
        super().__init__(self._fd)
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._memory[:_TOKEN_BYTES] = token
        self.address = f"/proc/{os.getpid()}/fd/{self._fd}:{token.hex()}"

    def close(self) -> None:
        super().close()
        os.close(self._fd)


def _open(address: str | None) -> FlightRecorder:
    """The recorder at an address; one of its own where that cannot be opened, on another machine for example.

    The token is compared before anything is written: there the path may lead to a file of somebody else's.
    """
    path, _, token = (address or "").rpartition(":")
    if not path:
        return FlightRecorder()
    try:
        with open(path, "rb") as file:
            if file.read(_TOKEN_BYTES).hex() != token:
                return FlightRecorder()
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return FlightRecorder()
    try:
        return FlightRecorder(fd)
    finally:
        os.close(fd)


_RECORDER: tuple[int, str | None, FlightRecorder] | None = None


def flight_recorder() -> FlightRecorder:
    """The recorder of this process: the one that ``VERL_FLIGHT_RECORDER`` names, made at the first call."""
    global _RECORDER
    place = (os.getpid(), os.environ.get(RECORDER_VARIABLE))
    if _RECORDER is None or _RECORDER[:2] != place:  # a fork has another one than its parent
        _RECORDER = (*place, _open(place[1]))
    return _RECORDER[2]


def _short(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _short(item) for name, item in list(value.items())[:8]}
    return [_short(item) for item in value[:4]] if isinstance(value, list) else str(value)[:80]


def anonymous_file() -> int:
    """Descriptor of a file in memory, or where the system has none, of a file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("verl", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# -- Watchdog: a thread that shows that its process lives, and ends it when armed work makes no progress ----------


STALLED = 85
"""Exit code of a worker that its watchdog has ended; none of those in `verl.utils.exit_codes`."""

_BEAT_S = 1.0
_LAST_GRACE_S = 10.0


class Watchdog:
    """Beats the flight recorder every second; while armed, compares its last progress with the clock.

    Args:
        recorder: of this process.
        is_driver: this process drives the run as well: it is asked to end (SIGTERM, which closes what is open), and
            ended if it does not.
    """

    def __init__(self, recorder: FlightRecorder, is_driver: bool = False):
        self._recorder = recorder
        self._is_driver = is_driver
        self._limit: float | None = None
        self._message: Callable[[float], str] = lambda waited: f"no progress for {waited:.0f} s"
        self._wake = threading.Event()
        self._lock = threading.Lock()  # no timer may be set once `disarm` has returned
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to beat; calling it again does nothing."""
        if self._thread is None:
            self._recorder.beat()
            self._thread = threading.Thread(target=self._watch, name="verl-watchdog", daemon=True)
            self._thread.start()

    def arm(self, limit_s: float, message: Callable[[float], str]) -> None:
        """From now on, `FlightRecorder.tick` must come within ``limit_s`` seconds; 0 sets no limit.

        ``message``: from the seconds waited to the sentence for the user.
        """
        if limit_s > 0:
            self.start()
            self._recorder.tick()
            with self._lock:
                self._message, self._limit = message, limit_s
                self._set_timer()
            self._wake.set()

    def disarm(self) -> None:
        with self._lock:
            if self._limit is not None and not self._is_driver:
                faulthandler.cancel_dump_traceback_later()
            self._limit = None

    def _watch(self) -> None:
        while True:
            limit = self._limit
            self._wake.wait(_BEAT_S if limit is None else min(_BEAT_S, limit / 4))
            self._wake.clear()
            self._recorder.beat()
            with self._lock:
                if self._limit is None:
                    continue
                waited = time.monotonic() - self._recorder.read().progress
                if waited > self._limit:
                    self._end(waited)
                self._set_timer()

    def _set_timer(self) -> None:
        """Code that hangs and keeps the interpreter lock stops the watching thread, but not the one started here."""
        if not self._is_driver:
            faulthandler.dump_traceback_later(2 * self._limit + _BEAT_S, exit=True, file=2)

    def _end(self, waited: float) -> None:
        message = self._message(waited)
        self._recorder.note(ended=message)
        sys.stderr.flush()
        os.write(2, f"\nerror: {message}\nThe stacks of all threads:\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
        if self._is_driver:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_LAST_GRACE_S)
        os._exit(int(ExitCode.WORKER) if self._is_driver else STALLED)


_WATCHDOG: tuple[FlightRecorder, Watchdog] | None = None


def watchdog() -> Watchdog:
    """The watchdog of this process, over its `flight_recorder`; made at the first call."""
    global _WATCHDOG
    recorder = flight_recorder()
    if _WATCHDOG is None or _WATCHDOG[0] is not recorder:
        _WATCHDOG = (recorder, Watchdog(recorder, is_driver=RECORDER_VARIABLE not in os.environ))
    return _WATCHDOG[1]
