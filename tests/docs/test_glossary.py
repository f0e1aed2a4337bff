"""docs/glossary.md: every word's address exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/glossary.md").read_text()
ROWS = re.findall(r"^\| ([^|]+) \| [^|]+ \| `([^`|]+)`(?:: `([^`|]+)`)? \|$", PAGE, re.M)


def test_there_are_thirty_words_in_alphabetical_order():
    words = [word for word, _, _ in ROWS]
    assert len(words) >= 30 and words == sorted(words)


@pytest.mark.parametrize("word, path, name", ROWS)
def test_a_word_is_where_the_glossary_says(word, path, name):
    place = ROOT / "verl" / path
    assert place.exists(), f"verl/{path} of {word!r}"
    assert not name or re.search(rf"\b{name}\b", place.read_text()), f"{name} in verl/{path}"
