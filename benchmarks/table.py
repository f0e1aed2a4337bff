"""The tables of benchmarks/README.md, from the saved results: ``python -m benchmarks.table [--readme]``"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
WIDE = {"rows": 1024, "width": 4096}


class Line(NamedTuple):
    """A row of the table: where its number stands, on what work, and what it should be."""

    label: str
    work: str  # with names of the saved row in braces
    file: str
    where: dict[str, Any]
    value: str
    target: float


FIRST_STEP = "4 prompts x 4 responses of at most 12 tokens, 64-wide model"
BATCH = "{rows} x {width}, {tokens:,} tokens"
SENT = "{rows} x {width}, {real_MB:.0f} MB of tokens"

STEP = "{rows} x {width}, {tokens:,} tokens, 2 ranks"
CALLS = {"what": "bytes per real token a step", "controller": "local"}
GRPO_CALLS = {**CALLS, "kind": "grpo"}
SCALE = "{rows:,} rows of {tokens_a_row:,.0f} tokens, {ranks} ranks"
LARGEST = {"rows": 8192, "ranks": 512}

LINES = [
    Line("`import verl`, CPU s", "", "startup", {"what": "import verl"}, "cpu_s", 0.3),
    Line("`--help`, CPU s", "", "startup", {"what": "--help"}, "cpu_s", 0.3),
    Line("a misspelt key, CPU s", "", "startup", {"what": "misspelt key"}, "cpu_s", 0.3),
    Line("a command of one step, local, CPU s", FIRST_STEP, "startup", {"what": "first step, local"}, "cpu_s", 3),
    Line("the same with Ray, CPU s", FIRST_STEP, "startup", {"what": "first step, ray"}, "cpu_s", 8),
    Line("GRPO step, CPU s", "{what}; {tokens:,} tokens", "step", {"what": "2.5M"}, "cpu_s_a_step", 1.1),
    Line("GRPO step, CPU ms a token", "{what}; {tokens:,} tokens", "step", {"what": "SmolLM2"}, "cpu_ms_a_token", 9),
    Line("to 2 workers and back, local, ms", SENT, "dispatch", {"controller": "local", **WIDE}, "wall_ms", 8),
    Line("the same with Ray, ms", SENT, "dispatch", {"controller": "ray", **WIDE}, "wall_ms", 8),
    Line("bytes a token of a GRPO step, generation aside", STEP, "dispatch", GRPO_CALLS, "total", 12),
    Line("bytes a token of a PPO step", STEP, "dispatch", {**CALLS, "kind": "ppo"}, "total", 12),
    Line("CPU ms of the driver for the calls of that GRPO step", STEP, "dispatch", GRPO_CALLS, "driver_cpu_ms", 30),
    Line("CPU s of the driver a step, workers simulated", SCALE, "scale", LARGEST, "driver_cpu_s", 1),
    Line("GAE, CPU ms", BATCH, "algorithms", {"name": "gae", **WIDE}, "cpu_ms", 4),
    Line("policy loss and its gradient, CPU ms", BATCH, "algorithms", {"name": "policy loss,", **WIDE}, "cpu_ms", 4),
    Line(
        "the same without padding, as in a run, CPU ms",
        BATCH,
        "algorithms",
        {"name": "policy loss without", **WIDE},
        "cpu_ms",
        4,
    ),
    Line("GRPO advantages, CPU ms", BATCH, "algorithms", {"name": "grpo", **WIDE}, "cpu_ms", 4),
    Line(
        "sandbox of reward functions, ms added to a sample",
        "1,024 responses of 300 characters",
        "rewards",
        {"what": "nothing, sandbox of 1"},
        "added_ms_a_sample",
        2,
    ),
    Line(
        "most work of a rank over the mean",
        "8k rows, 64 ranks",
        "balance",
        {"rows": 8192, "ranks": 64},
        "by_cost",
        1.005,
    ),
    Line("dividing rows, CPU ms", "64k rows, 512 ranks", "balance", {"rows": 65536, "ranks": 512}, "cpu_ms", 200),
]


def table() -> str:
    """Markdown; a missed target is bold."""
    lines = ["| | the work | measured | target |", "|---|---|---|---|"]
    for line in LINES:
        row = _lookup(line)
        value = row[line.value]["min"] if isinstance(row[line.value], dict) else row[line.value]
        target = f"{line.target:g}" if value <= line.target else f"**{line.target:g}**"
        shown = f"{value:.3g}" if 0.95 < value / line.target < 1.05 else f"{value:.2g}"
        lines.append(f"| {line.label} | {line.work.format(**row)} | {shown} | {target} |")
    return "\n".join(lines)


def methods() -> str:
    """Markdown: every estimator and every loss, as ``benchmarks.algorithms --every`` saved them."""
    rows = json.loads((RESULTS / "algorithms_every.json").read_text())["rows"]
    lines = ["| | CPU ms | copies of its floats | MB above the start |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["kind"], row["name"])):
        cost, copies, peak = row["cpu_ms"], row["ratio_to_copy"], row["peak_extra_mb"]
        lines.append(f"| {row['kind']} `{row['name']}` | {cost:.0f} | {copies:.1f} | {peak:.0f} |")
    return "\n".join(lines)


def peers() -> str:
    """Markdown: the same work here and in other trainers, as ``benchmarks.peers`` saved it."""
    saved = json.loads((RESULTS / "peers.json").read_text())
    versions, known = saved["versions"], {"trl": "TRL", "verl": "verl"}
    sides = [side for side in known if side in versions]
    heads = ["", "the work", "unit", "here", "here, Ray", *(f"{known[side]} {versions[side][side]}" for side in sides)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in saved["rows"]:
        cost, ratio = row["cost"], row["ratio"]
        cells = [_digits(cost[side]) if side in cost else "" for side in ("here", "here, Ray")]
        cells += [f"{_digits(cost[side])} ({ratio[side]:.1f}x)" if side in cost else "" for side in sides]
        lines.append("| " + " | ".join([row["what"], row["work"], row["unit"], *cells]) + " |")
    used = ", ".join(f"{name} {versions['here'][name]}" for name in ("torch", "transformers", "python"))
    loads = [load for row in saved["rows"] for load in row["load"]]
    turns = sorted({row["turns"] for row in saved["rows"]})
    cores = f"{saved['cores']} cores with a load of {min(loads):g} to {max(loads):g}"
    lines += ["", f"The least of {' or '.join(map(str, turns))} turn{'s' * (turns != [1])} on {cores}; {used}"]
    lines[-1] += f" (verl: transformers {versions['verl']['transformers']})." if "verl" in versions else "."
    return "\n".join(lines)


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _lookup(line: Line) -> dict[str, Any]:
    rows = json.loads((RESULTS / f"{line.file}.json").read_text())["rows"]
    return next(row for row in rows if all(_fits(row.get(key), expected) for key, expected in line.where.items()))


def _fits(value: Any, expected: Any) -> bool:
    """Texts may continue after the expected one, not to another option: ``first step, local`` is the first such row."""
    return str(value).startswith(expected) if isinstance(expected, str) else value == expected


TABLES = {"table": table, "peers": peers, "methods": methods}


def fill(text: str) -> str:
    """Put each table between the marks that name it."""
    for name, made in TABLES.items():
        between = re.compile(rf"(<!-- {name}: python -m benchmarks.table --readme -->\n).*?(<!-- end -->)", re.DOTALL)
        text = between.sub(lambda found, made=made: f"{found[1]}{made()}\n{found[2]}", text)
    return text


if __name__ == "__main__":
    if "--readme" in sys.argv:
        readme = Path(__file__).parent / "README.md"
        readme.write_text(fill(readme.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(*(made() for made in TABLES.values()), sep="\n\n")
