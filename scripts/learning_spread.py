"""Measure how far the learning tests' scores spread over seeds and instruction sets; write tests/learning-spread.json.

    python scripts/learning_spread.py                            all, five seeds, three instruction sets
    python scripts/learning_spread.py -k "remax or adapter" -m "learning and not ray"    some; the others' rows stay

The bounds in tests/support/learning.py are chosen from what it finds. The table of tests/README.md is written by it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SPREAD = ROOT / "tests" / "learning-spread.json"
README = ROOT / "tests" / "README.md"
LEVELS = ("DEFAULT", "AVX512_CORE", "AVX2")
BEGIN, END = "<!-- spread: written by scripts/learning_spread.py -->", "<!-- end of spread -->"


def measure(seed: int, level: str, options: list[str]) -> list[dict]:
    """Return the scores of the learning tests in one process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.jsonl"
        environment = {**os.environ, "VERL_TEST_SEED": str(seed), "VERL_LEARNING_RECORD": str(record)}
        if level != "DEFAULT":
            environment["ONEDNN_MAX_CPU_ISA"] = level
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "--timeout=3600", *options]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode not in (0, 5):
            print(done.stdout[-4000:], file=sys.stderr)
        lines = record.read_text().splitlines() if record.exists() else []
    return [{"isa": level, **json.loads(line)} for line in lines]


def merged(old: list[dict], new: list[dict]) -> list[dict]:
    """All rows, those measured again in place of the old."""
    rows = {(row["run"], row["isa"], row["seed"]): row for row in [*old, *new]}
    return [rows[key] for key in sorted(rows)]


def table(rows: list[dict], bounds: dict) -> str:
    """A line for each run: its bound, then the least, the mean and the greatest end score of each instruction set."""
    lines = ["| run | must start below | must end above | runs | " + " | ".join(LEVELS) + " |", "|---" * 7 + "|"]
    for name, bound in bounds.items():
        own = [row for row in rows if row["run"] == name]
        cells = []
        for level in LEVELS:
            last = [row["last"] for row in own if row["isa"] == level]
            cells.append(f"{min(last):.2f} {sum(last) / len(last):.2f} {max(last):.2f}" if last else "")
        lines.append(f"| {name} | {bound.first} | {bound.last} | {len(own)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(rows: list[dict]) -> None:
    """Write the rows, and the table of the README."""
    sys.path.insert(0, str(ROOT))
    from tests.support.learning import BOUNDS

    SPREAD.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    text = README.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    README.write_text(f"{before}{BEGIN}\n{table(rows, BOUNDS)}\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--isa", action="append", choices=LEVELS, help="repeatable; default: all")
    parser.add_argument("-m", dest="marks", default="learning", help="pytest's")
    parser.add_argument("-k", dest="words", default="", help="pytest's")
    parser.add_argument("tests", nargs="*", help="files")
    args = parser.parse_args()
    options = ["-m", args.marks, "-k", args.words, *args.tests]
    for seed in range(args.seeds):
        for level in args.isa or LEVELS:
            found = measure(seed, level, options)
            write(merged(json.loads(SPREAD.read_text()) if SPREAD.exists() else [], found))
            print(f"seed {seed}, {level}: " + ", ".join(f"{row['run']} {row['last']}" for row in found), flush=True)


if __name__ == "__main__":
    main()
