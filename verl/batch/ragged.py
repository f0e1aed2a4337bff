"""Columns without padding: the valid tokens of rows of unequal length, and their positions in the padded window.

A `Layout` holds the positions of the valid tokens, a `Ragged` their values one after the other: T = sum of lengths
values instead of B * width. Which columns of a batch are ragged, and in which window, is in `verl.batch.windows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.batch.encoding import SAMPLE, Encoded, carrier_of, decode, encode, form, is_constant, rare
from verl.batch.layout import Layout, tensor_from_numpy, tensor_to_numpy

Fill = float | Literal["position"]


@dataclass(frozen=True, eq=False)
class Ragged:
    """A column of rows of unequal length: their values, their layout, and the value of its padding.

    Treat ``values`` as read-only: other batches, or shared memory, may own them. ``like`` makes a changed column.
    """

    values: Tensor
    """(T, ...): the valid tokens, row after row."""
    layout: Layout
    fill: Fill = 0
    """Value of padding. "position": 0 on the left, on the right counting on from the last valid token."""

    def __post_init__(self):
        if self.values.shape[:1] != (self.layout.total,):
            shape = tuple(self.values.shape)
            raise ValueError(f"Ragged: values of shape {shape} do not fill a layout of {self.layout.total} tokens.")

    @staticmethod
    def from_padded(tensor: Tensor, layout: Layout, fill=0) -> Ragged:
        """Keep the tokens of ``tensor`` (B, width, ...) that are valid in ``layout``. Costs T, not B * width."""
        if tensor.shape[:2] != (len(layout), layout.width):
            want = (len(layout), layout.width)
            raise ValueError(
                f"Ragged.from_padded: shape {tuple(tensor.shape)} does not begin with {want} of the layout."
            )
        return Ragged(tensor.flatten(0, 1).index_select(0, layout.valid_positions.to(tensor.device)), layout, fill)

    @staticmethod
    def from_rows(
        rows: Sequence[Tensor | Sequence], width: int, side: Literal["left", "right"] = "right", fill=0, dtype=None
    ) -> Ragged:
        """Pack ``rows``; ``side`` is where the padding of the window stands (prompts: left, responses: right)."""
        if side not in ("left", "right"):
            raise ValueError(f"Ragged.from_rows: side={side!r} is neither 'left' nor 'right', the side of the padding.")
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        if len(rows) and int(lengths.max()) > width:
            i = int(lengths.argmax())
            raise ValueError(f"Ragged.from_rows: row {i} has {len(rows[i])} tokens, width={width}. Shorten it.")
        tensors = [row for row in rows if isinstance(row, Tensor)]
        if rows and len(tensors) == len(rows):
            values = torch.cat(tensors).to(dtype)
        else:
            flat = list(chain.from_iterable(row.tolist() if isinstance(row, Tensor) else row for row in rows))
            values = torch.tensor(flat, dtype=dtype if flat or dtype else torch.int64)
        starts = width - lengths if side == "left" else torch.zeros_like(lengths)
        return Ragged(values, Layout(starts, lengths, width), fill)

    @staticmethod
    def cat(parts: Sequence[Ragged]) -> Ragged:
        """The rows of all parts, one after the other; fill of the first."""
        return cat_columns([{"": part} for part in parts])[""]

    @property
    def shape(self) -> torch.Size:
        """Shape of the padded form, (B, width, ...)."""
        return torch.Size((len(self.layout), self.layout.width, *self.values.shape[1:]))

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def is_remote(self) -> bool:
        """Whether the values are still in other processes, which are asked for them when they are first read."""
        return False

    def is_finite(self) -> bool:
        """Whether the sum of the values is a finite number; NaN and infinity survive a sum."""
        return bool(self.values.sum().isfinite())

    def row_sums(self, mask: Ragged | None = None) -> Tensor:
        """(B,) float64: the sum of each row's values (T,), of those where ``mask`` is not 0."""
        values = self.values.detach().double()
        if mask is not None:
            values = values.where(mask.values.to(self.device) != 0, 0)
        return self.layout.sum(values)

    def padded(self) -> Tensor:
        """(B, width, ...): a new tensor; its padding holds ``fill``. Gradients flow back to ``values``."""
        rows, width, *tail = self.shape
        if self.fill == "position":
            flat = self._positions_right().flatten()
        else:
            flat = self.values.new_full((rows * width, *tail), self.fill)
        return flat.index_copy_(0, self.layout.valid_positions.to(flat.device), self.values).view(rows, width, *tail)

    def trim_padding(self) -> Tensor:
        """(B, longest row, ...): padded on the right only, in the narrowest window that holds every row."""
        return self.with_layout(self.layout.trimmed).padded()

    def row(self, i: int) -> Tensor:
        first, last = self.layout.offsets[range(len(self.layout))[i] :][:2].tolist()
        return self.values[first:last]

    def rows(self) -> list[Tensor]:
        """The rows as views of ``values``."""
        return list(self.values.split(self.layout.lengths.tolist()))

    def select(self, idx: Tensor) -> Ragged:
        """The rows ``idx`` (int64 row numbers, repeats allowed), copied."""
        return select_columns({"": self}, idx)[""]

    def slice(self, first: int, last: int) -> Ragged:
        """Rows [first, last) as a view."""
        return slice_columns({"": self}, first, last)[""]

    def like(self, values: Tensor) -> Ragged:
        """Other values (T, ...) at the same positions; padding 0."""
        return Ragged(values, self.layout)

    def constant(self, value: float, dtype: torch.dtype = torch.int64) -> Ragged:
        """One value on every token of the same rows; it takes the memory of one."""
        return self.like(
            torch.tensor([value], dtype=dtype, device=self.layout.lengths.device).expand(self.layout.total)
        )

    def with_layout(self, layout: Layout) -> Ragged:
        """The same values in another layout of as many tokens."""
        return self if layout is self.layout else Ragged(self.values, layout, self.fill)

    def copied(self) -> Ragged:
        """The column with values of its own."""
        return Ragged(self.values.clone(), self.layout, self.fill)

    def zero_rows(self, rows: Tensor) -> Ragged:
        """The column with 0 on every token of the rows that ``rows`` (B,) bool names."""
        kept = self.layout.spread(~rows.to(self.values.device))
        return self.like(self.values * kept.to(self.values.dtype))

    def to(self, device: torch.device | str) -> Ragged:
        return move_columns({"": self}, device)[""]

    def _positions_right(self) -> Tensor:
        """(B, width): 0 up to each row's last valid token, then counting on from its value."""
        layout = self.layout
        behind = torch.arange(layout.width, device=self.values.device) - (layout.starts + layout.lengths - 1)[:, None]
        last = self.values.new_zeros(len(layout))
        full = layout.lengths > 0
        last[full] = self.values[layout.offsets[1:][full] - 1]
        return ((last[:, None] + behind) * ((behind > 0) & full[:, None])).to(self.values.dtype)

    def _mapped(self, each: Callable[[Ragged], Ragged], change: Callable[[Layout], _Change]) -> Ragged:
        """The column with a change made to its layout and values; what it is derived from goes through ``each``."""
        made = change(self.layout)
        return Ragged(made.values(self.values), made.layout, self.fill)

    @property
    def anchor(self) -> Any:
        """The object that columns of these values have in common."""
        return self.values

    @property
    def version(self) -> int:
        """Number of times that the values were written to in place."""
        return self.values._version

    def __reduce__(self):
        if self.fill == "position" and _counts_from_zero(self):
            return CountedPositions, (self.layout,)
        return Ragged._from_wire, (*encode(self.values, self.layout), self.layout, self.fill)

    @staticmethod
    def _from_wire(*encoded: Any) -> Ragged:
        *content, layout, fill = encoded
        # of files that earlier versions wrote, the array and its dtype alone
        values = tensor_from_numpy(*content) if len(content) == 2 else decode(tuple(content), layout)
        return Ragged(values, layout, fill)


