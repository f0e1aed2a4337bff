"""Where time and device memory go: timers for the driver's stages, memory lines for the workers.

Knows clocks and counters, not stages: the names are the caller's.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from codetiming import Timer

from verl.utils.logging_utils import get_logger

logger = get_logger(__name__)

__all__ = [
    "GPUMemoryLogger",
    "ProfilerConfig",  # noqa: F822 (given by __getattr__)
    "log_gpu_memory_usage",
    "marked_timer",
    "simple_timer",
]


@contextmanager
def simple_timer(name: str, timing_raw: MutableMapping[str, float]) -> Iterator[None]:
    """Add the seconds this block takes to ``timing_raw[name]``, also when the block raises."""
    timer = Timer(logger=None)
    timer.start()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + timer.stop()


@contextmanager
def marked_timer(
    name: str,
    timing_raw: MutableMapping[str, float],
    color: str | None = None,
    domain: str | None = None,
    category: str | None = None,
) -> Iterator[None]:
    """``simple_timer`` that also marks the block in a CUDA trace, where this process uses CUDA.

    Args:
        name: key in ``timing_raw``, and the mark's text.
        timing_raw: seconds by name; added to.
        color, domain, category: accepted for callers that pass them; the mark carries the name only.
    """
    cuda = _initialised_cuda()
    if cuda is not None:
        cuda.nvtx.range_push(name)
    try:
        with simple_timer(name, timing_raw):
            yield
    finally:
        if cuda is not None:
            cuda.nvtx.range_pop()


def log_gpu_memory_usage(
    head: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, rank: int | None = 0
) -> None:
    """Say how much device memory is allocated and reserved (GB), after ``head``.

    Args:
        logger: where to; None prints.
        rank: only this rank speaks; None lets every rank speak.
    """
    if logger is not None and not logger.isEnabledFor(level):
        return
    if rank is not None and _rank() != rank:
        return
    cuda = _initialised_cuda()
    if cuda is None:
        message = f"{head}, no CUDA device in use"
    else:
        free, total = cuda.mem_get_info()
        gb = 1024**3
        message = (
            f"{head}, memory allocated (GB): {cuda.memory_allocated() / gb:.2f}, "
            f"memory reserved (GB): {cuda.memory_reserved() / gb:.2f}, "
            f"device memory used/total (GB): {(total - free) / gb:.2f}/{total / gb:.2f}"
        )
    if logger is None:
        print(message)
    else:
        logger.log(level, message)


class GPUMemoryLogger:
    """Decorator: a memory line before and after the function.

    Args:
        role: named in the line.
        logger, level: where to.
        log_only_rank_0: the other ranks stay silent.
    """

    def __init__(
        self,
        role: str,
        logger: logging.Logger | None = None,
        level: int = logging.DEBUG,
        log_only_rank_0: bool = True,
    ) -> None:
        self.role = role
        self.logger = logger or globals()["logger"]
        self.level = level
        self.rank = 0 if log_only_rank_0 else None

    def __call__(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            where = f"{self.role}.{function.__name__}"
            log_gpu_memory_usage(f"Before {where}", self.logger, self.level, self.rank)
            result = function(*args, **kwargs)
            log_gpu_memory_usage(f"After {where}", self.logger, self.level, self.rank)
            return result

        return wrapped


def _initialised_cuda() -> Any:
    """``torch.cuda`` if this process uses it already; asking never imports torch nor wakes the device."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _rank() -> int:
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return 0


def __getattr__(name: str) -> Any:
    # The option lives with the other options; this module is a leaf and must not import the config at its top.
    if name == "ProfilerConfig":
        from verl.config.trainer import ProfilerConfig

        return ProfilerConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
