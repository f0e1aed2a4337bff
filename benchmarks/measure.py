"""Measuring whole commands and blocks in CPU seconds, and printing rows as JSON.

CPU seconds are user plus system time of a command and everything it started, also of processes that detached from it:
this process makes itself their reaper (Linux), so nothing Ray leaves behind escapes the count.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36


def command_cost(command: list[str], env: dict[str, str] | None = None, expect: int | None = 0) -> dict[str, float]:
    """CPU and wall seconds of a command with all its descendants."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before, start = _children_seconds(), time.perf_counter()
    done = subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True)
    wall = time.perf_counter() - start
    _reap_orphans()
    if expect is not None and done.returncode != expect:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return {"cpu_s": _children_seconds() - before, "wall_s": wall}


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _reap_orphans(patience_s: float = 10.0) -> None:
    deadline = time.monotonic() + patience_s
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                time.sleep(0.05)


def block_cost(block: Callable[[], Any], repeat: int = 7, warm_up: int = 2) -> float:
    """The least CPU milliseconds of this process over ``repeat`` runs of ``block``."""
    times = []
    for i in range(warm_up + repeat):
        start = time.process_time()
        block()
        if i >= warm_up:
            times.append(time.process_time() - start)
    return min(times) * 1000


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def report(name: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows as JSON; with ``--save`` also write ``benchmarks/results/{name}.json``."""
    text = json.dumps({"benchmark": name, "load": os.getloadavg()[0], "rows": rows}, indent=1)
    print(text)
    if "--save" in sys.argv:
        folder = Path(__file__).parent / "results"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(text + "\n")
