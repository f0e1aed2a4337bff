"""How a forward pass over many rows is cut. Apart, so that the config can name it without importing torch."""

from typing import NamedTuple


class MicroBatching(NamedTuple):
    """How rows are cut into forward passes: by count, or by a token budget. Neither set: everything at once."""

    size: int | None = None
    """Rows of one micro-batch on one device."""
    max_tokens: int | None = None
    """Tokens of one micro-batch on one device: real ones where rows are packed, else rows times the longest row."""


WHOLE = MicroBatching()
"""Everything in one micro-batch."""
