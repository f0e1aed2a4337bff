"""Columns of a batch that ranks keep from one call to the next, so that each row of a column is sent to a rank once.

The driver's `BatchLedger` knows which rows of which columns each rank has; a rank's `BatchCache` holds them. A column
is known by its tensor: one that was replaced, or written to in place, is another column and is sent again. What a call
returned for its rows is kept as well. A rank drops what the driver no longer has, or has released.

Knows batches; no transport, no role.
"""

from __future__ import annotations

import pickle
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.batch.ragged import (
    WINDOWS,
    CountedPositions,
    EncodedColumn,
    JoinedTokens,
    Layout,
    Ragged,
    cat_columns,
    select_columns,
)
from verl.protocol import DataProto, DataProtoError

Key = tuple[int, str]
"""Name of a column between a driver and its ranks: a number, of the call that returned it if one did; and its name."""

_MASKS = ("response_mask", "loss_mask", "pairs")
"""Columns that mark the tokens, or the rows, of the loss; zero on padding rows, so that these do not train."""


def without_training(data: DataProto, first: int) -> DataProto:
    """Zero the masks of the loss from row ``first`` on, packed if they can be; changes and returns ``data``."""
    for name in _MASKS:
        if name not in data:
            continue
        try:
            column = data.ragged(name)
        except DataProtoError:  # the columns sent along do not tell its valid tokens
            padded = data.column(name).clone()
            padded[first:] = 0
            data.put(name, padded)
        else:
            # the batch of the caller may share these numbers
            values = column.values.clone()
            values[column.layout.offsets[first] :] = 0
            data.put(name, column.like(values))
    return data


# -- Driver ----------------------------------------------------------------------------------------------------------


@dataclass
class SplitCall:
    """One call on a batch whose rows are divided among ranks."""

    num_rows: int
    """Rows of the batch."""
    keeps: bool
    """Whether ranks keep its columns: other calls on the same batch may follow."""
    number: int | None = None
    """Number of the call in the ledger; None: nothing was sent through one."""
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    """Rank -> numbers of its rows, those that are only there to fill it left out."""


class BatchPart(NamedTuple):
    """Rows of a batch for one data-parallel rank, not yet copied."""

    data: DataProto
    rows: np.ndarray
    own: int
    """So many of ``rows`` are the rank's own; the others fill it, and train nothing."""
    step_rows: Sequence[np.ndarray] | None
    call: SplitCall

    def taken(self) -> DataProto:
        """Return these rows as a batch."""
        is_whole = self.own == len(self.rows) == len(self.data)
        part = self.data.select() if is_whole else self.data.select_idxs(self.rows)
        # the plan is of the whole batch: a worker that calls on would divide its part by it once more
        part.partition_plan, part.step_rows = None, self.step_rows
        return without_training(part, self.own) if self.own < len(part) else part


class SentColumn(NamedTuple):
    """A column on its way to a rank: the rows that the rank does not have."""

    key: Key
    new: Ragged | EncodedColumn | None
    """Rows ``rows``, a `Ragged` where it arrives; None: the rank has all it needs."""
    rows: np.ndarray | None


class SentBatch(NamedTuple):
    """A `BatchPart` on its way to a rank."""

    rows: np.ndarray
    own: int
    columns: dict[str, SentColumn]
    counted: dict[str, str | Layout]
    """Positions that count from 0 -> a column of the same layout, or the layout."""
    joined: dict[str, tuple[str, str]]
    """Whole sequences -> the columns of their prompts and responses."""
    rest: DataProto
    """All other columns."""
    meta_info: tuple[bytes, list[bytearray]]
    """Pickled once for all ranks, with its arrays."""
    number: int


class CacheState(NamedTuple):
    """What a rank may keep, sent in front of a call's arguments."""

    ledger: str
    keys: tuple[Key, ...]
    calls: tuple[int, ...]
    """Calls whose output the driver has not read yet."""


class KeptOutput(NamedTuple):
    """Output of a call, and the names of its columns that the rank has kept."""

    output: Any
    names: tuple[str, ...]


class _Known:
    """A column that ranks have, or some rows of it."""

    def __init__(self, key: Key, column: Ragged, on_end: Callable[[Any], None]):
        self.key, self.layout, self.fill = key, column.layout, column.fill
        self.anchor, self.version = weakref.ref(column.anchor, on_end), column.version
        self.rows: dict[int, np.ndarray] = {}
        """Rank -> row numbers, in the order in which the rank holds them."""

    def is_of(self, column: Ragged) -> bool:
        same = self.anchor() is column.anchor and self.version == column.version and self.fill == column.fill
        return same and self.layout == column.layout


