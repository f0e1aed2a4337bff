"""Equal work here and in other trainers, in turns on one machine.

    python -m benchmarks.peers --trl --verl 0.5.0 [--save]

makes an environment for each peer from the package index (kept in ``--folder``), gives all sides the same model,
prompts, reward, lengths and settings, and prints ratios and JSON. A ratio is printed only where the counts agree: the
tokens of every step, or the sum of what a function computed; else the row says why there is none, and the exit code of
the command is 1. Costs are CPU seconds of the whole process tree, user and
system, one thread each; of all turns the least counts, since what else the machine does can only add. ``--save`` writes
``benchmarks/results/peers.json``, from which ``python -m benchmarks.table`` makes the README's table.

A step is GRPO with one optimizer step, precision as each side ships it, gradient checkpointing off, the micro-batch the
whole batch, and every response exactly as long as allowed. Other keys of this project's runs: ``--option KEY=VALUE``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure import commit, work_words
from benchmarks.peers.environments import interpreter, versions
from benchmarks.peers.work import STEPS, make, verl_keys

ROOT = Path(__file__).resolve().parents[2]
RUNNERS = Path(__file__).parent / "runners"
RESULT = ROOT / "benchmarks" / "results" / "peers.json"
HERE, RAY = "here", "here, Ray"
AGAINST = {"trl": HERE, "verl": RAY}
"""Whom a peer is compared with: verl 0.5 always trains through Ray."""
QUIET = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_AUTH_MODE": "disabled",
    "WANDB_MODE": "offline",
}


def run(command: list[Any], environment: dict[str, str], cwd: Path) -> None:
    words = [str(word) for word in command]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # or a peer imports ours
    done = subprocess.run(words, env={**inherited, **QUIET, **environment}, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words[:3])} ... ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
        )


def run_step(side: str, python: Path, work: dict[str, Any], folder: Path, options: list[str]) -> list[dict[str, Any]]:
    """Run one command of a side to its end; return its marks, one a step."""
    marks, output = folder / "marks.jsonl", folder / f"output-{side.replace(', ', '-')}"
    marks.unlink(missing_ok=True)
    environment = {"PEERS_MARKS": str(marks), "PEERS_ROWS": str(work["prompts"] * work["n"])}
    environment["PEERS_NEW_TOKENS"] = str(work["new_tokens"])
    if side == "trl":
        description = folder / "trl.json"
        description.write_text(json.dumps({**work, "output": str(output)}))
        run([python, RUNNERS / "grpo_trl.py", description], environment, folder)
    else:
        keys = verl_keys(work, output)
        if side == "verl":
            environment["PEERS_VERL_05"] = "1"
        else:
            environment["PYTHONPATH"] = str(ROOT)
            keys["trainer.controller"] = "ray" if side == RAY else "local"
            keys["actor_rollout_ref.rollout.ignore_eos"] = "true"
        words = [f"{key}={value}" for key, value in keys.items()]
        run([python, RUNNERS / "grpo_verl.py", *words, *([] if side == "verl" else options)], environment, folder)
    return [json.loads(line) for line in marks.read_text().splitlines()]


def step_costs(marks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the costs of one run: to the end of step 1, and of the cheapest later step; and its counts."""
    later = [after["cpu_s"] - before["cpu_s"] for before, after in zip(marks, marks[1:], strict=False)]
    return {
        "first_step_cpu_s": marks[0]["cpu_s"],
        "step_cpu_s": min(later),
        "step_cpu_ms_a_token": min(1000 * cost / mark["tokens"] for cost, mark in zip(later, marks[1:], strict=True)),
        "counts": [[mark["step"], mark["tokens"], mark["response_tokens"]] for mark in marks],
        "entropy": round(marks[0]["entropy"], 2),
    }


