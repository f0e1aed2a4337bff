"""The tables of benchmarks/README.md and of docs/, from the saved results: ``python -m benchmarks.table [--readme]``"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import render, targets

ROOT = Path(__file__).parents[1]
README = "benchmarks/README.md"
TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "table": (README, targets.table),
    "peers": (README, render.peers),
    "startup": (README, render.startup),
    "scale": (README, render.scale),
    "rollout": (README, render.rollout),
    "soak": (README, render.soak),
    "methods": (README, render.methods),
    "packing": (README, render.packing),
    "rewards": (README, render.rewards),
    "data": (README, render.data),
    "scorers": (README, render.scorers),
    "long_tails": ("docs/long_tails.md", render.long_tails),
    "serving": ("docs/async.md", render.serving),
    "disjoint": ("docs/disjoint.md", render.disjoint),
}
"""Name between the marks -> document, and what makes the table."""


def between_marks(name: str) -> re.Pattern[str]:
    """The mark that names a table, the table, and the mark of its end."""
    return re.compile(rf"(<!-- {name}: python -m benchmarks.table --readme -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def fill(text: str) -> str:
    """Put each table between the marks that name it."""
    for name, (_, made) in TABLES.items():
        text = between_marks(name).sub(lambda found, made=made: f"{found[1]}{made()}\n{found[3]}", text)
    return text


def main() -> None:
    if "--readme" not in sys.argv:
        print(*(made() for _, made in TABLES.values()), sep="\n\n")
        return
    for document in {document for document, _ in TABLES.values()}:
        path = ROOT / document
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
