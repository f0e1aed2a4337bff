"""Timers of the driver's stages, memory lines, and the traces that a process makes of profiled steps.

Knows clocks and counters, not stages: the names are the caller's. While nothing is recorded, the marks of phases cost
one look at a variable.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

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
    """``simple_timer`` that also marks the block in the trace of a profiled step, and in a CUDA trace.

    Args:
        name: key in ``timing_raw``, and the mark's text.
        timing_raw: seconds by name; added to.
        color, domain, category: accepted for callers that pass them; the mark carries the name only.
    """
    cuda = _initialised_cuda()
    if cuda is not None:
        cuda.nvtx.range_push(name)
    try:
        with process_trace.mark(name), simple_timer(name, timing_raw):
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


# -- Traces of profiled steps: `global_profiler` -----------------------------------------------------------------------

STAGES = {
    "generate_sequences": "gen",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref",
    "compute_values": "values",
    "compute_rm_score": "reward",
    **{name: name for name in ("update_actor", "update_critic", "update_model", "measure_loss")},
}
"""Method of a worker that gets a file of its own with ``discrete`` -> what the metrics call its time."""

SECTIONS = {"generate_sequences": "rollout", "compute_ref_log_prob": "ref"}
"""Method of a worker that plays several roles -> its own; of others the actor's."""


DRIVER = "driver"
"""Role of the process that drives the run."""


class TraceFile(NamedTuple):
    """A trace that is written."""

    path: str
    bytes: int
    seconds: float
    """Time that the writing took."""


