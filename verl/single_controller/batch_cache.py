"""Columns of a batch that ranks keep from one call to the next, so that each row of a column is sent to a rank once.

The driver's `BatchLedger` knows which rows of which columns each rank has; a rank's `BatchCache` holds them. A column
is known by its tensor: one that was replaced, or written to in place, is another column and is sent again. What a call
returned for its rows is kept as well, and may be kept there alone: a `RemoteColumn`, fetched when the driver reads its
values. A rank drops what the driver no longer has, or has released and has a copy of. Columns of objects whose
elements are dicts of tensors, as the inputs of images are, are known by their array and these tensors.

Knows batches; no transport, no role.
"""

from __future__ import annotations

import pickle
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.batch.layout import Layout, tensor_from_numpy, tensor_to_numpy
from verl.batch.ragged import (
    CountedPositions,
    EncodedColumn,
    JoinedTokens,
    Ragged,
    RemoteRows,
    cat_columns,
    select_columns,
)
from verl.batch.windows import WINDOWS
from verl.protocol import DataProto, DataProtoError
from verl.single_controller.errors import WorkerGroupStopped

Key = tuple[int, str]
"""Name of a column between a driver and its ranks: a number, of the call that returned it if one did; and its name."""

_MASKS = ("response_mask", "loss_mask", "pairs")
"""Columns that mark the tokens, or the rows, of the loss; zero on padding rows, so that these do not train."""