class _Change(NamedTuple):
    """What becomes of the columns of one layout."""

    layout: Layout
    """The new one."""
    values: Callable[[Tensor], Tensor]
    """Old values -> new ones."""
    rows: np.ndarray | None = None
    """The old rows that are the new ones; None: all, and they change otherwise."""
    span: slice | None = None
    """The old rows, where the new ones are views of them."""


Column = Tensor | Ragged
"""A column in padded form, or without padding."""


class CountedPositions(Ragged):
    """Positions that count each row from 0: nothing but a layout, until their values are read."""

    def __init__(self, layout: Layout):
        vars(self).update(layout=layout, fill="position")

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.layout), self.layout.width))

    @cached_property
    def values(self) -> Tensor:
        layout = self.layout
        return torch.arange(layout.total, device=layout.starts.device) - layout.spread(layout.offsets[:-1])

    def with_layout(self, layout: Layout) -> Ragged:
        return CountedPositions(layout)

    def copied(self) -> Ragged:
        return CountedPositions(self.layout)

    def _mapped(self, each: Callable[[Ragged], Ragged], change: Callable[[Layout], _Change]) -> Ragged:
        return CountedPositions(change(self.layout).layout)

    def __reduce__(self):
        return CountedPositions, (self.layout,)


class RowValues(Ragged):
    """One number a row: on each of its tokens, or on one of them and 0 on the others.

    Scores and the advantages of most estimators are such columns. The values (T,) are made when they are first read.
    """

    def __init__(self, numbers: Tensor, layout: Layout, at: Tensor | None = None):
        """``numbers``: (B,); ``at``: (B,) int64, the token that has it, counted from the row's first; None: all have.

        A row without tokens shows its number in `padded` and in `row_sums` alone.
        """
        vars(self).update(numbers=numbers, layout=layout, at=at, fill=0)

    numbers: Tensor
    at: Tensor | None

    @staticmethod
    def on_last_tokens(numbers: Tensor, layout: Layout) -> RowValues:
        """The numbers (B,) on the last token of each row, on the device of ``layout``."""
        return RowValues(numbers.to(layout.lengths.device), layout, (layout.lengths - 1).clamp(min=0))

    @cached_property
    def values(self) -> Tensor:
        layout = self.layout
        if self.at is None:
            values = layout.spread(self.numbers)
        else:
            filled = layout.lengths > 0
            places = (layout.offsets[:-1] + self.at)[filled]
            values = self.numbers.new_zeros(layout.total).index_copy(0, places, self.numbers[filled])
        return values

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.layout), self.layout.width))

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def dtype(self) -> torch.dtype:
        return self.numbers.dtype

    def is_finite(self) -> bool:
        return bool(self.numbers.sum().isfinite())

    def row_sums(self, mask: Ragged | None = None) -> Tensor:
        if mask is not None or self.at is None:
            return super().row_sums(mask)
        return self.numbers.detach().double()

    def padded(self) -> Tensor:
        if self.at is None or not self.layout.width:
            return super().padded()
        column = (self.layout.starts + self.at).clamp(max=self.layout.width - 1)
        return self.numbers.new_zeros(self.shape).scatter_(1, column[:, None], self.numbers[:, None])

    def with_layout(self, layout: Layout) -> Ragged:
        return self if layout is self.layout else RowValues(self.numbers, layout, self.at)

    def copied(self) -> Ragged:
        return RowValues(self.numbers.clone(), self.layout, None if self.at is None else self.at.clone())

    def _mapped(self, each: Callable[[Ragged], Ragged], change: Callable[[Layout], _Change]) -> Ragged:
        made = change(self.layout)
        rows = made.span if made.rows is None else torch.from_numpy(made.rows)
        if rows is None or "values" in vars(self):
            return super()._mapped(each, change)
        return RowValues(self.numbers[rows], made.layout, None if self.at is None else self.at[rows])

    @property
    def anchor(self) -> Any:
        # columns that have the same numbers on other tokens are others
        return self.numbers if self.at is None else self.at

    @property
    def version(self) -> int:
        made = [self.numbers, *([self.values] if "values" in vars(self) else [])]
        return sum(tensor._version for tensor in made if not tensor.is_inference())

    def __reduce__(self):
        if "values" in vars(self) or self.layout.total >= 1 << 31:
            return super().__reduce__()
        if self.at is None:
            return Ragged._from_wire, ("row", *tensor_to_numpy(self.numbers), None, self.layout, self.fill)
        filled = self.layout.lengths > 0
        encoded = rare((self.layout.offsets[:-1] + self.at)[filled], self.numbers[filled])
        return Ragged._from_wire, (*encoded, self.layout, self.fill)


