"""scripts/measure_code.py: what counts as code, as a comment, as a private word."""

from pathlib import Path

import pytest

from scripts import measure_code

SOURCE = '''"""A module: no code.

Two paragraphs.
"""

X = """
text is code
"""
"""But this documents X."""


def read(config: Any, told):  # a comment
    """One line."""
    # another
    return getattr(config, "cells", None) if config.strategy == "fsdp" else X
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "verl"
    folder.mkdir()
    (folder / "__init__.py").write_text("from verl.one import read\n")
    (folder / "one.py").write_text(SOURCE)
    return tmp_path


def test_docstrings_comments_and_blank_lines_are_no_code(package):
    counts = measure_code.measure(measure_code.read_package(package))
    assert (counts["modules"], counts["code lines"], counts["functions"]) == (2, 1 + 3 + 2, 1)
    assert counts["function length, greatest"] == 2
    assert counts["comment lines per 100"] == pytest.approx(100 * 2 / counts["lines"], abs=0.01)


def test_untyped_configs_backend_names_and_private_words_are_counted(package):
    counts = measure_code.measure(measure_code.read_package(package))
    assert counts["config: Any"] == counts["getattr and hasattr on configs"] == 1
    assert counts["comparisons with strategy or rollout.name outside the engines"] == 1
    assert counts["private words"] == 2  # told, cells
    assert counts["modules with one importer"] == 1


def test_a_folder_without_the_package_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no folder verl"):
        measure_code.main(["--at", str(tmp_path)])