class ProcessTrace:
    """What this process records of profiled steps: the roles it plays begin and end together, the last one writes.

    With torch.profiler one recording is made at a time. It is of the thread that begins it, and of autograd's.

    Attributes:
        is_recording: whether marks are kept now.
    """

    def __init__(self) -> None:
        self.is_recording = False
        self._roles: dict[str, int] = {}
        self._ended: dict[str, int] = {}
        self._settings: dict[str, Any] = {}
        self._parts: dict[str, frozenset[str]] = {}
        self._profile: Any = None
        self._hook: Any = None
        self._calls, self._is_paused = 0, False
        self._files: list[TraceFile] = []

    def begin(self, role: str, rank: int, settings: Mapping[str, Any], parts: Iterable[str] = ()) -> None:
        """Record from now on, for one more role of this process.

        Args:
            settings: ``tool``, ``folder`` to write to, ``discrete``, and those of `ProfilePlan.settings`.
            parts: roles, as sections are called, whose calls get files of their own with ``discrete``.
        """
        is_first = not self._roles
        self._roles[role], self._parts[role] = rank, frozenset(parts)
        if is_first:
            self._settings, self._files = dict(settings), []
            if not settings["discrete"]:
                self._start()

    def end(self, role: str) -> list[TraceFile]:
        """End the recording for a role; returns the files written, once no role is left."""
        if role not in self._roles:
            return []
        self._ended[role] = self._roles.pop(role)
        if self._roles:
            return []
        if self._profile is not None:
            self._stop(_process_name(self._ended))
        self._ended = {}
        return self._files

    def abandon(self) -> None:
        """Stop without a file: an error ended the step."""
        if self._profile is not None:
            self._stop(None)
        self._roles, self._ended = {}, {}

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """A block that the trace shows as a span of this name."""
        return _span(name) if self.is_recording else nullcontext()

    def call(self, role: str, method: str) -> AbstractContextManager[Any]:
        """A block that is a call of a worker: a span, the unit of ``discrete`` and of ``max_module_calls``."""
        return self._call(role, method) if self._roles else nullcontext()

    @contextmanager
    def _call(self, role: str, method: str) -> Iterator[None]:
        stage = STAGES.get(method, method)
        parts = self._parts.get(role, frozenset())
        is_wanted = SECTIONS[method] in parts if method in SECTIONS else bool(parts - {"rollout", "ref"})
        is_own = self._settings["discrete"] and self._profile is None and is_wanted and method in STAGES
        if is_own:
            self._start()
        self._calls = 0
        try:
            with self.mark(stage):
                yield
        finally:
            self._pause(False)
            if is_own and self._profile is not None:
                self._stop(f"{role}-{stage}-rank{self._roles[role]}")

    def _start(self) -> None:
        tool, options = self._settings["tool"], self._settings["torch_memory"]
        cuda = _initialised_cuda()
        if tool == "nsys":
            if cuda is not None:
                cuda.profiler.start()
            self._profile = "nsys"
            return
        if tool == "torch_memory" and cuda is not None:
            cuda.memory._record_memory_history(
                max_entries=options["trace_alloc_max_entries"],
                context=options["context"],
                stacks=options["stacks"],
                **options["kw_args"],
            )
            self._profile = "memory"
            return
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.profiler import ProfilerActivity, profile

        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it writes a line to stderr at each start and stop
        contents = set(self._settings["contents"])
        kinds = {"cpu": ProfilerActivity.CPU, **({"cuda": ProfilerActivity.CUDA} if cuda is not None else {})}
        self._profile = profile(
            activities=[kind for name, kind in kinds.items() if name in contents or not contents & {"cpu", "cuda"}]
            or [ProfilerActivity.CPU],
            profile_memory="memory" in contents or tool == "torch_memory",
            record_shapes="shapes" in contents,
            with_stack="stack" in contents,
            with_modules="module" in contents,
        )
        self._profile.start()
        if self._settings["max_module_calls"]:
            self._hook = register_module_forward_pre_hook(self._count)
        self.is_recording = True

    def _stop(self, name: str | None) -> None:
        profile, self._profile, self.is_recording = self._profile, None, False
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        begin = time.monotonic()
        path = None
        if name is not None and profile != "nsys":  # which writes itself
            ending = ".pickle" if profile == "memory" else ".json.gz"
            path = _free_path(Path(self._settings["folder"]), name, ending)
        if profile == "nsys":
            if (cuda := _initialised_cuda()) is not None:
                cuda.profiler.stop()
        elif profile == "memory":
            cuda = _initialised_cuda()
            if path is not None:
                cuda.memory._dump_snapshot(str(path))
            cuda.memory._record_memory_history(enabled=None)
        else:
            profile.stop()
            if path is not None:
                profile.export_chrome_trace(str(path))
        if path is None:
            return
        if path.exists():
            self._files.append(TraceFile(str(path), path.stat().st_size, time.monotonic() - begin))
        else:
            logger.warning("the trace %s could not be written: see whether its disk is full. Training goes on.", path)

    def _count(self, module: Any, inputs: Any) -> None:
        import torch

        if torch.compiler.is_compiling():
            return
        self._calls += 1
        if self._calls == self._settings["max_module_calls"] + 1:
            self._pause(True)

    def _pause(self, wanted: bool) -> None:
        """Keep spans and operators of this thread, and kernels of its devices, out of the trace, or in it again."""
        if self._hook is None:
            return
        torch = sys.modules["torch"]
        torch._C._autograd._enable_record_function(not wanted)
        kinds = {torch.profiler.ProfilerActivity.CUDA} & set(self._profile.activities)
        if kinds and self._is_paused != wanted:
            self._profile.toggle_collection_dynamic(not wanted, kinds)
        self._is_paused = wanted


@contextmanager
def _span(name: str) -> Iterator[None]:
    with sys.modules["torch"].profiler.record_function(name):
        yield


def _process_name(ranks: Mapping[str, int]) -> str:
    """``actor_rollout+critic-rank1`` of the roles of a process and their ranks; the driver alone is ``driver``."""
    names = sorted(name for name in ranks if name != DRIVER)
    return f"{'+'.join(names)}-rank{ranks[names[0]]}" if names else DRIVER


def _free_path(folder: Path, name: str, ending: str) -> Path:
    """A path below ``folder`` that no file has: the second call of a step gets a number."""
    folder.mkdir(parents=True, exist_ok=True)
    numbered = (folder / f"{name}{'' if number == 1 else f'-{number}'}{ending}" for number in range(1, 10_000))
    return next(path for path in numbered if not path.exists())


process_trace = ProcessTrace()
"""Of this process: torch.profiler and CUDA have one state a process."""


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
