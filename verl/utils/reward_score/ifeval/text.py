"""Words and sentences of a text."""

import re

_WORD = re.compile(r"\w+(?:['’.-]\w+)*")
_ABBREVIATION = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|Inc|Ltd|Co|Corp|Fig|No|approx|e\.g|i\.e|a\.m|p\.m|U\.S|[A-Z])\.(?=\s|$)"
)
_END = re.compile(r"[.!?。！？।]+[\"'”’)\]*_]*(?=\s|$)|[。！？।]")


def words(text: str) -> list[str]:
    """Runs of letters and digits; what an apostrophe, hyphen or inner full stop joins is one word."""
    return _WORD.findall(text)


def count_words(text: str) -> int:
    return len(re.findall(r"\w+", text))


def count_sentences(text: str) -> int:
    """Pieces that end in a full stop, a question or an exclamation mark, or with the paragraph."""
    text = _ABBREVIATION.sub(lambda found: found[0].replace(".", ""), text)
    text = re.sub(r"^\s*\d+\.\s", "", text, flags=re.MULTILINE)
    pieces = (piece for paragraph in re.split(r"\n\s*\n", text) for piece in _END.split(paragraph))
    return sum(re.search(r"\w", piece) is not None for piece in pieces)
