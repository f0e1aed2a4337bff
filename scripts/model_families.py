"""The table of docs/models.md: what each family of models does here, found out on tiny random ones.

python scripts/model_families.py              judge all (minutes), write benchmarks/results/families.json and the page
python scripts/model_families.py qwen3 mamba  judge these, and leave the others as they are
python scripts/model_families.py --page       write the page from the JSON
python scripts/model_families.py --check      write nothing, fail if the page says something else than the JSON
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":  # works from a checkout that is not installed
    sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "benchmarks" / "results" / "families.json"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
SHORT = (
    (r"refused: .*has layers of (?:the kind|type) ([\w, ]+), (?:through|which).*", r"refused: layers of type \1"),
    (
        r"refused: .*(?:has layers that|recurrent layers, which) carry a state.*",
        "refused: carries a state from token to token",
    ),
    (r"refused: .*has (?:an attention of its own|its own attention code).*", "refused: attention of its own"),
    (r"refused: .*has a mask, a position bias or a cache of its own.*", "refused: a mask of its own"),
    (r"refused: .*does not score rows packed together.*", "refused: rows mix"),
    (
        r"refused: .*(?:attends to chosen parts|chunked or sparse attention).*",
        "refused: attends to chosen parts of a row",
    ),
    (r"right: .*random in modules of the class (.+?); they.*", r"right; inference mode for \1"),
    (r"right: .*with its cache, so every token.*", "right; without a cache, slow"),
    (r"right: .*every micro-batch has one row.*", "right; one row a micro-batch"),
)
"""Verdict -> its text in the table."""


def judged(names: list[str]) -> dict[str, dict[str, str]]:
    """Verdicts of these families by what was judged."""
    from tests.support.families import JUDGES, judge, make_family

    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            make_family(folder, name)
            found[name] = {how: judge(folder, how).replace(folder, "MODEL") for how in JUDGES}
        print(f"{name}: {', '.join(verdict.split(':')[0] for verdict in found[name].values())}", flush=True)
    return found


def table(results: dict[str, dict[str, str]]) -> str:
    """The table and its sums, in Markdown."""
    columns = list(next(iter(results.values())))
    lines = [f"| model type | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]
    lines += [f"| {name} | {' | '.join(map(_cell, row.values()))} |" for name, row in sorted(results.items())]
    sums = [f"{how} {_counted([row[how] for row in results.values()])}" for how in columns]
    return "\n".join([f"{len(results)} families: {'; '.join(sums)}.", "", *lines])


def _cell(verdict: str) -> str:
    verdict = " ".join(verdict.split())
    if "leaves out" in verdict:
        left = re.findall(r"([\w.]+) \((?:is|holds)", verdict.partition("put on:")[2])
        return f"right; not {', '.join(left)}"
    for pattern, short in SHORT:
        if re.fullmatch(pattern, verdict):
            return re.sub(pattern, short, verdict)
    return verdict[:120]


def _counted(verdicts: list[str]) -> str:
    kinds = {"right": 0, "mended": 0, "refused": 0, "WRONG": 0}
    for verdict in verdicts:
        kind = verdict.split(":")[0]
        kinds["mended" if kind == "right" and verdict != kind else kind] += 1
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)


def filled(page: str, results: dict[str, dict[str, str]]) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str]) -> int:
    """Command line; returns the exit status."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if "--check" in arguments:
        return int(PAGE.read_text() != filled(PAGE.read_text(), results))
    if "--page" not in arguments:
        from tests.support.families import FAMILIES

        results |= judged(arguments or list(FAMILIES))
        results = {name: results[name] for name in sorted(results) if name in FAMILIES}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(filled(PAGE.read_text(), results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
