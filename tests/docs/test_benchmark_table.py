"""The table of benchmarks/README.md says what the saved results say."""

from pathlib import Path

from benchmarks.table import table

ROOT = Path(__file__).parents[2]


def test_the_table_of_benchmarks_is_that_of_the_saved_results():
    assert table() in (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8"), "python -m benchmarks.table"
