"""The table of families is the one that was measured."""

from scripts.model_families import main


def test_the_page_says_what_was_measured():
    assert main(["--check"]) == 0