class JoinedTokens(Ragged):
    """Token ids of whole sequences, prompt and response of each row: kept as those two until the values are read."""

    def __init__(self, prompt: Ragged, response: Ragged, layout: Layout):
        vars(self).update(prompt=prompt, response=response, layout=layout, fill=response.fill)

    prompt: Ragged
    response: Ragged

    @staticmethod
    def of(prompt: Ragged, response: Ragged) -> JoinedTokens:
        """The sequences (B, P + R) of prompts (B, P), padded on the left, and responses (B, R)."""
        lengths = prompt.layout.lengths + response.layout.lengths
        width = prompt.layout.width + response.layout.width
        return JoinedTokens(prompt, response, Layout(prompt.layout.starts, lengths, width))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.layout), self.layout.width))

    @cached_property
    def values(self) -> Tensor:
        prompt, response = self.prompt, self.response
        pieces: list[Tensor] = [prompt.values] * (2 * len(self.layout))
        pieces[::2] = prompt.values.split(prompt.layout.lengths.tolist())
        pieces[1::2] = response.values.split(response.layout.lengths.tolist())
        return torch.cat(pieces).long() if pieces else prompt.values.new_empty(0).long()

    def with_layout(self, layout: Layout) -> Ragged:
        return JoinedTokens(self.prompt, self.response, layout)

    def _mapped(self, each: Callable[[Ragged], Ragged], change: Callable[[Layout], _Change]) -> Ragged:
        if "values" in vars(self):
            return super()._mapped(each, change)
        return JoinedTokens(each(self.prompt), each(self.response), change(self.layout).layout)

    def __reduce__(self):
        return JoinedTokens, (self.prompt, self.response, self.layout)


