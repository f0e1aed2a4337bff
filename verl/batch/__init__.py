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
    together: int = 1
    """So many consecutive rows stay in one micro-batch: 2 for pairs. A number of rows that it does not divide ends with
    fewer."""


WHOLE = MicroBatching()
"""Everything in one micro-batch."""
