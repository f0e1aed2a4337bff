"""Run benchmarks of two checkouts in turns on one machine, and print the ratio of their figures.

    python -m benchmarks.compare ../before step startup dispatch algorithms data --repeat 3

``../before`` is another checkout of this project. Of each figure the least of the repeats counts: what else the machine
does can only add. A row that one side lacks is named. Options after ``--`` go to each benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COSTS = (
    "cpu_s",
    "cpu_ms",
    "wall_ms",
    "cpu_s_a_step",
    "driver_cpu_ms",
    "driver_cpu_s",
    "step_extra_MiB",
    "sync_cpu_s",
    "sync_awake_cpu_s",
    "anonymous_MB",
    "whole_MB",
)
"""Figures of which less is better, as the benchmarks name them."""


def run(checkout: Path, name: str, options: list[str]) -> dict[str, dict[str, float]]:
    """Return the costs of each row of one run, by the row's other texts and sizes."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"benchmarks.{name} of {checkout} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    rows = json.loads(done.stdout[done.stdout.index("{") :])["rows"]
    return {label(row): {key: _least(row[key]) for key in COSTS if row.get(key) is not None} for row in rows}


def label(row: dict[str, Any]) -> str:
    """Return what identifies a row: its texts but for its work in words, and its sizes in whole numbers."""
    known = {key: value for key, value in row.items() if key != "work" and not isinstance(value, bool)}
    return ", ".join(str(value) for value in known.values() if isinstance(value, str | int))


def _least(figure: Any) -> float:
    return figure["min"] if isinstance(figure, dict) else figure


def compare(before: Path, name: str, repeat: int, options: list[str]) -> None:
    """Print a line for each figure of a benchmark: before, after, and after / before."""
    best: list[dict[str, dict[str, float]]] = [{}, {}]
    for _ in range(repeat):
        for least, checkout in zip(best, (before, ROOT), strict=True):
            for row, costs in run(checkout, name, options).items():
                known = least.setdefault(row, costs)
                for key, cost in costs.items():
                    known[key] = min(known[key], cost)
    print(f"\n{name}, the least of {repeat} runs, load {os.getloadavg()[0]:.1f}", flush=True)
    for row in best[0].keys() | best[1].keys():
        if row not in best[0] or row not in best[1]:
            print(f"  {row}: only {'after' if row in best[1] else 'before'}")
    for row, costs in best[1].items():
        for key, after in costs.items() if row in best[0] else ():
            first = best[0][row].get(key)
            if first:
                print(f"  {after / first:5.2f}  {first:9.4g} -> {after:9.4g} {key:<14} {row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("names", nargs="+", metavar="benchmark")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:split])
    for name in args.names:
        compare(args.before.resolve(), name, args.repeat, arguments[split + 1 :])


if __name__ == "__main__":
    main()
