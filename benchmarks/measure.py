"""Measuring whole commands and blocks in CPU seconds, and printing rows as JSON, with load, versions and commit.

CPU seconds are user plus system time of a command and everything it started. Descendants are watched while they run,
since what Ray's helpers used is lost when they are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

POLL_S = 0.02
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "numpy", "ray", "vllm", "sglang")
_LOAD_AT_START = os.getloadavg()[0]


def command_cost(command: list[str], env: dict[str, str] | None = None, expect: int | None = 0) -> dict[str, float]:
    """CPU and wall seconds of a command with all its descendants."""
    with tempfile.TemporaryFile("w+") as output:
        start = time.perf_counter()
        process = psutil.Popen(command, env={**os.environ, **(env or {})}, stdout=output, stderr=subprocess.STDOUT)
        cpu = _watch(process)
        wall = time.perf_counter() - start
        output.seek(0)
        if expect is not None and process.returncode != expect:
            sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{output.read()[-4000:]}")
    return {"cpu_s": cpu, "wall_s": wall}


def _watch(process: psutil.Popen) -> float:
    """CPU seconds of the process and all its descendants, once it has ended.

    Two counts, each too small in its way: what was seen while they ran lacks the last moments of each, what the kernel
    reports lacks those that were never waited for. The larger is nearer.
    """
    seen: dict[int, float] = {}
    before = _children_seconds()
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            for one in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    times = one.cpu_times()
                    seen[one.pid] = times.user + times.system
        time.sleep(POLL_S)
    return max(sum(seen.values()), _children_seconds() - before)


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def block_cost(block: Callable[[], Any], repeat: int = 7, warm_up: int = 2) -> float:
    """The least CPU milliseconds of this process over ``repeat`` runs of ``block``."""
    return min(_costs(block, repeat, warm_up))


def median_cost(block: Callable[[], Any], repeat: int = 9, warm_up: int = 2) -> float:
    """The middle of the CPU milliseconds of this process over ``repeat`` runs of ``block``."""
    return statistics.median(_costs(block, repeat, warm_up))


def _costs(block: Callable[[], Any], repeat: int, warm_up: int) -> list[float]:
    """CPU milliseconds of each of ``repeat`` runs of ``block`` after ``warm_up`` others."""
    times = []
    for i in range(warm_up + repeat):
        start = time.process_time()
        block()
        if i >= warm_up:
            times.append((time.process_time() - start) * 1000)
    return times


def peak_extra_mb(block: Callable[[], Any]) -> float | None:
    """Return how far the memory of this process rises above where it was while ``block`` runs, its result included.

    None where the system keeps no high-water mark that can be set back (Linux does).
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not to be used again unseen
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = _status_kb("VmRSS")
    kept = block()
    peak = _status_kb("VmHWM")
    del kept
    return max(peak - before, 0) / 1024


def _status_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def work_words(counts: Mapping[str, Any]) -> str:
    """Return the size of a row's work in words, of those counts that it has: rows, width, tokens, ranks and others.

    ``{"rows": 1024, "width": 4096, "tokens": 265037}`` is ``1024 x 4096, 265,037 tokens``.
    """
    rows = [f"{counts['rows']:,} rows"] if "rows" in counts else []
    size = [f"{counts['rows']} x {counts['width']}"] if "width" in counts else rows
    return ", ".join(size + [f"{count:,} {name}" for name, count in counts.items() if name not in ("rows", "width")])


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, of those that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def commit() -> str | None:
    """Return this checkout's commit, with ``+`` where its files differ from it; None outside of git."""
    folder = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../verl", ".", ":!results")
    return head and head + "+" * bool(changed)


def report(name: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows as JSON; with ``--save`` also write ``benchmarks/results/{name}.json``.

    ``load`` is the load average of the machine before the benchmark and after it.
    """
    load = [round(value, 2) for value in (_LOAD_AT_START, os.getloadavg()[0])]
    about = {"commit": commit(), "versions": versions(), "cores": os.cpu_count(), "load": load}
    text = json.dumps({"benchmark": name, **about, "rows": rows}, indent=1)
    print(text)
    if "--save" in sys.argv:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(text + "\n")
