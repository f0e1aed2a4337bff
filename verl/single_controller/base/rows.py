"""What happens to a batch between the caller and the split over ranks, and back: columns left behind, rows padded.

The one place where an uneven batch is made even, or cut as the plan it carries says. Works on the arguments of a call;
knows no ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from verl.batch.partition import Shares

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
        raise ValueError(
            f"the batches of one call have {sorted(lengths)} rows: all must have as many, to be cut alike."
        )
    return lengths.pop() if lengths else 0


class Parts(list):
    """A batch that is cut already: a DataProto for each part."""


def plan_shares(args: tuple, kwargs: dict, verb: str, parts: int) -> Shares | None:
    """How the batches of a call are cut, if one carries a `SharePlan` that knows the verb; else None.

    The rows of all of them are divided by the lengths (and, for siblings, ``uid``) of the one that carries it.
    """
    from verl.batch.partition import SHARE_PLAN, batch_rows

    carriers: list[Any] = []
    map_batches(lambda data: carriers.append(data) if SHARE_PLAN in data.meta_info else None, args, kwargs)
    plan = carriers[0].meta_info[SHARE_PLAN] if carriers else None
    if plan is None or verb not in plan.passes or not _common_length(args, kwargs):
        return None
    return plan.shares(verb, batch_rows(carriers[0], plan.siblings_together), parts)


def cut_rows(args: tuple, kwargs: dict, shares: Shares) -> tuple[tuple, dict]:
    """Cut every DataProto that has rows into `Parts`."""
    return map_batches(lambda data: _cut(data, shares) if len(data) else data, args, kwargs)


def _cut(data, shares: Shares) -> Parts:
    from verl.batch.partition import SHARE_PLAN, STEP_ROWS

    parts = Parts()
    for rank, (rows, has_filler) in enumerate(zip(shares.rows, shares.has_filler, strict=True)):
        is_whole = len(shares.rows) == 1 and not has_filler
        part = data.select() if is_whole else data.select_idxs(rows)
        for name in _MASKS if has_filler else ():
            if name in part:
                part.put(name, _silenced(part, name, len(part) - 1))
        part.meta_info = {name: fact for name, fact in part.meta_info.items() if name != SHARE_PLAN}
        if shares.steps is not None:
            part.meta_info[STEP_ROWS] = shares.steps[rank]
        parts.append(part)
    return parts


def restore_rows(result: Any, shares: Shares | None) -> Any:
    """Bring the rows of a joined result into the order of the batch; anything else is returned as it is."""
    from verl.protocol import DataProto

    if shares is None or not isinstance(result, DataProto) or len(result) != sum(map(len, shares.rows)):
        return result
    places = shares.places()
    return result if places is None or len(shares.rows) == 1 else result.select_idxs(places)


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
