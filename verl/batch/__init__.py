"""Rows of a batch: stored, compared, divided over ranks, balanced. ``DataProto`` is in ``verl/protocol.py``.

The limits of micro-batches are here, so that the config can use them without importing torch.
"""

from typing import NamedTuple


class MicroBatching(NamedTuple):
    """Limits of a micro-batch: a number of rows, or a token budget. Neither set: everything at once."""

    size: int | None = None
    """Rows of one micro-batch on one device."""
    max_tokens: int | None = None
    """Tokens of one micro-batch on one device: valid ones where rows are packed, else rows times the longest row."""


WHOLE = MicroBatching()
"""Everything in one micro-batch."""