class RemoteRows(Ragged):
    """Rows whose values are in another process; here are their layout, and what tells how to read them.

    ``fetch`` brings the values of this part and of all others of its column; see `verl.single_controller.batch_cache`.
    """

    def __init__(self, layout: Layout, fill: Fill, dtype: torch.dtype, tail: tuple[int, ...], finite: bool):
        """``tail``: shape of a token's value; ``finite``: what `is_finite` returns."""
        vars(self).update(layout=layout, fill=fill, tail=tail, finite=finite)
        vars(self)["_dtype"] = dtype

    tail: tuple[int, ...]
    finite: bool

    def fetch(self) -> None:
        raise RuntimeError("the process that has these rows is not known")

    @staticmethod
    def of(column: Ragged) -> RemoteRows:
        """What others need to know of a column of this process."""
        tail = tuple(column.values.shape[1:])
        return RemoteRows(column.layout, column.fill, column.values.dtype, tail, column.is_finite())

    @property
    def values(self) -> Tensor:
        if "fetched" not in vars(self):
            self.fetch()
        return vars(self)["fetched"]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.layout), self.layout.width, *self.tail))

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return vars(self)["_dtype"]

    @property
    def is_remote(self) -> bool:
        return "fetched" not in vars(self)

    def is_finite(self) -> bool:
        return self.finite

    def __reduce__(self):
        return RemoteRows, (self.layout, self.fill, self.dtype, self.tail, self.finite)


class _Gather:
    """Rows of several columns, copied when they are first read."""

    def __init__(self, parts: Sequence[Ragged], rows: np.ndarray, carrier: np.dtype | None = None):
        """``rows``: their numbers in all parts, one after the other; ``carrier``: a dtype to convert the values to."""
        self.parts, self.rows, self.carrier = parts, rows, carrier

    @cached_property
    def values(self) -> Tensor:
        arrays = [tensor_to_numpy(part.values)[0] for part in self.parts]
        part_of = np.repeat(np.arange(len(arrays)), [len(part.layout) for part in self.parts])
        firsts = np.concatenate([part.layout.offsets[:-1].numpy() for part in self.parts])
        lasts = np.concatenate([part.layout.offsets[1:].numpy() for part in self.parts])
        chosen = zip(part_of[self.rows].tolist(), firsts[self.rows].tolist(), lasts[self.rows].tolist(), strict=True)
        pieces = [arrays[part][first:last] for part, first, last in chosen] or [arrays[0][:0]]
        if self.carrier is not None:  # in the same pass over memory
            return tensor_from_numpy(np.concatenate(pieces, dtype=self.carrier, casting="unsafe"))
        return tensor_from_numpy(np.concatenate(pieces), tensor_to_numpy(self.parts[0].values[:0])[1])


