"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 120.0) -> None:
    """Return once ``condition()`` is true.

    Args:
        what: the end of the message: what did not come.
        timeout_s: guards against a hang and promises nothing: a machine may be slow.

    Raises:
        TimeoutError: it stayed false.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.02)
