"""Balance of rows of log-normal length over ranks, and the time to divide them.

``python -m benchmarks.balance [--save]``. Work is ``l * (break_even + l)`` summed over a rank; a step takes as long as
the rank with most of it. For each number of ranks the most over the mean, of rows

- in their order,
- with as many rows, and as equal a number of tokens, on each rank,
- with as many rows, and as equal work, on each rank,
- with equal work, however many rows that takes,

and the least there can be: some rank has the longest row. Then the CPU milliseconds of dividing them.
"""

from __future__ import annotations

import sys
from functools import partial

import numpy as np

from benchmarks.measure import block_cost, report, work_words
from verl.batch.balancing import balanced_parts
from verl.batch.partition import CallPlan, PartitionPlan, RowCost, RowLengths

COST = RowCost(32768)
LONGEST = 32768


def lengths_of(rows: int, sigma: float, seed: int) -> np.ndarray:
    """Log-normal with a median of 1024 tokens, cut at the longest a response may be."""
    lengths = np.random.default_rng(seed).lognormal(np.log(1024), sigma, rows)
    return lengths.astype(np.int64).clip(1, LONGEST)


def max_over_mean(costs: np.ndarray, parts: list) -> float:
    return max(int(costs[part].sum()) for part in parts) / (costs.sum() / len(parts))


def measure(rows: int, ranks: int, sigma: float, repeats: int = 5) -> dict[str, float]:
    """Means over several samples of lengths."""
    found: dict[str, list[float]] = {}
    plan = PartitionPlan({"update": CallPlan(by_tokens=True)}, COST)
    for seed in range(repeats):
        lengths = lengths_of(rows, sigma, seed)
        costs = COST.of(lengths)
        partition = plan.partition("update", RowLengths(lengths), ranks)
        numbers = {
            "in_order": max_over_mean(costs, np.array_split(np.arange(rows), ranks)),
            "equal_rows_by_tokens": max_over_mean(costs, balanced_parts(lengths, ranks, equal_size=True)),
            "equal_rows_by_cost": max_over_mean(costs, balanced_parts(costs, ranks, equal_size=True)),
            "by_cost": max_over_mean(costs, partition.rows),
            "least_possible": max(1.0, int(costs.max()) / (costs.sum() / ranks)),
            "cpu_ms": block_cost(partial(plan.partition, "update", RowLengths(lengths), ranks), repeat=3, warm_up=0),
        }
        for name, value in numbers.items():
            found.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}


def main() -> None:
    sizes = [(256, 8), (1024, 8), (1024, 64), (1024, 256), (8192, 64), (8192, 512), (65536, 512)]
    rows = []
    for sigma in (0.8, 1.2):
        for count, ranks in sizes:
            size = {"rows": count, "ranks": ranks}
            work = f"{work_words(size)}, log-normal lengths of sigma {sigma}"
            rows.append({"work": work, **size, "sigma": sigma, **measure(count, ranks, sigma)})
    report("balance", rows)


if __name__ == "__main__":
    sys.exit(main())
