"""One piece of work at a time beside the main thread; its error is raised where it is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs work in a thread that does not keep a process alive which ends without waiting."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin ``work``; that before is waited for."""
        self.wait()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised again by wait()
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the work, if any; raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
