"""A tracker in a thread of its own, behind a bounded queue: it can neither stop nor slow the run that it records.

Knows a tracker's methods by name; which trackers there are is `verl.telemetry.tracking`'s.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from verl.telemetry.run_record import mask_text
from verl.utils.process import get_logger, warn_once

logger = get_logger(__name__)

QUEUE_LENGTH = 1000
"""Records that may wait for a tracker; further ones are counted and not sent."""


class Delivery:
    """A tracker that is opened, served and closed in a thread of its own.

    Args:
        name: in ``trainer.logger``.
        open_tracker: makes it.

    Attributes:
        backend: the tracker; None until it is open, and if it could not be opened.
        error: why it could not be opened.
        is_opened: set once one of them is known.
        lost: records that the tracker refused or had no room for.
    """

    def __init__(self, name: str, open_tracker: Callable[[], Any]) -> None:
        self.name = name
        self.backend: Any = None
        self.error: BaseException | None = None
        self.is_opened = threading.Event()
        self.lost = 0
        self._failed = False
        self._calls: queue.SimpleQueue[tuple[str, tuple] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(open_tracker,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, method: str, *args: Any) -> None:
        """Have the thread call ``method`` of the tracker; returns at once."""
        if self.error is not None:
            self.lost += 1
        elif self._calls.qsize() >= QUEUE_LENGTH:
            self._lose(f"does not keep up: {QUEUE_LENGTH} records wait for it, and further ones are not sent")
        else:
            self._calls.put((method, args))

    def end(self, failed: bool = False) -> None:
        """Have the tracker finished once all that waits is sent; returns at once."""
        self._failed = failed
        self._calls.put(None)

    def wait(self, deadline: float) -> None:
        """Wait until the tracker is finished, or for ``deadline`` (`time.monotonic`); say what was not sent."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.warning(
                "trainer.logger=%s has not finished in time and has %d records unsent; the run ends without it. "
                "trainer.tracker_timeout is the number of seconds it gets.",
                self.name, max(0, self._calls.qsize() - 1),
            )  # fmt: skip
        if self.lost:
            logger.warning("trainer.logger=%s: %d records of this run were lost.", self.name, self.lost)

    def _serve(self, open_tracker: Callable[[], Any]) -> None:
        try:
            with masked_command():
                self.backend = open_tracker()
        except (Exception, SystemExit) as error:  # raised again where ``is_opened`` is waited for
            self.error = error
            return
        finally:
            self.is_opened.set()
        while (call := self._calls.get()) is not None:
            method, args = call
            try:
                getattr(self.backend, method)(*args)
            except (Exception, SystemExit) as error:  # of others' code, and no reason to stop a run
                self._lose(f"failed ({type(error).__name__}: {error})")
        try:
            self.backend.failed = self._failed
            self.backend.finish()
        except (Exception, SystemExit) as error:
            logger.warning("trainer.logger=%s could not be closed (%s: %s).", self.name, type(error).__name__, error)

    def _lose(self, why: str) -> None:
        self.lost += 1
        key = f"tracker {self.name} {why.split()[0]}"
        warn_once(f"trainer.logger={self.name} {mask_text(why)}. The run goes on.", key=key)


_command_lock = threading.Lock()
_commands: list[list[str]] = []
"""The command line as it was, once for each thread that hides its secrets now."""


@contextmanager
def masked_command() -> Iterator[None]:
    """Hide secrets on the command line in this block, also of several threads: services store what started a run."""
    with _command_lock:
        _commands.append(_commands[0] if _commands else sys.argv)
        sys.argv = [mask_text(word) for word in _commands[0]]
    try:
        yield
    finally:
        with _command_lock:
            words = _commands.pop()
            if not _commands:  # the last one to leave
                sys.argv = words
