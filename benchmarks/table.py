"""The tables of benchmarks/README.md, from the saved results: ``python -m benchmarks.table``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
WIDE = {"rows": 1024, "width": 4096}


class Line(NamedTuple):
    """A row of the table: where its number stands, and what it should be."""

    label: str
    file: str
    where: dict[str, Any]
    value: str
    target: float


LINES = [
    Line("`import verl`, CPU s", "startup", {"what": "import verl"}, "cpu_s", 0.3),
    Line("`--help`, CPU s", "startup", {"what": "--help"}, "cpu_s", 0.3),
    Line("a misspelt key, CPU s", "startup", {"what": "misspelt key"}, "cpu_s", 0.3),
    Line("command to the end of step 1, local, CPU s", "startup", {"what": "first step, local"}, "cpu_s", 4),
    Line("the same with Ray, CPU s", "startup", {"what": "first step, ray"}, "cpu_s", 8),
    Line("GRPO step, 2.5M model, CPU s", "step", {"what": "2.5M"}, "cpu_s_a_step", 1.1),
    Line("GRPO step, SmolLM2-135M, CPU ms a token", "step", {"what": "SmolLM2"}, "cpu_ms_a_token", 9),
    Line("1024 x 4096 to 2 workers and back, local, ms", "dispatch", {"controller": "local", **WIDE}, "wall_ms", 8),
    Line("the same with Ray, ms", "dispatch", {"controller": "ray", **WIDE}, "wall_ms", 8),
    Line("GAE, 1024 x 4096, CPU ms", "algorithms", {"name": "gae", **WIDE}, "cpu_ms", 4),
    Line("policy loss and its gradient, CPU ms", "algorithms", {"name": "policy loss", **WIDE}, "cpu_ms", 4),
    Line("GRPO advantages, CPU ms", "algorithms", {"name": "grpo", **WIDE}, "cpu_ms", 4),
    Line(
        "sandbox of reward functions, ms added to a sample",
        "rewards",
        {"what": "nothing, sandbox of 1"},
        "added_ms_a_sample",
        2,
    ),
    Line("8k rows on 64 ranks, most work over the mean", "balance", {"rows": 8192, "ranks": 64}, "by_cost", 1.005),
    Line("64k rows divided among 512 ranks, CPU ms", "balance", {"rows": 65536, "ranks": 512}, "cpu_ms", 200),
]


def table() -> str:
    """Markdown; a missed target is bold."""
    lines = ["| | measured | target |", "|---|---|---|"]
    for line in LINES:
        value = _lookup(line)
        target = f"{line.target:g}" if value <= line.target else f"**{line.target:g}**"
        lines.append(f"| {line.label} | {value:.2g} | {target} |")
    return "\n".join(lines)


def methods() -> str:
    """Markdown: every estimator and every loss, as ``benchmarks.algorithms --every`` saved them."""
    rows = json.loads((RESULTS / "algorithms_every.json").read_text())["rows"]
    lines = ["| | CPU ms | copies of its floats | MB above the start |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["kind"], row["name"])):
        cost, copies, peak = row["cpu_ms"], row["ratio_to_copy"], row["peak_extra_mb"]
        lines.append(f"| {row['kind']} `{row['name']}` | {cost:.0f} | {copies:.1f} | {peak:.0f} |")
    return "\n".join(lines)


def _lookup(line: Line) -> float:
    rows = json.loads((RESULTS / f"{line.file}.json").read_text())["rows"]
    row = next(row for row in rows if all(_fits(row[key], expected) for key, expected in line.where.items()))
    value = row[line.value]
    return value["min"] if isinstance(value, dict) else value


def _fits(value: Any, expected: Any) -> bool:
    """Texts may continue after the expected one, not to another option: ``first step, local`` is the first such row."""
    return value.startswith(expected) if isinstance(expected, str) else value == expected


if __name__ == "__main__":
    print(table(), methods(), sep="\n\n")