def map_arguments(kind: type, fn: Callable[[Any], Any], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Apply ``fn`` to the arguments of a call that are of this class."""

    def each(value: Any) -> Any:
        return fn(value) if isinstance(value, kind) else value

    return tuple(map(each, args)), {name: each(value) for name, value in kwargs.items()}


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


@dataclass(eq=False)
class SplitCall:
    """One call on a batch whose rows are divided among ranks."""

    num_rows: int
    """Rows of the batch."""
    keeps: bool
    """Whether ranks keep its columns: other calls on the same batch may follow."""
    stays: tuple[str, ...] = ()
    """Columns of its output that are left with the ranks."""
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


class SentObjects(NamedTuple):
    """A column of dicts of tensors on its way to a rank: those that the rank does not have."""

    key: Key
    codes: np.ndarray
    """Of each row, the number of its dict: rows may share one."""
    new: dict[int, dict[str, tuple[np.ndarray, torch.dtype | None]]]


class SentBatch(NamedTuple):
    """A `BatchPart` on its way to a rank."""

    rows: np.ndarray
    own: int
    columns: dict[str, SentColumn]
    counted: dict[str, str | Layout]
    """Positions that count from 0 -> a column of the same layout, or the layout."""
    joined: dict[str, tuple[str, str]]
    """Whole sequences -> the columns of their prompts and responses."""
    objects: dict[str, SentObjects]
    rest: DataProto
    """All other columns."""
    meta_info: tuple[bytes, list[bytearray]]
    """Pickled once for all ranks, with its arrays."""
    number: int
    stays: tuple[str, ...]


class CacheState(NamedTuple):
    """What a rank may keep, sent in front of a call's arguments."""

    keys: tuple[Key, ...]
    calls: tuple[int, ...]
    """Calls whose output the driver has not read yet."""


class KeptOutput(NamedTuple):
    """Output of a call, and the names of its columns that the rank has kept."""

    output: Any
    names: tuple[str, ...]


class RemoteColumn:
    """A column of a call's output that is with the ranks which made it: fetched from all when one part is read."""

    def __init__(self, key: Key, role: str, parts: Mapping[int, RemoteRows], fetch: Callable[[RemoteColumn], None]):
        """``parts`` by rank; they hold this object, which holds neither them nor the object of the method ``fetch``."""
        self.key, self.role = key, role
        self._parts = {rank: weakref.ref(part) for rank, part in parts.items()}
        self._fetch = weakref.WeakMethod(fetch)
        for part in parts.values():
            vars(part)["fetch"] = self.fetch

    def fetch(self) -> None:
        """Have the parts given their values.

        Raises:
            WorkerGroupStopped: the ranks have ended.
        """
        if (fetch := self._fetch()) is None:
            raise WorkerGroupStopped(
                f"{self}, which have ended with their group. Read it, or pickle its batch, before."
            )
        fetch(self)

    def __str__(self) -> str:
        return f"column {self.key[1]!r} is with the processes of {self.role!r} alone"

    @property
    def ranks(self) -> list[int]:
        return list(self._parts)

    def fetched(self, columns: Sequence[Ragged]) -> None:
        """Give the parts their values, in the order of ``ranks``."""
        for part, column in zip(self._parts.values(), columns, strict=True):
            if (rows := part()) is not None:
                vars(rows)["fetched"] = column.values


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


class _KnownObjects:
    """A column of dicts of tensors that ranks have, or some of these dicts."""

    def __init__(self, key: Key, array: np.ndarray, on_end: Callable[[Any], None]):
        self.key, self.anchor = key, weakref.ref(array, on_end)
        number: dict[int, int] = {}
        self.codes = np.array([number.setdefault(id(one), len(number)) for one in array], dtype=np.int64)
        self.elements = array.tolist()  # held, so that an id stays that of its object
        self.distinct = list({id(one): one for one in self.elements}.values())
        self._contents = list(map(_content, self.distinct))
        self.rows: dict[int, np.ndarray] = {}
        """Rank -> numbers of the dicts that it holds."""

    @staticmethod
    def can_be(array: np.ndarray) -> bool:
        """Whether changes to the elements of such a column would be seen: they are dicts of tensors on the CPU."""
        if array.dtype != object or array.ndim != 1 or not isinstance(next(iter(array), None), dict):
            return False
        distinct = list({id(one): one for one in array}.values())
        return any(distinct) and all(
            isinstance(value, Tensor) and value.device.type == "cpu" and not value.is_inference()
            for one in distinct
            for value in (one.values() if isinstance(one, dict) else (None,))
        )

    def is_of(self, array: np.ndarray) -> bool:
        same = self.anchor() is array and len(array) == len(self.elements)
        same = same and all(map(is_, array, self.elements))
        return same and list(map(_content, self.distinct)) == self._contents


def _content(tensors: Mapping[str, Tensor]) -> list[tuple[str, int, int]]:
    """Names of the tensors, which they are, and how often each was written to in place."""
    return [(name, id(value), value._version) for name, value in tensors.items()]


class _Whole:
    """A batch of which several ranks get rows: what is the same for all is worked out once."""

    def __init__(self, data: DataProto, ledger: BatchLedger):
        self.data, self.meta_info = data, ledger.pickled(data.meta_info)
        ragged = data._ragged
        self.counted = {name: column for name, column in ragged.items() if isinstance(column, CountedPositions)}
        self.joined = {name: pair for name, column in ragged.items() if (pair := _parts_of(column, ragged))}
        apart = {*self.counted, *self.joined}
        self.known: dict[str, _Known] = {
            name: found for name, column in ragged.items() if name not in apart and (found := ledger.find(name, column))
        }
        self.objects: dict[str, _KnownObjects] = {
            name: kept
            for name, array in data.non_tensor_batch.items()
            if ragged and (kept := ledger.find_objects(name, array))
        }
        apart |= set(self.known)
        self.rest = data.select(
            [name for name in data.keys() if name not in apart],
            [name for name in data.non_tensor_batch if name not in self.objects],
            meta_info_keys=(),
        )
        """The columns that do not go by themselves."""
        self._encoded: dict[int, EncodedColumn | None] = {}

    def rows(self, names: list[str], rows: np.ndarray) -> dict[str, Ragged | EncodedColumn]:
        """The rows of these columns, whose values are looked through once for all ranks."""
        columns = {name: self.data._ragged[name] for name in names}
        for column in columns.values():
            if column.is_remote:  # before the first message is sent: a rank that has a call may wait for the others
                _ = column.values
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
        self._numbers = count()  # never used again: ranks may hold what this ledger has forgotten
        self._unread: weakref.WeakSet[SplitCall] = weakref.WeakSet()
        self.remote: weakref.WeakSet[RemoteColumn] = weakref.WeakSet()
        """Columns that only ranks have."""
        self.reset()

    def reset(self) -> None:
        """Assume that no rank holds what it was sent."""
        self._told: dict[int, CacheState] = {}
        self.release()

    def release(self) -> None:
        """Let all ranks drop the columns that the driver has too, with the next call that each gets."""
        self._known: dict[int, _Known | _KnownObjects] = {}  # by id of the anchor
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

            def one(value: BatchPart, rank: int = request.rank) -> Any:
                if not value.call.keeps:
                    if id(value) not in taken:
                        taken[id(value)] = value.taken()
                    return taken[id(value)]
                holders.add(rank)
                if id(value.data) not in batches:
                    batches[id(value.data)] = _Whole(_packed(value.data), self)
                return self._sent(value, rank, memo, batches[id(value.data)])

            args, kwargs = map_arguments(BatchPart, one, request.args, request.kwargs)
            encoded.append(request._replace(args=args, kwargs=kwargs))
        keys = {known.key for known in self._known.values()} | {column.key for column in self.remote}
        calls = self._pending | {call.number for call in self._unread if call.number is not None}
        state = CacheState(tuple(sorted(keys)), tuple(sorted(calls)))
        for i, request in enumerate(encoded):
            if request.rank in holders or self._told.get(request.rank, state) != state:
                self._told[request.rank] = state
                encoded[i] = request._replace(args=(state, *request.args))
        return encoded

    def bind(self, call: SplitCall, outputs: Sequence[Any], role: str, fetch: Callable[[RemoteColumn], None]) -> None:
        """Make `RemoteColumn`s of what a call's outputs, by rank, have left with the ranks; ``fetch`` fetches one."""
        self._unread.discard(call)
        parts: dict[str, dict[int, RemoteRows]] = {}
        for rank, output in enumerate(outputs):
            columns = output.output._ragged if isinstance(output, KeptOutput) else {}
            for name, column in columns.items():
                if isinstance(column, RemoteRows) and column.is_remote:
                    parts.setdefault(name, {})[rank] = column
        assert call.number is not None or not parts
        for name, of_ranks in parts.items():
            self.remote.add(RemoteColumn((call.number or 0, name), role, of_ranks, fetch))

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

    def pickled(self, meta_info: dict[str, Any]) -> tuple[bytes, list[bytearray]]:
        arrays: list[pickle.PickleBuffer] = []
        stream = self._dumps(meta_info, protocol=5, buffer_callback=arrays.append)
        return stream, [bytearray(array.raw()) for array in arrays]

    def _sent(self, part: BatchPart, rank: int, memo: dict, whole: _Whole) -> SentBatch:
        if part.call.number is None:
            part.call.number = next(self._numbers)
            self._pending.add(part.call.number)
            if part.call.stays:
                self._unread.add(part.call)
        part.call.rows[rank] = part.rows[: part.own]
        columns: dict[str, Any] = {**whole.known, **whole.objects}
        held = {name: column.rows.get(rank) for name, column in columns.items()}
        # ranks of one data-parallel rank that hold the same share one message
        same = (id(part), *(id(rows) for rows in held.values()))
        if same not in memo:
            memo[same] = self._made(part, held, whole)
        message, after = memo[same]
        for name, rows in after.items():
            columns[name].rows[rank] = rows
        return message

    @staticmethod
    def _made(
        part: BatchPart, held: Mapping[str, np.ndarray | None], whole: _Whole
    ) -> tuple[SentBatch, dict[str, np.ndarray]]:
        """Return the message, and the rows of each column that the rank holds once it has it."""
        data, rows, known = whole.data, part.rows, whole.known
        missing: dict[bytes, tuple[np.ndarray, list[str]]] = {}
        after: dict[str, np.ndarray] = {}
        needed = np.unique(rows)
        columns, brought = {}, set()  # columns under two names are sent once
        for name, column in known.items():
            have = held[name]
            lacking = _lacking(needed, have)
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
        objects = {}
        for name, kind in whole.objects.items():
            have, codes = held[name], kind.codes[rows]
            lacking = _lacking(np.unique(codes), have)
            new = {
                int(code): {key: tensor_to_numpy(value) for key, value in kind.distinct[code].items()}
                for code in lacking
            }
            objects[name] = SentObjects(kind.key, codes, new)
            if len(lacking):
                after[name] = lacking if have is None else np.concatenate([have, lacking])
        rest = whole.rest.select_idxs(rows)
        rest.partition_plan, rest.step_rows = None, part.step_rows
        like = {
            name: next(
                (other for other in {**columns, **whole.joined} if data._ragged[other].layout is column.layout), None
            )
            or column.layout.select(torch.from_numpy(rows))
            for name, column in whole.counted.items()
        }
        assert part.call.number is not None
        rows_of = rows, part.own, columns, like, dict(whole.joined), objects
        return SentBatch(*rows_of, rest, whole.meta_info, part.call.number, part.call.stays), after

    def find(self, name: str, column: Ragged) -> _Known | None:
        """What ranks have of a column; None if changes to it could not be seen."""
        known = self._known.get(id(column.anchor))
        if isinstance(known, _Known) and known.is_of(column):
            return known
        return self._add((next(self._numbers), name), column)

    def find_objects(self, name: str, array: np.ndarray) -> _KnownObjects | None:
        """What ranks have of a column of objects; None if it is sent with every call."""
        known = self._known.get(id(array))
        if isinstance(known, _KnownObjects) and known.is_of(array):
            return known
        if not _KnownObjects.can_be(array):
            return None
        number, ended = id(array), self._ended
        added = _KnownObjects((next(self._numbers), name), array, lambda _: ended.append(number))
        self._known[number] = added
        return added

    def _add(self, key: Key, column: Ragged) -> _Known | None:
        """A new column, which no rank has; None if changes to it could not be seen."""
        anchor, ended = column.anchor, self._ended
        if isinstance(anchor, Tensor) and (anchor.is_inference() or anchor.device.type != "cpu"):
            return None
        number = id(anchor)
        self._known[number] = known = _Known(key, column, lambda _: ended.append(number))
        return known


def _lacking(needed: np.ndarray, have: np.ndarray | None) -> np.ndarray:
    """Those of the sorted numbers ``needed`` that are not in ``have``."""
    if have is None:
        return needed
    return needed[:0] if np.array_equal(have, needed) else needed[~np.isin(needed, have)]


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


def _not_sent(name: str, key: Key) -> str:
    return (
        f"column {name!r} of this batch was not sent, and this rank does not have it: the driver's record of call "
        f"{key[0]} is not of this process. Start the worker group again."
    )


class _Held:
    """Rows of a column."""

    def __init__(self, column: Ragged, rows: np.ndarray):
        self.column, self.rows, self.version = column, rows, column.values._version


class BatchCache:
    """The columns that a rank keeps from one call to the next."""

    def __init__(self) -> None:
        self._held: dict[Key, _Held] = {}
        self._joined: dict[tuple[Key, Key], JoinedTokens] = {}
        self._objects: dict[Key, dict[int, tuple[dict[str, Tensor], list]]] = {}  # with `_content`, by number

    def opened(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, SentBatch | None]:
        """Return the arguments of a call with their batches, and the message of one of these."""
        if args and isinstance(args[0], CacheState):
            self._drop(args[0])
            args = args[1:]
        sent = [value for value in (*args, *kwargs.values()) if isinstance(value, SentBatch)]
        if not sent:
            return args, kwargs, None

        return *map_arguments(SentBatch, self._batch, args, kwargs), sent[0]

    def kept(self, sent: SentBatch, output: Any) -> Any:
        """Keep the columns of a call's output, if it has a row for each of ``sent``; returns it with their names."""
        if not isinstance(output, DataProto) or len(output) != len(sent.rows):
            return output
        names, output = [], output.select()
        for name, column in output._ragged.items():
            if not isinstance(column, CountedPositions | JoinedTokens) and column.fill != "position":
                values = column.values.detach().cpu()
                values = values.clone() if values.is_inference() else values
                layout = column.layout if column.layout.starts.device.type == "cpu" else column.layout.to("cpu")
                kept = Ragged(values, layout, column.fill)
                kept = kept if sent.own == len(output) else kept.slice(0, sent.own)
                self._held[sent.number, name] = _Held(kept, sent.rows[: sent.own])
                names.append(name)
                if name in sent.stays and values.is_floating_point() and values.element_size() > 1:
                    output._ragged[name] = RemoteRows.of(Ragged(values, layout, column.fill))
        return KeptOutput(output, tuple(names))

    def column(self, key: Key) -> DataProto:
        """Return a column of an earlier call's output, of this rank's own rows."""
        held = self._held.get(key)
        if held is None:
            raise StaleBatchError(_not_sent(key[1], key))
        self._check(key[1], held)
        return DataProto.from_ragged({key[1]: held.column})

    def _drop(self, state: CacheState) -> None:
        keys, calls = set(state.keys), set(state.calls)
        # what this very message brings is added afterwards
        for key in [key for key in self._held if key not in keys and key[0] not in calls]:
            del self._held[key]
        for key in [key for key in self._objects if key not in keys]:
            del self._objects[key]
        for pair in [pair for pair in self._joined if not self._held.keys() >= set(pair)]:
            del self._joined[pair]

    def _batch(self, sent: SentBatch) -> DataProto:
        for name, (key, new, rows) in sent.columns.items():
            held = self._held.get(key)
            if held is None and new is None:
                raise StaleBatchError(_not_sent(name, key))
            if held is not None:
                self._check(name, held)
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
        for name, dicts in sent.objects.items():
            data.non_tensor_batch[name] = self._dicts(name, dicts)
        for name, like in sent.counted.items():
            data.put(name, CountedPositions(data._ragged[like].layout if isinstance(like, str) else like))
        return without_training(data, sent.own) if sent.own < len(sent.rows) else data

    @staticmethod
    def _check(name: str, held: _Held) -> None:
        if held.column.values._version != held.version:
            raise StaleBatchError(
                f"column {name!r} was written to in place by an earlier method of this rank, and is read after it: "
                "change a copy, ragged(name).values.clone(), or the padded form, batch.batch[name]."
            )

    def _dicts(self, name: str, sent: SentObjects) -> np.ndarray:
        """A column of dicts of tensors; rows that share one in the driver share one here."""
        held = self._objects.setdefault(sent.key, {})
        for code, arrays in sent.new.items():
            tensors = {key: tensor_from_numpy(*array) for key, array in arrays.items()}
            held[code] = tensors, _content(tensors)
        for code in np.unique(sent.codes).tolist():
            if code not in held:
                raise StaleBatchError(_not_sent(name, sent.key))
            if _content(held[code][0]) != held[code][1]:
                raise StaleBatchError(
                    f"column {name!r} was written to in place by an earlier method of this rank, whose later ones read "
                    "it too: change a copy of the tensor."
                )
        own = {code: dict(held[code][0]) for code in np.unique(sent.codes).tolist()}
        return np.fromiter((own[code] for code in sent.codes.tolist()), object, len(sent.codes))

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
            self._joined[keys] = joined = JoinedTokens.of(prompt, response)
            _ = joined.values
        return joined