def compared(what: str, work: str, unit: str, costs: dict[str, float], counts: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the ratio of each peer to this project, or with the reason why there is none.

    Args:
        counts: of each side what tells that it did the same work, as `is_equal` compares it.
    """
    ratios: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for side in costs.keys() - {HERE}:
        own = AGAINST[side] if AGAINST.get(side) in costs else HERE
        if not is_equal(counts[own], counts[side]):
            reasons[side] = f"not the same work, so there is no ratio: {own} {counts[own]}, {side} {counts[side]}"
        elif side in AGAINST:
            ratios[side] = costs[side] / costs[own]
    row = {"what": what, "work": work, "unit": unit, "cost": costs, "ratio": ratios, "counts": counts}
    return row | ({"unequal": reasons} if reasons else {})


def is_equal(own: Any, other: Any) -> bool:
    """Compare counts exactly, and sums of results to a ten-thousandth, which is the order of their additions."""
    if isinstance(own, list | tuple) and isinstance(other, list | tuple):
        return len(own) == len(other) and all(map(is_equal, own, other))
    if isinstance(own, float) and isinstance(other, float):
        return abs(own - other) <= 1e-4 * abs(own)
    return own == other


def measure_steps(name: str, sides: dict[str, Path], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of a step and of a command to its first step: every side in turn, ``--repeat`` times."""
    step = STEPS[name]
    if args.steps:
        step = dataclasses.replace(step, steps=args.steps)
    folder = (args.folder / f"work-{name}").absolute()
    work = make(step, folder, args.model)
    best: dict[str, dict[str, Any]] = {}
    for turn in range(args.repeat):
        for side, python in sides.items():
            costs = step_costs(run_step(side, python, work, folder, args.option))
            say(f"{name}, turn {turn + 1}, {side}: {json.dumps(costs)}")
            known = best.setdefault(side, costs)
            for key in ("first_step_cpu_s", "step_cpu_s", "step_cpu_ms_a_token"):
                known[key] = min(known[key], costs[key])
    counts = {side: costs["counts"] for side, costs in best.items()}
    words = step.words() if not args.model else step.words().replace(step.model, Path(args.model).name)
    words += f", {counts[HERE][-1][1]:,} tokens in all"

    def row(what: str, unit: str, key: str) -> dict[str, Any]:
        return compared(what, words, unit, {side: costs[key] for side, costs in best.items()}, counts)

    rows = [row("GRPO step", "CPU s", "step_cpu_s"), row("GRPO step", "CPU ms a token", "step_cpu_ms_a_token")]
    if name == "tiny":
        rows.append(row("command to the end of step 1", "CPU s", "first_step_cpu_s"))
    return rows


def measure_functions(sides: dict[str, Path], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of single functions, which have the same names here and in verl."""
    sides = {HERE: sides[HERE], "verl": sides["verl"]}
    folder = (args.folder / "work-functions").absolute()
    make(STEPS["tiny"], folder, None)
    best: dict[str, list[dict[str, Any]]] = {}
    for turn in range(args.repeat):
        for side, python in sides.items():
            path = [str(RUNNERS), *([str(ROOT)] if side == HERE else [])]
            command = [python, RUNNERS / "functions.py", folder / "found.json", folder / "model" / "tokenizer.json"]
            run(command, {"PYTHONPATH": os.pathsep.join(path)}, folder)
            found = json.loads((folder / "found.json").read_text())
            say(f"functions, turn {turn + 1}, {side}: {json.dumps(found)}")
            known = best.setdefault(side, found)
            for before, now in zip(known, found, strict=True):
                for key in {"cpu_ms", "wall_ms", "products_cpu_ms"} & now.keys():
                    before[key] = min(before[key], now[key])
    rows = []
    theirs = {row["what"]: row for row in best["verl"]}
    for here in best[HERE]:
        found = {HERE: here, **({"verl": theirs[here["what"]]} if here["what"] in theirs else {})}
        rows.append(function_row(found, equal_to=next((r for r in best[HERE] if r["what"] == here.get("of")), here)))
    return rows


def function_row(found: dict[str, dict[str, Any]], equal_to: dict[str, Any]) -> dict[str, Any]:
    """Return the row of one function.

    Args:
        found: what each side measured.
        equal_to: this project's row of the public form, which another form must compute the same as.
    """
    here = found[HERE]
    key = "cpu_ms" if "cpu_ms" in here else "wall_ms"
    unit = key.replace("cpu_ms", "CPU ms").replace("wall_ms", "ms")
    counts = {side: [row["work"], row["check"]] for side, row in found.items()}
    costs = {side: row[key] for side, row in found.items()}
    row = compared(here["what"], work_words(here["work"]), unit, costs, counts)
    if not is_equal(expected := [equal_to["work"], equal_to["check"]], counts[HERE]):
        reason = f"not the same result as {equal_to['what']!r}: {expected}, and {counts[HERE]}"
        row["unequal"] = {HERE: reason}
    if "products_cpu_ms" in here:
        row["products_cpu_ms"] = min(row["products_cpu_ms"] for row in found.values())
    return row


def save(result: dict[str, Any]) -> None:
    """Write the result; parts that were not measured now stay if commit and versions are the same."""
    rows = result["rows"]
    if RESULT.exists():
        saved, same = json.loads(RESULT.read_text()), ("commit", "versions", "cores", "options here")
        if all(saved.get(key) == result[key] for key in same):
            measured = {row["part"] for row in rows}
            rows = rows + [row for row in saved["rows"] if row["part"] not in measured]
    order = [*STEPS, "functions"]
    rows = sorted(rows, key=lambda row: order.index(row["part"]))
    RESULT.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", nargs="?", const="1.16.0", metavar="VERSION", help="beside TRL, 1.16.0 unless said")
    parser.add_argument("--verl", nargs="?", const="0.5.0", choices=["0.5.0"], help="beside verl of the index")
    parser.add_argument("--only", default="tiny,smollm2,functions", help="of tiny, smollm2, functions; with commas")
    parser.add_argument("--model", help="folder of a Hugging Face model in the place of the random ones")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "peers", help="environments and outputs")
    parser.add_argument("--repeat", type=int, default=2, help="turns")
    parser.add_argument("--steps", type=int, help="of each run")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of this project's runs")
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    sides = {HERE: Path(sys.executable), RAY: Path(sys.executable)}
    for peer in ("trl", "verl"):
        if release := getattr(args, peer):
            sides[peer] = interpreter(peer, release, args.folder)
    result: dict[str, Any] = {
        "benchmark": "peers",
        "commit": commit(),
        "versions": {side: versions(python, args.folder) for side, python in sides.items() if side != RAY},
        "cores": os.cpu_count(),
        "options here": args.option,
        "rows": [],
    }
    for name in args.only.split(","):
        before = os.getloadavg()[0]
        if name != "functions":
            rows = measure_steps(name, sides, args)
        else:
            rows = measure_functions(sides, args) if "verl" in sides else []
        load = [round(before, 1), round(os.getloadavg()[0], 1)]
        result["rows"] += [{"part": name, **row, "turns": args.repeat, "load": load} for row in rows]
        if args.save:
            save(result)
    print(json.dumps(result, indent=1))
    for row in result["rows"]:
        name = f"{row['what']}, {row['unit']} ({row['work']})"
        for side, ratio in row["ratio"].items():
            own = AGAINST[side] if AGAINST[side] in row["cost"] else HERE
            print(f"{ratio:6.2f}  {side} / {own}: {name}")
        for side, reason in row.get("unequal", {}).items():
            print(f"     -  {side}: {name}: {reason}")
    return int(any("unequal" in row for row in result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