class GatheredRows(Ragged):
    """Rows that lie in several columns, as ranks returned them: copied into one when the values are first read."""

    def __init__(self, gather: _Gather, layout: Layout, fill: Fill):
        vars(self).update(gather=gather, layout=layout, fill=fill)

    gather: _Gather

    @property
    def values(self) -> Tensor:
        return self.gather.values

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.layout), self.layout.width, *self.gather.parts[0].shape[2:]))

    @property
    def device(self) -> torch.device:
        return self.gather.parts[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.gather.parts[0].dtype

    @property
    def is_remote(self) -> bool:
        return "values" not in vars(self.gather) and any(part.is_remote for part in self.gather.parts)

    def is_finite(self) -> bool:
        return all(part.is_finite() for part in self.gather.parts) if self.is_remote else super().is_finite()

    @property
    def anchor(self) -> Any:
        return self.gather

    @property
    def version(self) -> int:
        return self.values._version if "values" in vars(self.gather) else 0

    def with_layout(self, layout: Layout) -> Ragged:
        return self if layout is self.layout else GatheredRows(self.gather, layout, self.fill)

    def _mapped(self, each: Callable[[Ragged], Ragged], change: Callable[[Layout], _Change]) -> Ragged:
        made = change(self.layout)
        if made.rows is None or "values" in vars(self.gather):
            return super()._mapped(each, change)
        return GatheredRows(_Gather(self.gather.parts, self.gather.rows[made.rows]), made.layout, self.fill)

    @staticmethod
    def of(parts: Sequence[Ragged], layout: Layout) -> Ragged | None:
        """The rows of all parts; None where they cannot be copied later as they are now."""
        kinds = {(part.dtype, part.shape[2:], part.device.type) for part in parts}
        if len(kinds) > 1 or any(part.device.type != "cpu" for part in parts):
            return None
        if any(not part.is_remote and part.values.requires_grad for part in parts):
            return None
        return GatheredRows(_Gather(parts, np.arange(len(layout))), layout, parts[0].fill)


def _counts_from_zero(column: Ragged) -> bool:
    values = column.values
    if values.ndim != 1 or values.dtype != torch.int64:
        return False
    layout = column.layout
    if values[layout.offsets[:-1][layout.lengths > 0]].any():
        return False
    rows = int(torch.searchsorted(layout.offsets[1:], SAMPLE)) + 1
    sample = CountedPositions(layout.slice(0, rows)).values
    return torch.equal(sample, values[: len(sample)]) and torch.equal(CountedPositions(layout).values, values)


class EncodedColumn:
    """A column as it is sent, of which rows can be taken; it arrives as a `Ragged`.

    Rows are copied when it is pickled, so that only the message being made takes memory.
    """

    def __init__(
        self,
        encoded: Encoded,
        layout: Layout,
        fill: Fill,
        carrier: np.dtype | None = None,
        taken: tuple[np.ndarray, Layout] | None = None,
    ):
        """``carrier``: dtype in which the values are sent; ``taken``: numbers of the rows sent, and their layout."""
        self._encoded, self._layout, self._fill, self._carrier, self._taken = encoded, layout, fill, carrier, taken

    @staticmethod
    def of(column: Ragged) -> EncodedColumn | None:
        """The whole column; None if its rows are better encoded by themselves."""
        if column.fill == "position" or isinstance(column, GatheredRows):
            return None
        if isinstance(column, RowValues) and "values" not in vars(column):
            if column.at is not None:
                return None
            array, carried = tensor_to_numpy(column.numbers)
            return EncodedColumn(("row", array, carried, None), column.layout, column.fill)
        values = column.values.detach().cpu()
        kind, array, carried, dtype = form(values, column.layout)
        if kind == "rare":
            return None
        if kind == "each" and (carrier := carrier_of(values)):
            narrow = torch.empty(0, dtype=carrier).numpy().dtype
            return EncodedColumn((kind, array, carried, values.dtype), column.layout, column.fill, narrow)
        return EncodedColumn((kind, array, carried, dtype), column.layout, column.fill)

    def select(self, rows: np.ndarray, layout: Layout) -> EncodedColumn:
        """The rows of these numbers; ``layout`` is theirs."""
        return EncodedColumn(self._encoded, self._layout, self._fill, self._carrier, (rows, layout))

    def __reduce__(self):
        kind, array, carried, dtype = self._encoded
        rows, layout = self._taken or (None, self._layout)
        if kind == "row" and rows is not None:
            array = array[rows]
        elif kind == "each":
            rows = np.arange(len(layout)) if rows is None else rows
            array = _Gather([Ragged(tensor_from_numpy(array), self._layout)], rows, self._carrier).values.numpy()
        return Ragged._from_wire, (kind, array, carried, dtype, layout, self._fill)


# Several columns at once: each layout is worked out once, and columns that shared a layout share the new one.
_LONG_ROWS = 64
"""Tokens a row from which on rows are copied one by one: it takes no index of every token."""


def _map_columns(columns: Mapping[str, Ragged], change: Callable[[Layout], _Change]) -> dict[str, Ragged]:
    done: dict[int, Ragged] = {}
    change = cache(change)

    def each(column: Ragged) -> Ragged:
        if id(column) not in done:
            done[id(column)] = column._mapped(each, change)
        return done[id(column)]

    return {name: each(column) for name, column in columns.items()}


def select_columns(columns: Mapping[str, Ragged], idx: Tensor) -> dict[str, Ragged]:
    """Rows ``idx`` of every column, copied."""
    idx = torch.as_tensor(idx, dtype=torch.int64)
    rows = idx.cpu().numpy()

    def change(layout: Layout) -> _Change:
        local = idx.to(layout.starts.device)
        chosen = layout.select(local)

        @cache
        def positions() -> Tensor:
            return chosen._count_from(layout.offsets[local])

        def values(old: Tensor) -> Tensor:
            if is_constant(old):
                return old[:1].expand(chosen.total)
            if old.device.type == "cpu" and not old.requires_grad and chosen.total > _LONG_ROWS * len(rows) > 0:
                return _Gather([Ragged(old, layout)], rows).values
            return old.index_select(0, positions().to(old.device))

        return _Change(chosen, values, rows)

    return _map_columns(columns, change)


def slice_columns(columns: Mapping[str, Ragged], first: int, last: int) -> dict[str, Ragged]:
    """Rows [first, last) of every column, as views."""

    def change(layout: Layout) -> _Change:
        begin, end, _ = slice(first, last).indices(len(layout))
        end = max(begin, end)
        first_token, last_token = int(layout.offsets[begin]), int(layout.offsets[end])
        return _Change(layout.slice(begin, end), lambda old: old[first_token:last_token], span=slice(begin, end))

    return _map_columns(columns, change)


def cat_columns(parts: Sequence[Mapping[str, Ragged]], later: bool = False) -> dict[str, Ragged]:
    """Join the rows of all parts column by column; every part holds the same names. Fill of the first part.

    Args:
        later: copy the values when they are first read; nothing may write to those of the parts until then.
    """
    layouts = cache(lambda *layouts: Layout.cat(layouts))
    done: dict[tuple[int, ...], Ragged] = {}

    def joined(pieces: list[Ragged]) -> Ragged:
        key = tuple(map(id, pieces))
        if key not in done:
            done[key] = _joined(pieces, layouts(*(piece.layout for piece in pieces)), joined, later)
        return done[key]

    return {name: joined([part[name] for part in parts]) for name in parts[0]}


def _joined(pieces: list[Ragged], layout: Layout, joined: Callable[[list[Ragged]], Ragged], later: bool) -> Ragged:
    """One column of several; those that are derived stay so."""
    if all(isinstance(piece, CountedPositions) for piece in pieces):
        return CountedPositions(layout)
    by_row = [piece for piece in pieces if isinstance(piece, RowValues) and "values" not in vars(piece)]
    if len(by_row) == len(pieces) and len({(piece.at is None, piece.dtype, piece.device) for piece in by_row}) == 1:
        at = None if by_row[0].at is None else torch.cat([piece.at for piece in by_row if piece.at is not None])
        return RowValues(torch.cat([piece.numbers for piece in by_row]), layout, at)
    derived = [piece for piece in pieces if isinstance(piece, JoinedTokens) and "values" not in vars(piece)]
    if len(derived) == len(pieces):
        return JoinedTokens(joined([p.prompt for p in derived]), joined([p.response for p in derived]), layout)
    if later and any(piece.is_remote for piece in pieces) and (gathered := GatheredRows.of(pieces, layout)):
        return gathered
    values = [piece.values for piece in pieces]
    one = values[0][:1]
    if all(is_constant(v) and v.dtype == one.dtype and v.device == one.device for v in values):
        if all(torch.equal(v[:1], one) for v in values):
            return Ragged(one.expand(layout.total), layout, pieces[0].fill)
    if later and (gathered := GatheredRows.of(pieces, layout)):
        return gathered
    return Ragged(torch.cat(values), layout, pieces[0].fill)


def move_columns(columns: Mapping[str, Ragged], device: torch.device | str) -> dict[str, Ragged]:
    """Every column on ``device``."""
    return _map_columns(columns, lambda layout: _Change(layout.to(device), lambda old: old.to(device)))
