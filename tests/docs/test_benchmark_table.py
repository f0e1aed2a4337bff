"""The tables of benchmarks/README.md say what the saved results say."""

from pathlib import Path

import pytest

from benchmarks.table import methods, table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("made", [table, methods])
def test_the_tables_of_benchmarks_are_those_of_the_saved_results(made):
    assert made() in (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8"), "python -m benchmarks.table"
