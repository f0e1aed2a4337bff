"""A thread that shows that its process lives, and ends it when work that was announced makes no progress.

Knows the black box and the clock, not what the work is.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from verl.utils.black_box import BOX_VARIABLE, BlackBox, black_box

STALLED = 75
"""Exit code of a process that its watchdog has ended."""

_BEAT_S = 1.0
_LAST_GRACE_S = 10.0


class Watchdog:
    """Beats the black box every second; while armed, compares its last progress with the clock.

    Args:
        box: of this process.
        is_driver: this process drives the run as well: it is asked to end (SIGTERM, which closes what is open), and
            ended if it does not.
    """

    def __init__(self, box: BlackBox, is_driver: bool = False):
        self._box = box
        self._is_driver = is_driver
        self._limit: float | None = None
        self._tell: Callable[[float], str] = lambda waited: f"no progress for {waited:.0f} s"
        self._wake = threading.Event()
        self._lock = threading.Lock()  # no timer may be set once `disarm` has returned
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to beat; calling it again does nothing."""
        if self._thread is None:
            self._box.beat()
            self._thread = threading.Thread(target=self._watch, name="verl-watchdog", daemon=True)
            self._thread.start()

    def arm(self, limit_s: float, tell: Callable[[float], str]) -> None:
        """From now on, `BlackBox.tick` must come within ``limit_s`` seconds; 0 sets no limit.

        ``tell``: from the seconds waited to the sentence for the user.
        """
        if limit_s > 0:
            self.start()
            self._box.tick()
            with self._lock:
                self._tell, self._limit = tell, limit_s
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
            self._box.beat()
            with self._lock:
                if self._limit is None:
                    continue
                waited = time.monotonic() - self._box.read().progress
                if waited > self._limit:
                    self._end(waited)
                self._set_timer()

    def _set_timer(self) -> None:
        """Code that hangs and keeps the interpreter lock stops the watching thread, but not the one started here."""
        if not self._is_driver:
            faulthandler.dump_traceback_later(2 * self._limit + _BEAT_S, exit=True, file=2)

    def _end(self, waited: float) -> None:
        message = self._tell(waited)
        self._box.note(ended=message)
        sys.stderr.flush()
        os.write(2, f"\nerror: {message}\nThe stacks of all threads:\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
        if self._is_driver:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_LAST_GRACE_S)
        os._exit(STALLED)


_WATCHDOG: tuple[BlackBox, Watchdog] | None = None


def watchdog() -> Watchdog:
    """The watchdog of this process, over its `black_box`; made at the first call."""
    global _WATCHDOG
    box = black_box()
    if _WATCHDOG is None or _WATCHDOG[0] is not box:
        _WATCHDOG = (box, Watchdog(box, is_driver=BOX_VARIABLE not in os.environ))
    return _WATCHDOG[1]
