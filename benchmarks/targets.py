"""The table "Where it stands" of benchmarks/README.md: numbers of the saved results beside what they should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from benchmarks.measure import work_words
from benchmarks.render import WORK, digits, grid, load, load_rows, load_words

WIDE = {"rows": 1024, "width": 4096}
GRPO_CALLS = {"what": "bytes per real token a step", "controller": "local", "kind": "grpo"}
PPO_CALLS = {**GRPO_CALLS, "kind": "ppo"}
LARGEST = {"rows": 8192, "ranks": 512}
SYNC_FP32 = {"dtype": "float32", "actor_dtype": "float32"}
SYNC_BF16 = {"dtype": "bfloat16", "actor_dtype": "float32"}
SEEDS_FP32 = {"what": "seeds", "dtype": "float32"}
SEEDS_BF16 = {"what": "seeds", "dtype": "bfloat16"}
LOG_PROBS = "log-probs and entropy of hidden states"


class Line(NamedTuple):
    """A row of the table: in which file and row its number is, and what it should be."""

    label: str
    file: str
    where: dict[str, Any]
    value: str | Callable[[Mapping[str, Any]], float]
    """Name of the number in its row, or a function of the row."""
    target: float
    is_least: bool = False
    """The number should be the target or more, not the target or less."""


def beyond_products(row: Mapping[str, Any]) -> float:
    """CPU milliseconds here without those of the matrix products that no way can do without."""
    return row["cost"]["here"] - row["products_cpu_ms"]


def share_of_bound(row: Mapping[str, Any]) -> float:
    """Speed-up over what it would be if every token cost the same."""
    return row["speed_up"] / row["tokens_ratio"]


LINES = [
    Line("`import verl`, CPU s", "startup", {"what": "import verl"}, "cpu_s", 0.3),
    Line("`--help`, CPU s", "startup", {"what": "--help"}, "cpu_s", 0.3),
    Line("a misspelt key, CPU s", "startup", {"what": "misspelt key"}, "cpu_s", 0.3),
    Line("a command of one step, local, CPU s", "startup", {"what": "first step, local"}, "cpu_s", 3),
    Line("the same with Ray, CPU s", "startup", {"what": "first step, ray"}, "cpu_s", 8),
    Line("GRPO step, CPU s", "step", {"what": "2.5M"}, "cpu_s_a_step", 1.1),
    Line("GRPO step, CPU ms a token", "step", {"what": "SmolLM2"}, "cpu_ms_a_token", 9),
    Line("to 2 workers and back, local, ms", "dispatch", {"controller": "local", **WIDE}, "wall_ms", 8),
    Line("the same with Ray, ms", "dispatch", {"controller": "ray", **WIDE}, "wall_ms", 8),
    Line("bytes a token of a GRPO step, generation aside", "dispatch", GRPO_CALLS, "total", 12),
    Line("bytes a token of a PPO step", "dispatch", PPO_CALLS, "total", 12),
    Line("CPU ms of the driver for the calls of that GRPO step", "dispatch", GRPO_CALLS, "driver_cpu_ms", 30),
    Line("CPU s of the driver a step, workers simulated", "scale", LARGEST, "driver_cpu_s", 1),
    Line("the same on several nodes, CPU s", "scale", {**LARGEST, "nodes": 64}, "driver_cpu_s", 1),
    Line("weight sync over a copy, hf, fp32", "rollout", {"engine": "hf", **SYNC_FP32}, "sync_over_copy", 2),
    Line("the same of fp32 weights into bf16", "rollout", {"engine": "hf", **SYNC_BF16}, "sync_over_copy", 2),
    Line("weight sync over a copy, vLLM, fp32", "rollout", {"engine": "vllm", **SYNC_FP32}, "sync_over_copy", 2),
    Line("the same of fp32 weights into bf16", "rollout", {"engine": "vllm", **SYNC_BF16}, "sync_over_copy", 2),
    Line("vLLM's seeds of samples, share added, fp32", "rollout", {"rows": 64, **SEEDS_FP32}, "over_unseeded", 0.03),
    Line("the same in bf16", "rollout", {"rows": 64, **SEEDS_BF16}, "over_unseeded", 0.03),
    Line("prefix sharing, share of its bound", "packing", {"name": "shared"}, share_of_bound, 0.9, True),
    Line("log-probs and entropy, CPU ms beyond the product", "peers", {"what": LOG_PROBS}, beyond_products, 95),
    Line("GAE, CPU ms", "algorithms", {"name": "gae", **WIDE}, "cpu_ms", 4),
    Line("policy loss and its gradient, CPU ms", "algorithms", {"name": "policy loss,", **WIDE}, "cpu_ms", 4),
    Line("the same without padding, CPU ms", "algorithms", {"name": "policy loss without", **WIDE}, "cpu_ms", 4),
    Line("GRPO advantages, CPU ms", "algorithms", {"name": "grpo", **WIDE}, "cpu_ms", 4),
    Line(
        "GSM8K rewards, CPU ms of the driver",
        "rewards",
        {"what": "rewards of a batch, GSM8K, in a sandbox"},
        "driver_cpu_ms",
        25,
    ),
    Line(
        "sandbox of reward functions, ms added to a sample",
        "rewards",
        {"what": "nothing, sandbox of 1"},
        "added_ms_a_sample",
        2,
    ),
    Line("most work of a rank over the mean", "balance", {"rows": 8192, "ranks": 64}, "by_cost", 1.005),
    Line("dividing rows, CPU ms", "balance", {"rows": 65536, "ranks": 512}, "cpu_ms", 200),
]


def table() -> str:
    """Markdown; a missed target is bold, and what no saved result has is said to be not measured."""
    return grid(["", WORK, "measured", "target", "load"], [_cells(line) for line in LINES])


def _cells(line: Line) -> list[str]:
    row = _lookup(line)
    if row is None:
        return [line.label, "", "not measured", f"{line.target:g}", ""]
    value = line.value(row) if callable(line.value) else row[line.value]
    value = value["min"] if isinstance(value, dict) else value
    is_met = value >= line.target if line.is_least else value <= line.target
    target = f"{line.target:g}" if is_met else f"**{line.target:g}**"
    shown = digits(value) if value >= 100 or 0.95 < value / line.target < 1.05 else f"{value:.2g}"
    result = load(line.file)
    return [line.label, work_of(row), shown, target, load_words({"load": row.get("load") or result["load"]})]


def work_of(row: Mapping[str, Any]) -> str:
    """Return a row's work in words, or its counts where a script of the past wrote these alone."""
    counts = {name: row[name] for name in ("rows", "width", "tokens", "ranks") if name in row}
    return row.get("work", work_words(counts))


def _lookup(line: Line) -> dict[str, Any] | None:
    fitting = (
        row
        for row in load_rows(line.file)
        if all(_fits(row.get(key), expected) for key, expected in line.where.items())
    )
    return next(fitting, None)


def _fits(value: Any, expected: Any) -> bool:
    """Texts may continue after the expected one, not to another option: ``first step, local`` is the first such row."""
    return str(value).startswith(expected) if isinstance(expected, str) else value == expected