class _Whole:
    """A batch of which several ranks get rows: what is the same for all is worked out once."""

    def __init__(self, data: DataProto, meta_info: tuple[bytes, list[bytearray]]):
        self.data, self.meta_info = data, meta_info
        self._encoded: dict[int, EncodedColumn | None] = {}
        self._rest: tuple[set[str], DataProto] | None = None

    def rest(self, apart: set[str]) -> DataProto:
        """The batch without the columns ``apart``, which go by themselves."""
        if self._rest is None or self._rest[0] != apart:
            names = [name for name in self.data.keys() if name not in apart]
            self._rest = apart, self.data.select(names, meta_info_keys=())
        return self._rest[1]

    def rows(self, names: list[str], rows: np.ndarray) -> dict[str, Ragged | EncodedColumn]:
        """The rows of these columns, whose values are looked through once for all ranks."""
        columns = {name: self.data._ragged[name] for name in names}
        if len(rows) == len(self.data):
            return dict(columns)
        for column in columns.values():
            if id(column) not in self._encoded:
                self._encoded[id(column)] = EncodedColumn.of(column)
        index = torch.from_numpy(rows)
        others = {name: column for name, column in columns.items() if self._encoded[id(column)] is None}
        chosen: dict[str, Ragged | EncodedColumn] = {**select_columns(others, index)}
        layout = cache(lambda layout: layout.select(index))
        for name, column in columns.items():
            if (encoded := self._encoded[id(column)]) is not None:
                chosen[name] = encoded.select(rows, layout(column.layout))
        return chosen


