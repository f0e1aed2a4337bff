"""Select columns, pad and split the rows of a call's batches over ranks, and restore the order of the outputs.

The one place where an uneven batch is padded, or split by the `PartitionPlan` that it carries. Works on the arguments
of a call; knows no ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from verl.batch.partition import Partition

_MASKS = ("response_mask", "loss_mask")
"""Columns that mark the tokens of the loss; zero on padding rows, so that these do not train."""


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
    """Make every DataProto of a call divisible by ``parts``, with copies of its first rows that do not train.

    Returns the arguments and the row counts, None if nothing was added.

    Raises:
        ValueError: the batches of one call differ in length.
    """
    rows = _common_length(args, kwargs)
    if rows % parts == 0:
        return args, kwargs, None
    args, kwargs = map_batches(lambda data: _pad(data, parts) if len(data) else data, args, kwargs)
    return args, kwargs, Padding(rows, rows + -rows % parts)


def drop_padding(result: Any, padding: Padding | None) -> Any:
    """Take the padding rows off a result that has them; anything else is returned as it is."""
    from verl.protocol import DataProto, unpad_dataproto

    if padding is None or not isinstance(result, DataProto) or len(result) != padding.padded:
        return result
    return unpad_dataproto(result, padding.padded - padding.real)


def _common_length(args: tuple, kwargs: dict) -> int:
    """Rows of the batches of a call; 0 if there are none."""
    lengths = set()
    map_batches(lambda data: lengths.add(len(data)), args, kwargs)
    lengths.discard(0)
    if len(lengths) > 1:
        raise ValueError(f"the batches of one call have {sorted(lengths)} rows: give all the same number of rows.")
    return lengths.pop() if lengths else 0


class SplitBatch(list):
    """A batch already split: one DataProto for each data-parallel rank."""


def plan_partition(args: tuple, kwargs: dict, method: str, parts: int) -> Partition | None:
    """Return the partition of a call's batches if one carries a `PartitionPlan` that names the method; else None.

    All batches are divided by the lengths (and, to keep groups together, ``uid``) of the one that carries the plan.
    """
    from verl.batch.partition import PARTITION_PLAN, row_lengths

    carriers: list[Any] = []
    map_batches(lambda data: carriers.append(data) if PARTITION_PLAN in data.meta_info else None, args, kwargs)
    plan = carriers[0].meta_info[PARTITION_PLAN] if carriers else None
    if plan is None or method not in plan.calls or not _common_length(args, kwargs):
        return None
    return plan.partition(method, row_lengths(carriers[0], plan.groups_together), parts)


def split_rows(args: tuple, kwargs: dict, partition: Partition) -> tuple[tuple, dict]:
    """Replace every DataProto that has rows by a `SplitBatch`."""
    return map_batches(lambda data: _split(data, partition) if len(data) else data, args, kwargs)


def _split(data, partition: Partition) -> SplitBatch:
    from verl.batch.partition import PARTITION_PLAN, STEP_ROWS

    parts = SplitBatch()
    for rank, (rows, has_filler) in enumerate(zip(partition.rows, partition.has_filler, strict=True)):
        is_whole = len(partition.rows) == 1 and not has_filler
        part = data.select() if is_whole else data.select_idxs(rows)
        for name in _MASKS if has_filler else ():
            if name in part:
                part.put(name, _zeroed_from(part, name, len(part) - 1))
        part.meta_info = {key: value for key, value in part.meta_info.items() if key != PARTITION_PLAN}
        if partition.steps is not None:
            part.meta_info[STEP_ROWS] = partition.steps[rank]
        parts.append(part)
    return parts


def restore_rows(result: Any, partition: Partition | None) -> Any:
    """Bring the rows of a joined result into the order of the batch; anything else is returned as it is."""
    from verl.protocol import DataProto

    if partition is None or not isinstance(result, DataProto) or len(result) != sum(map(len, partition.rows)):
        return result
    positions = partition.output_positions()
    return result if positions is None or len(partition.rows) == 1 else result.select_idxs(positions)


def _pad(data, parts: int):
    from verl.protocol import pad_dataproto_to_divisor

    padded, _ = pad_dataproto_to_divisor(data, parts)
    for name in _MASKS:
        if name in padded:
            padded.put(name, _zeroed_from(padded, name, len(data)))
    return padded


def _zeroed_from(data, name: str, first: int):
    """Column ``name`` with zeros from row ``first`` on, packed if it can be."""
    from verl.protocol import DataProtoError

    try:
        column = data.ragged(name)
    except DataProtoError:  # the columns sent along do not tell its valid tokens
        column = data.column(name).clone()
        column[first:] = 0
        return column
    values = column.values.clone()
    values[column.layout.offsets[first] :] = 0
    return column.like(values)
