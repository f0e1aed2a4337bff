"""What happens to a batch between the caller and the split over ranks, and back: columns left behind, rows padded.

The one place where an uneven batch is made even. Works on the arguments of a call; knows no ranks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

_MASKS = ("response_mask", "loss_mask")
"""Columns that say which tokens count; zero on padding rows, so that these train nothing."""


class Padding(NamedTuple):
    """Rows of a batch before and after padding."""

    real: int
    padded: int


def map_batches(fn: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Apply ``fn`` to the arguments that are DataProtos."""
    from verl.protocol import DataProto

    def each(value):
        return fn(value) if isinstance(value, DataProto) else value

    return tuple(map(each, args)), {name: each(value) for name, value in kwargs.items()}


def keep_columns(data, reads: tuple[str, ...] | None):
    """The columns named in ``reads`` that are there (None: all), as a new DataProto; ``meta_info`` stays whole."""
    if reads is None:
        return data.select()
    return data.select(
        [name for name in reads if name in data], [name for name in reads if name in data.non_tensor_batch]
    )


def pad_rows(args: tuple, kwargs: dict, parts: int) -> tuple[tuple, dict, Padding | None]:
    """Make every DataProto of a call divisible by ``parts``, with copies of its first rows that train nothing.

    Returns the arguments and the row counts, None if nothing was added.

    Raises:
        ValueError: the batches of one call differ in length.
    """
    lengths = set()
    map_batches(lambda data: lengths.add(len(data)), args, kwargs)
    lengths.discard(0)
    if len(lengths) > 1:
        raise ValueError(
            f"the batches of one call have {sorted(lengths)} rows: all must have as many, to be cut alike."
        )
    if not lengths or (rows := lengths.pop()) % parts == 0:
        return args, kwargs, None
    args, kwargs = map_batches(lambda data: _pad(data, parts) if len(data) else data, args, kwargs)
    return args, kwargs, Padding(rows, rows + -rows % parts)


def drop_padding(result: Any, padding: Padding | None) -> Any:
    """Take the padding rows off a result that has them; anything else is returned as it is."""
    from verl.protocol import DataProto, unpad_dataproto

    if padding is None or not isinstance(result, DataProto) or len(result) != padding.padded:
        return result
    return unpad_dataproto(result, padding.padded - padding.real)


def _pad(data, parts: int):
    from verl.protocol import pad_dataproto_to_divisor

    padded, _ = pad_dataproto_to_divisor(data, parts)
    for name in _MASKS:
        if name in padded:
            padded.put(name, _silenced(padded, name, len(data)))
    return padded


def _silenced(data, name: str, first: int):
    """Column ``name`` with zeros from row ``first`` on, packed if it can be."""
    from verl.protocol import DataProtoError

    try:
        column = data.ragged(name)
    except DataProtoError:  # nothing sent along says where its real cells are
        column = data.column(name).clone()
        column[first:] = 0
        return column
    values = column.values.clone()
    values[column.layout.offsets[first] :] = 0
    return column.like(values)
