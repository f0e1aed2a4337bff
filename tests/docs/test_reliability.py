"""docs/reliability.md: its exit codes are those of the code, and what holds a promise exists."""

import re
from pathlib import Path

from verl.utils.exit_codes import ExitCode

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reliability.md").read_text()


def test_the_table_has_every_exit_code_and_its_class():
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", PAGE, re.M)
    assert [(int(code), about) for code, about in rows] == [(int(code), code.about) for code in ExitCode]


def test_every_promise_has_a_mechanism_and_tests_that_exist():
    rows = [line for line in PAGE.split("## Promises")[1].splitlines()[4:] if line]
    for row in rows:
        _, promise, mechanism, tests, _ = (cell.strip() for cell in row.split("|"))
        paths = re.findall(r"`((?:verl|tests)/[^`]+)`", f"{mechanism} {tests}")
        assert promise and mechanism and "tests/" in tests, row
        assert all((ROOT / path).exists() for path in paths), row