class BatchLedger:
    """Which rows of which columns each rank of a group holds. Calls must be sent in the order they go through here."""

    def __init__(self, dumps: Callable[..., bytes] = pickle.dumps):
        self._dumps = dumps
        self._numbers = count()
        self.reset()

    def reset(self) -> None:
        """Assume that no rank holds anything."""
        self._id = uuid.uuid4().hex
        self._told: dict[int, CacheState] = {}
        self.release()

    def release(self) -> None:
        """Let all ranks drop all columns, with the next call that each gets."""
        self._known: dict[int, _Known] = {}  # by id of the anchor
        self._pending: set[int] = set()
        self._ended: deque[int] = deque()

    def encoded(self, requests: Sequence[Any]) -> list[Any]:
        """Return the requests as they are sent: of every `BatchPart` what its rank lacks."""
        while self._ended:  # by finalizers, which may run at any time
            number = self._ended.popleft()
            if number in self._known and self._known[number].anchor() is None:
                del self._known[number]
        memo: dict[tuple, Any] = {}
        taken: dict[int, DataProto] = {}
        batches: dict[int, _Whole] = {}
        encoded, holders = [], set()
        for request in requests:

            def one(value: Any, rank: int = request.rank) -> Any:
                if not isinstance(value, BatchPart):
                    return value
                if not value.call.keeps:
                    if id(value) not in taken:
                        taken[id(value)] = value.taken()
                    return taken[id(value)]
                holders.add(rank)
                if id(value.data) not in batches:
                    batches[id(value.data)] = _Whole(_packed(value.data), self._pickled(value.data.meta_info))
                return self._sent(value, rank, memo, batches[id(value.data)])

            args = tuple(map(one, request.args))
            encoded.append(request._replace(args=args, kwargs={k: one(v) for k, v in request.kwargs.items()}))
        keys = tuple(sorted(known.key for known in self._known.values()))
        state = CacheState(self._id, keys, tuple(sorted(self._pending)))
        for i, request in enumerate(encoded):
            if request.rank in holders or self._told.get(request.rank, state) != state:
                self._told[request.rank] = state
                encoded[i] = request._replace(args=(state, *request.args))
        return encoded

    def adopt(self, call: SplitCall, outputs: Sequence[Any], result: Any) -> None:
        """Note the columns of a call's ``result`` that ranks have kept; ``outputs``, by rank, are what they sent."""
        if call.number not in self._pending:
            return
        self._pending.discard(call.number)
        kept = {rank: output for rank, output in enumerate(outputs) if isinstance(output, KeptOutput)}
        own = sum(len(call.rows[rank]) for rank in kept)
        # rows that two ranks worked on, or a result that is no batch of these rows
        if not kept or own != call.num_rows or not isinstance(result, DataProto) or len(result) != own:
            return
        for name in set.intersection(*(set(output.names) for output in kept.values())):
            column = result._ragged.get(name)
            if isinstance(column, Ragged) and (known := self._add((call.number, name), column)):
                known.rows = {rank: call.rows[rank] for rank in kept}

    def _pickled(self, meta_info: dict[str, Any]) -> tuple[bytes, list[bytearray]]:
        arrays: list[pickle.PickleBuffer] = []
        stream = self._dumps(meta_info, protocol=5, buffer_callback=arrays.append)
        return stream, [bytearray(array.raw()) for array in arrays]

    def _sent(
        self,
        part: BatchPart,
        rank: int,
        memo: dict,
        whole: _Whole,
    ) -> SentBatch:
        data = whole.data
        if part.call.number is None:
            part.call.number = next(self._numbers)
            self._pending.add(part.call.number)
        part.call.rows[rank] = part.rows[: part.own]
        ragged = data._ragged
        counted = {name: column for name, column in ragged.items() if isinstance(column, CountedPositions)}
        joined = {name: pair for name, column in ragged.items() if (pair := _parts_of(column, ragged))}
        known = {
            name: found
            for name, column in ragged.items()
            if name not in counted and name not in joined and (found := self._find(name, column))
        }
        held = {name: column.rows.get(rank) for name, column in known.items()}
        # ranks of one data-parallel rank that hold the same share one message
        same = (id(part), *(id(rows) for rows in held.values()))
        if same not in memo:
            memo[same] = self._made(part, known, held, counted, joined, whole)
        message, after = memo[same]
        for name, rows in after.items():
            known[name].rows[rank] = rows
        return message

    def _made(
        self,
        part: BatchPart,
        known: Mapping[str, _Known],
        held: Mapping[str, np.ndarray | None],
        counted: Mapping[str, Ragged],
        joined: Mapping[str, tuple[str, str]],
        whole: _Whole,
    ) -> tuple[SentBatch, dict[str, np.ndarray]]:
        """Return the message, and the rows of each column that the rank holds once it has it."""
        data, rows = whole.data, part.rows
        missing: dict[bytes, tuple[np.ndarray, list[str]]] = {}
        after: dict[str, np.ndarray] = {}
        needed = np.unique(rows)
        columns, brought = {}, set()  # columns under two names are sent once
        for name, column in known.items():
            have = held[name]
            if have is not None and np.array_equal(have, needed):
                lacking = needed[:0]
            else:
                lacking = needed if have is None else needed[~np.isin(needed, have)]
            columns[name] = SentColumn(column.key, None, None)
            if not len(lacking) or column.key in brought:
                continue
            brought.add(column.key)
            lacking, names = missing.setdefault(lacking.tobytes(), (lacking, []))
            names.append(name)
            after[name] = lacking if have is None else np.concatenate([have, lacking])
        for lacking, names in missing.values():
            chosen = whole.rows(names, lacking)
            columns |= {name: SentColumn(known[name].key, column, lacking) for name, column in chosen.items()}
        rest = whole.rest({*known, *counted, *joined}).select_idxs(rows)
        rest.partition_plan, rest.step_rows = None, part.step_rows
        like = {
            name: next((other for other in {**columns, **joined} if data._ragged[other].layout is column.layout), None)
            or column.layout.select(torch.from_numpy(rows))
            for name, column in counted.items()
        }
        assert part.call.number is not None
        return SentBatch(rows, part.own, columns, like, dict(joined), rest, whole.meta_info, part.call.number), after

    def _find(self, name: str, column: Ragged) -> _Known | None:
        known = self._known.get(id(column.anchor))
        return known if known is not None and known.is_of(column) else self._add((next(self._numbers), name), column)

    def _add(self, key: Key, column: Ragged) -> _Known | None:
        """A new column, which no rank has; None if changes to it could not be seen."""
        anchor, ended = column.anchor, self._ended
        if isinstance(anchor, Tensor) and (anchor.is_inference() or anchor.device.type != "cpu"):
            return None
        number = id(anchor)
        self._known[number] = known = _Known(key, column, lambda _: ended.append(number))
        return known


def _packed(data: DataProto) -> DataProto:
    """The batch with its known columns packed: sent apart from the others, they could not be."""
    return data.packed() if WINDOWS.keys() & set(data._dense.keys()) else data


def _parts_of(column: Ragged, columns: Mapping[str, Ragged]) -> tuple[str, str] | None:
    """Names of the columns that a column of whole sequences is joined of, if they are there."""
    if not isinstance(column, JoinedTokens):
        return None
    names = []
    for part in (column.prompt, column.response):
        found = [
            n
            for n, c in columns.items()
            if not isinstance(c, JoinedTokens | CountedPositions) and c.anchor is part.anchor
        ]
        names += [n for n in found if columns[n].layout == part.layout][:1]
    return (names[0], names[1]) if len(names) == 2 else None


# -- Rank ------------------------------------------------------------------------------------------------------------


class StaleBatchError(RuntimeError):
    """A rank does not hold what the driver believes it does, or it was written to."""


class _Held:
    """Rows of a column."""

    def __init__(self, column: Ragged, rows: np.ndarray):
        self.column, self.rows, self.version = column, rows, column.values._version


