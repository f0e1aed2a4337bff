"""Loggers with one level for the whole package, and warnings that are given once.

The level comes from the environment variable ``VERL_LOGGING_LEVEL`` (default WARN), as users of verl set it.
"""

from __future__ import annotations

import logging
import os

_given: set[str] = set()


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, at the level ``VERL_LOGGING_LEVEL`` names."""
    level = os.getenv("VERL_LOGGING_LEVEL", "WARN").upper()
    if level.isdigit():
        level_number = int(level)
    else:
        level_number = logging.getLevelName(level)
        if not isinstance(level_number, int):
            raise ValueError(
                f"VERL_LOGGING_LEVEL={level} is no logging level. Use DEBUG, INFO, WARN, ERROR, CRITICAL or a number."
            )
    logger = logging.getLogger(name)
    logger.setLevel(level_number)
    return logger


def warn_once(message: str, key: str | None = None) -> bool:
    """Log a warning unless this process has given it already; returns whether it was given now.

    Args:
        message: what the user should know.
        key: what counts as the same warning; default: the message itself.
    """
    key = message if key is None else key
    if key in _given:
        return False
    _given.add(key)
    get_logger("verl").warning(message)
    return True


def forget_warnings() -> None:
    """Let every warning be given again; for tests."""
    _given.clear()


def set_basic_config(level: int) -> None:
    """Format and level of the root logger."""
    logging.basicConfig(format="%(levelname)s:%(asctime)s:%(message)s", level=level)
