"""Timers and memory logs: timers for the driver's stages, memory lines for the workers.

Knows clocks and counters, not stages: the names are the caller's.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from codetiming import Timer

from verl.compat import missing
from verl.utils.process import get_logger

logger = get_logger(__name__)

__path__: list[str] = []  # of older releases' modules below this name: verl/compat.py

__all__ = [
    "DistProfiler",
    "DistProfilerExtension",  # noqa: F822 (given by __getattr__)
    "GPUMemoryLogger",
    "ProfilerConfig",  # noqa: F822 (given by __getattr__)
    "log_gpu_memory_usage",
    "marked_timer",
    "reduce_timing",
    "simple_timer",
    "topk_reduce_ratio_min_max",
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


_timer = simple_timer
"""Its name until v0.4."""


def reduce_timing(timing_raw: Mapping[str, float], reduce_op: Any = None) -> dict[str, float]:
    """The seconds of each name over all ranks, which call this together with the same names.

    Args:
        reduce_op: a ``torch.distributed.ReduceOp``; None: the mean.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return dict(timing_raw)
    seconds = torch.tensor([timing_raw[name] for name in sorted(timing_raw)], device=_collective_device())
    is_mean = reduce_op in (None, dist.ReduceOp.AVG)  # gloo has no mean
    dist.all_reduce(seconds, dist.ReduceOp.SUM if is_mean else reduce_op)
    seconds = seconds / dist.get_world_size() if is_mean else seconds
    return dict(zip(sorted(timing_raw), seconds.tolist(), strict=True))


def topk_reduce_ratio_min_max(timing: float, k: int = 10) -> tuple[float, float, float]:
    """Of the seconds of all ranks, which call this together: share of ranks in the slowest ``k`` %, least, most.

    Three times -1 where there is no process group.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return -1.0, -1.0, -1.0
    parts = [torch.zeros(1, device=_collective_device()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, torch.tensor([timing], dtype=torch.float32, device=parts[0].device))
    seconds = torch.cat(parts)
    slow = seconds > torch.quantile(seconds, 1 - k / 100)
    return slow.float().mean().item(), seconds.min().item(), seconds.max().item()


def _collective_device() -> str:
    import torch.distributed as dist

    return "cuda" if dist.get_backend() == "nccl" else "cpu"


class DistProfiler:
    """Switches the CUDA profiler of one rank on and off, and marks functions in its trace; nothing without CUDA.

    Args:
        rank: of this process.
        config: has ``enable``, ``all_ranks`` and ``ranks``, as ``ProfilerConfig``; None: never.
        tool_config, kwargs: of single tools, which are started from outside (``nsys profile``); have no effect.
    """

    def __init__(self, rank: int, config: Any = None, tool_config: Any = None, **kwargs: Any) -> None:
        ranks = list(getattr(config, "ranks", None) or ())
        is_chosen = getattr(config, "all_ranks", False) or rank in ranks
        self.enabled = config is not None and getattr(config, "enable", True) is not False and is_chosen

    def check_enable(self) -> bool:
        """Whether the configuration wants this rank profiled."""
        return self.enabled

    def start(self, **kwargs: Any) -> None:
        """Begin to record, where this process uses CUDA."""
        if self.enabled and (cuda := _initialised_cuda()) is not None:
            cuda.profiler.start()

    def stop(self) -> None:
        """End what ``start`` began."""
        if self.enabled and (cuda := _initialised_cuda()) is not None:
            cuda.profiler.stop()

    @staticmethod
    def annotate(message: str | None = None, color: str | None = None, **kwargs: Any) -> Callable[[Callable], Callable]:
        """Decorator: mark each call of the function in a CUDA trace as ``message``, or by the function's name.

        Args:
            color, kwargs: accepted for callers that pass them; the mark carries the name only.
        """

        def decorate(function: Callable) -> Callable:
            @functools.wraps(function)
            def marked(*args: Any, **kwargs: Any) -> Any:
                with marked_timer(message or function.__name__, {}):
                    return function(*args, **kwargs)

            return marked

        return decorate


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
    if name == "DistProfilerExtension":
        from verl.single_controller.base.worker import DistProfilerExtension

        return DistProfilerExtension
    raise missing(__name__, name)