class BatchCache:
    """The columns that a rank keeps from one call to the next."""

    def __init__(self) -> None:
        self._ledger = ""
        self._held: dict[Key, _Held] = {}
        self._joined: dict[tuple[Key, Key], JoinedTokens] = {}

    def opened(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, SentBatch | None]:
        """Return the arguments of a call with their batches, and the message of one of these."""
        if args and isinstance(args[0], CacheState):
            self._drop(args[0])
            args = args[1:]
        sent = [value for value in (*args, *kwargs.values()) if isinstance(value, SentBatch)]
        if not sent:
            return args, kwargs, None

        def one(value: Any) -> Any:
            return self._batch(value) if isinstance(value, SentBatch) else value

        return tuple(map(one, args)), {name: one(value) for name, value in kwargs.items()}, sent[0]

    def kept(self, sent: SentBatch, output: Any) -> Any:
        """Keep the columns of a call's output, if it has a row for each of ``sent``; returns it with their names."""
        if not isinstance(output, DataProto) or len(output) != len(sent.rows):
            return output
        names = []
        for name, column in output._ragged.items():
            if not isinstance(column, CountedPositions | JoinedTokens) and column.fill != "position":
                values = column.values.detach().cpu()
                values = values.clone() if values.is_inference() else values
                layout = column.layout if column.layout.starts.device.type == "cpu" else column.layout.to("cpu")
                kept = Ragged(values, layout, column.fill)
                kept = kept if sent.own == len(output) else kept.slice(0, sent.own)
                self._held[sent.number, name] = _Held(kept, sent.rows[: sent.own])
                names.append(name)
        return KeptOutput(output, tuple(names))

    def _drop(self, state: CacheState) -> None:
        keys, calls = set(state.keys), set(state.calls)
        if state.ledger != self._ledger:
            self._ledger, keys, calls = state.ledger, set(), set()
        # what this very message brings is added afterwards
        for key in [key for key in self._held if key not in keys and key[0] not in calls]:
            del self._held[key]
        for pair in [pair for pair in self._joined if not self._held.keys() >= set(pair)]:
            del self._joined[pair]

    def _batch(self, sent: SentBatch) -> DataProto:
        for name, (key, new, rows) in sent.columns.items():
            held = self._held.get(key)
            if held is None and new is None:
                raise StaleBatchError(
                    f"column {name!r} of this batch was not sent, and this rank does not have it: the driver's record "
                    f"of call {key[0]} is not of this process. Start the worker group again."
                )
            if held is not None and held.column.values._version != held.version:
                raise StaleBatchError(
                    f"column {name!r} was written to in place by an earlier method of this rank, whose later ones read "
                    "it too: change a copy, ragged(name).values.clone(), or the padded form, batch.batch[name]."
                )
            if new is not None and rows is not None:
                assert isinstance(new, Ragged)
                if held is not None:
                    new = cat_columns([{"": held.column}, {"": new}])[""]
                    rows = np.concatenate([held.rows, rows])
                self._held[key] = _Held(new, rows)
        data = sent.rest
        data.meta_info = pickle.loads(sent.meta_info[0], buffers=sent.meta_info[1])
        for name, column in self._columns(sent).items():
            data.put(name, column)
        for name, pair in sent.joined.items():
            data.put(name, self._sequences(data, pair, sent.columns))
        for name, like in sent.counted.items():
            data.put(name, CountedPositions(data._ragged[like].layout if isinstance(like, str) else like))
        return without_training(data, sent.own) if sent.own < len(sent.rows) else data

    def _columns(self, sent: SentBatch) -> dict[str, Ragged]:
        """The columns of a message, in its rows."""
        found: dict[str, Ragged] = {}
        others: dict[bytes, dict[str, Ragged]] = {}
        for name, (key, _, _) in sent.columns.items():
            held = self._held[key]
            if np.array_equal(held.rows, sent.rows):
                found[name] = held.column
            else:
                others.setdefault(held.rows.tobytes(), {})[name] = held.column
        for rows, columns in others.items():
            have = np.frombuffer(rows, dtype=sent.rows.dtype)
            order = np.argsort(have, kind="stable")
            places = order[np.searchsorted(have, sent.rows, sorter=order)]
            found |= select_columns(columns, torch.from_numpy(places))
        return {name: found[name] for name in sent.columns}

    def _sequences(self, data: DataProto, pair: tuple[str, str], columns: Mapping[str, SentColumn]) -> Ragged:
        """Prompts and responses joined; once for all calls on the same rows."""
        prompt, response = (data._ragged[name] for name in pair)
        keys = columns[pair[0]].key, columns[pair[1]].key
        joined = self._joined.get(keys)
        if joined is None or joined.prompt.values is not prompt.values or joined.response.values is not response.values:
            lengths = prompt.layout.lengths + response.layout.lengths
            whole = Layout(prompt.layout.starts, lengths, prompt.layout.width + response.layout.width)
            self._joined[keys] = joined = JoinedTokens(prompt, response, whole)
            _ = joined.values
        return joined
