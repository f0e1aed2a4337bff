"""Say which sample a reward function is stuck on, instead of waiting in silence."""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class SlowCallWatch:
    """Logs calls that have been under way for ``every_s`` seconds, again and again, with the stack they stand in.

    Used as a context around the calls; ``begin(key)`` and ``end(key)`` mark one call. Nothing is interrupted.

    Args:
        describe: key of a call -> words for the log.
        every_s: seconds between looks.
    """

    def __init__(self, describe: Callable[[Any], str], every_s: float = 60.0):
        self.describe = describe
        self.every_s = every_s
        self._since: dict[Any, float] = {}
        self._over = threading.Event()
        self._caller = threading.get_ident()

    def begin(self, key: Any) -> None:
        self._since[key] = time.monotonic()

    def end(self, key: Any) -> None:
        del self._since[key]

    def __enter__(self) -> "SlowCallWatch":
        threading.Thread(target=self._look, name="verl-reward-watch", daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(self.every_s):
            now = time.monotonic()
            late = sorted((since, key) for key, since in self._since.copy().items() if now - since >= self.every_s)
            if late:
                since, key = late[0]
                frame = sys._current_frames().get(self._caller)
                stack = "".join(traceback.format_stack(frame)[-4:]) if frame else ""
                logger.warning(
                    "The reward function has been at %s for %.0f s (%d calls that long). The calling thread is at:\n%s",
                    self.describe(key),
                    now - since,
                    len(late),
                    stack,
                )
