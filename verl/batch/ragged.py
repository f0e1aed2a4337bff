"""Columns without padding: the valid tokens of rows of unequal length, and their positions in the padded window.

A padded column is (B, width); each row is one run of valid tokens, with padding left and right. ``Layout`` holds the
positions of the runs, ``Ragged`` their values one after the other: T = sum of lengths values instead of B * width.
Columns of one batch share their Layout object, so what is derived from it (offsets, valid positions) is derived once.

Knows torch and numpy only. Which columns of a batch are ragged, and by which mask, is in `WINDOWS`.
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

# -- Tensors on the wire: numpy arrays over the same memory ----------------------------------------------------------
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def tensor_to_numpy(tensor: Tensor) -> tuple[np.ndarray, torch.dtype | None]:
    """A contiguous array on the CPU, and the dtype to view it back to where numpy has none (bf16, fp8)."""
    tensor = tensor.detach().cpu().contiguous()
    try:
        return tensor.numpy(), None
    except TypeError:
        return tensor.view(_CARRIERS[tensor.element_size()]).numpy(), tensor.dtype


def tensor_from_numpy(array: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor over the memory of ``array``. Where that is read-only, the tensor must not be written to either."""
    if not array.flags.writeable:
        array = np.asarray(_WritableAlias(array)) if array.size else array.copy()
    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(dtype)


class _WritableAlias:
    """Lets torch wrap read-only memory without its warning: torch has no read-only tensors."""

    def __init__(self, array: np.ndarray):
        self.owner = array  # numpy keeps this object, and so the memory, alive
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


Fill = float | Literal["position"]


@dataclass(frozen=True, eq=False)
class Layout:
    """Positions of the valid tokens of B rows in a padded (B, width) window; one run per row."""

    starts: Tensor
    """(B,) int64: column of each row's first valid token."""
    lengths: Tensor
    """(B,) int64: number of valid tokens of each row; may be zero."""
    width: int

    @staticmethod
    def from_mask(mask: Tensor) -> Layout:
        """Read the runs off a (B, width) mask. A row with holes counts from its first to its last nonzero entry."""
        if mask.ndim != 2:
            raise ValueError(f"Layout.from_mask: a mask of shape {tuple(mask.shape)} is not (B, width).")
        real = (mask != 0).cpu().numpy()  # numpy's argmax of booleans stops at the first hit, torch's does not
        width = real.shape[1]
        if not real.size:
            none = torch.zeros(len(real), dtype=torch.int64, device=mask.device)
            return Layout(none, none, width)
        starts = real.argmax(1)
        ends = np.where(real.any(1), width - real[:, ::-1].argmax(1), starts)
        runs = torch.from_numpy(np.stack([starts, ends - starts])).to(mask.device)
        return Layout(runs[0], runs[1], width)

    def __len__(self) -> int:
        return self.starts.shape[0]

    def __eq__(self, other: object) -> bool:
        """Same width, same runs. Where an empty run would start does not matter."""
        if self is other:
            return True
        if not isinstance(other, Layout) or (self.width, len(self)) != (other.width, len(other)):
            return False
        if self.lengths.device != other.lengths.device or not torch.equal(self.lengths, other.lengths):
            return False
        return bool(((self.starts == other.starts) | (self.lengths == 0)).all())

    def __hash__(self) -> int:
        return hash((self.width, len(self)))

    @cached_property
    def offsets(self) -> Tensor:
        """(B + 1,) int64: row i owns values[offsets[i] : offsets[i + 1]]."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @cached_property
    def total(self) -> int:
        """T, the number of valid tokens."""
        return int(self.offsets[-1])

    @cached_property
    def row_numbers(self) -> Tensor:
        """(T,) int64: number of the row that each valid token belongs to."""
        return self.spread(torch.arange(len(self), device=self.lengths.device))

    def spread(self, values: Tensor) -> Tensor:
        """(T,): of ``values`` (B,), one a row, that of its row for each valid token."""
        if values.device.type == "cpu" and not values.requires_grad:  # numpy's is ten times as fast
            array, dtype = tensor_to_numpy(values)
            return tensor_from_numpy(np.repeat(array, self.lengths.cpu().numpy()), dtype)
        return values.repeat_interleave(self.lengths, output_size=self.total)

    def sum(self, values: Tensor) -> Tensor:
        """(B,): the sum of each row of ``values`` (T,); without gradient."""
        array, carried = tensor_to_numpy(values) if values.device.type == "cpu" else (None, None)
        if array is None or carried:
            # `unsafe`: lengths are not checked, for which an accelerator would be waited for
            lengths = self.lengths.to(values.device)
            return torch.segment_reduce(values.detach(), "sum", lengths=lengths, unsafe=True, initial=0)
        rows, firsts = self._rows_with_tokens
        sums = np.zeros(len(self), array.dtype)
        # pairwise: four times as fast as torch's, and ten times as exact
        sums[rows] = np.add.reduceat(array, firsts)
        return torch.from_numpy(sums)

    @cached_property
    def _rows_with_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the rows that have a token, and where their values begin."""
        rows = np.flatnonzero(self.lengths.cpu().numpy())
        return rows, self.offsets[:-1].cpu().numpy()[rows]

    @cached_property
    def valid_positions(self) -> Tensor:
        """(T,) int64: position of each valid token in the flattened (B * width) window."""
        outside = (self.starts < 0) | (self.lengths < 0) | (self.starts + self.lengths > self.width)
        # an index too large would land in the next row, unseen; an accelerator would have to be waited for
        if self.starts.device.type == "cpu" and outside.any():
            i = int(outside.nonzero()[0])
            run = f"starts[{i}]={int(self.starts[i])}, lengths[{i}]={int(self.lengths[i])}"
            raise ValueError(f"Layout: {run} leave the window of width={self.width}. Shorten the row or widen it.")
        return self._count_from(torch.arange(len(self), device=self.starts.device) * self.width + self.starts)

    @cached_property
    def trimmed(self) -> Layout:
        """The same lengths in the narrowest window that holds them, padding on the right only."""
        longest = int(self.lengths.max()) if len(self) else 0
        return Layout(torch.zeros_like(self.starts), self.lengths, longest)

    def mask(self) -> Tensor:
        """(B, width) int64: 1 on valid tokens."""
        column = torch.arange(self.width, device=self.starts.device)
        starts = self.starts[:, None]
        return ((column >= starts) & (column < starts + self.lengths[:, None])).long()

    def window(self, first: int, last: int) -> Layout:
        """Clip the runs to columns [first, last): the layout of ``padded[:, first:last]``."""
        starts = self.starts.clamp(first, last) - first
        ends = (self.starts + self.lengths).clamp(first, last) - first
        return Layout(starts, ends - starts, last - first)

    def select(self, idx: Tensor) -> Layout:
        """The rows ``idx``, an int64 tensor of non-negative row numbers, in that order."""
        return Layout(self.starts[idx], self.lengths[idx], self.width)

    def slice(self, first: int, last: int) -> Layout:
        """Rows [first, last) as views."""
        return Layout(self.starts[first:last], self.lengths[first:last], self.width)

    def to(self, device: torch.device | str) -> Layout:
        moved = Layout(self.starts.to(device), self.lengths.to(device), self.width)
        vars(moved)["total"] = self.total  # known here; to read it back from a GPU would wait for the GPU
        return moved

    @staticmethod
    def cat(layouts: Sequence[Layout]) -> Layout:
        """The rows of all, one after the other; all must have one width."""
        widths = sorted({layout.width for layout in layouts})
        if len(widths) != 1:
            raise ValueError(f"Layout.cat: widths {widths} differ. Pad the rows to one width before joining them.")
        if len(layouts) == 1:
            return layouts[0]
        starts, lengths = (torch.cat([getattr(part, name) for part in layouts]) for name in ("starts", "lengths"))
        return Layout(starts, lengths, widths[0])

    def _count_from(self, firsts: Tensor) -> Tensor:
        """(T,): count on from ``firsts[i]`` (B,) over the tokens of row i."""
        shift = self.spread(firsts - self.offsets[:-1])
        return shift + torch.arange(self.total, device=shift.device)

    def __reduce__(self):
        runs = torch.stack([self.starts, self.lengths]).cpu().to(torch.int32 if self.width < 1 << 31 else torch.int64)
        return Layout._from_wire, (*runs.numpy(), self.width)

    @staticmethod
    def _from_wire(starts: np.ndarray, lengths: np.ndarray, width: int) -> Layout:
        return Layout(tensor_from_numpy(starts).long(), tensor_from_numpy(lengths).long(), width)


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
        return Ragged._from_wire, (*_encoded(self.values, self.layout), self.layout, self.fill)

    @staticmethod
    def _from_wire(*encoded: Any) -> Ragged:
        *content, layout, fill = encoded
        # of files that earlier versions wrote, the array and its dtype alone
        values = tensor_from_numpy(*content) if len(content) == 2 else _decoded(tuple(content), layout)
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
        """The numbers (B,) on the last token of each row."""
        return RowValues(numbers, layout, (layout.lengths - 1).clamp(min=0))

    @cached_property
    def values(self) -> Tensor:
        layout = self.layout
        if self.at is None:
            values = layout.spread(self.numbers)
        else:
            values = self.numbers.new_zeros(layout.total)
            filled = layout.lengths > 0
            values[(layout.offsets[:-1] + self.at)[filled]] = self.numbers[filled]
        vars(self)["_version_made"] = values._version
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
        return RowValues(self.numbers.clone(), self.layout, self.at)

    def _mapped(self, each: Callable[[Ragged], Ragged], change: Callable[[Layout], _Change]) -> Ragged:
        made = change(self.layout)
        rows = made.span if made.rows is None else torch.from_numpy(made.rows)
        if rows is None or "values" in vars(self):
            return super()._mapped(each, change)
        return RowValues(self.numbers[rows], made.layout, None if self.at is None else self.at[rows])

    @property
    def anchor(self) -> Any:
        return self.numbers

    @property
    def version(self) -> int:
        changes = self.values._version - vars(self)["_version_made"] if "values" in vars(self) else 0
        return self.numbers._version + changes

    def __reduce__(self):
        if "values" in vars(self) or self.layout.total >= 1 << 31:
            return super().__reduce__()
        if self.at is None:
            return Ragged._from_wire, ("row", *tensor_to_numpy(self.numbers), None, self.layout, self.fill)
        filled = self.layout.lengths > 0
        rare = _rare((self.layout.offsets[:-1] + self.at)[filled], self.numbers[filled])
        return Ragged._from_wire, (*rare, self.layout, self.fill)


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


# -- Values on the wire: bit for bit the same, in fewer bytes where that can be seen at once --------------------------
_Encoded = tuple[str, np.ndarray, torch.dtype | None, torch.dtype | None]

_SAMPLE = 256
"""Tokens looked at first, before a look at all."""

_BLOCK = 1 << 18
"""Tokens looked at together."""


def _is_constant(values: Tensor) -> bool:
    """Whether the values are one, repeated in place."""
    return values.ndim == 1 and len(values) > 0 and values.stride(0) == 0


def _counts_from_zero(column: Ragged) -> bool:
    values = column.values
    if values.ndim != 1 or values.dtype != torch.int64:
        return False
    layout = column.layout
    if values[layout.offsets[:-1][layout.lengths > 0]].any():
        return False
    rows = int(torch.searchsorted(layout.offsets[1:], _SAMPLE)) + 1
    sample = CountedPositions(layout.slice(0, rows)).values
    return torch.equal(sample, values[: len(sample)]) and torch.equal(CountedPositions(layout).values, values)


def _form(values: Tensor, layout: Layout) -> _Encoded:
    """Return how the values are sent, what is sent of them, its dtype where numpy has none, and theirs if it differs.

    ``all``: the one value that they have in common. ``row``: one a row. ``rare``: those that are not 0, and their
    places. ``each``: every one.
    """
    if _is_constant(values):
        return "all", *tensor_to_numpy(values[:1]), None
    if not values.numel():
        return "each", *tensor_to_numpy(values), None
    if values.ndim == 1 and not values.dtype.is_complex and (found := _repeated(values, layout)):
        return found
    return "each", *tensor_to_numpy(values), None


def _carrier(values: Tensor) -> torch.dtype | None:
    """The smallest dtype that holds these integers; None if it is theirs, or they are none."""
    if values.dtype not in (torch.int16, torch.int32, torch.int64) or not values.numel():
        return None
    low, high = values.aminmax()
    for dtype in (torch.int8, torch.int16, torch.uint16, torch.int32):
        limits = torch.iinfo(dtype)
        if dtype.itemsize < values.element_size() and limits.min <= int(low) and int(high) <= limits.max:
            return dtype
    return None


def _encoded(values: Tensor, layout: Layout) -> _Encoded:
    """Return how the values are sent: as `_form`, integers in the fewest bytes that hold them."""
    values = values.detach().cpu()
    kind, array, carried, dtype = _form(values, layout)
    if kind == "each" and (carrier := _carrier(values)):
        return kind, *tensor_to_numpy(values.to(carrier)), values.dtype
    return kind, array, carried, dtype


class EncodedColumn:
    """A column as it is sent, of which rows can be taken; it arrives as a `Ragged`.

    Rows are copied when it is pickled, so that only the message being made takes memory.
    """

    def __init__(
        self,
        encoded: _Encoded,
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
        kind, array, carried, dtype = _form(values, column.layout)
        if kind == "rare":
            return None
        if kind == "each" and (carrier := _carrier(values)):
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


def _repeated(values: Tensor, layout: Layout) -> _Encoded | None:
    """Return what `_encoded` does if the values are one, or one a row, or nearly all 0; else None."""
    bits = values.contiguous().view(_INTEGERS[values.element_size()])  # -0.0 is not 0.0, and NaN is itself
    firsts = layout.offsets[:-1].clamp(max=len(values) - 1)
    rows = int(torch.searchsorted(layout.offsets[1:], _SAMPLE)) + 1
    sampled = layout.slice(0, rows)
    if torch.equal(bits[: sampled.total], sampled.spread(bits[firsts[:rows]])):
        low, high = bits.aminmax()
        if low == high:
            return "all", *tensor_to_numpy(values[:1]), None
        if _is_one_a_row(bits, bits[firsts], layout):
            return "row", *tensor_to_numpy(values[firsts]), None
    if 16 * int(torch.count_nonzero(bits[:_SAMPLE])) < len(bits[:_SAMPLE]) and len(values) < 1 << 31:
        places = bits.nonzero().squeeze(1)
        if 4 * len(places) < len(values):
            return _rare(places, values[places])
    return None


def _rare(places: Tensor, values: Tensor) -> _Encoded:
    """Values (n,) at these places (n,) among others that are 0."""
    bits = values.detach().cpu().contiguous().view(_INTEGERS[values.element_size()])
    return (
        "rare",
        np.concatenate([places.int().numpy().view(np.uint8), bits.numpy().view(np.uint8)]),
        None,
        values.dtype,
    )


def _is_one_a_row(values: Tensor, by_row: Tensor, layout: Layout) -> bool:
    """Whether every row has its one value throughout; looks at some rows at a time, to make nothing large."""
    blocks = torch.searchsorted(layout.offsets, torch.arange(0, layout.total, _BLOCK)).tolist() + [len(layout)]
    for first, last in zip(blocks, blocks[1:], strict=False):
        begin, end = int(layout.offsets[first]), int(layout.offsets[last])
        if not torch.equal(values[begin:end], layout.slice(first, last).spread(by_row[first:last])):
            return False
    return True


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _decoded(encoded: _Encoded, layout: Layout) -> Tensor:
    """Undo `_encoded`."""
    kind, array, carried, dtype = encoded
    values = tensor_from_numpy(array, carried)
    if kind == "all":
        return values.expand(layout.total)
    if kind == "row":
        return layout.spread(values)
    if dtype is None:
        return values
    if kind == "rare":
        count = len(values) // (4 + dtype.itemsize)
        decoded = torch.zeros(layout.total, dtype=dtype)
        # a clone: the second part may begin where its type cannot
        decoded[values[: 4 * count].view(torch.int32).long()] = values[4 * count :].clone().view(dtype)
        return decoded
    return values.to(dtype)


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
            if _is_constant(old):
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
    if all(_is_constant(v) and v.dtype == one.dtype and v.device == one.device for v in values):
        if all(torch.equal(v[:1], one) for v in values):
            return Ragged(one.expand(layout.total), layout, pieces[0].fill)
    if later and (gathered := GatheredRows.of(pieces, layout)):
        return gathered
    return Ragged(torch.cat(values), layout, pieces[0].fill)


def move_columns(columns: Mapping[str, Ragged], device: torch.device | str) -> dict[str, Ragged]:
    """Every column on ``device``."""
    return _map_columns(columns, lambda layout: _Change(layout.to(device), lambda old: old.to(device)))


# -- Which tensor columns of an RL batch are ragged, and in which window ---------------------------------------------
WINDOWS = {"prompts": "prompt", "input_ids": "all", "attention_mask": "all", "position_ids": "all"} | dict.fromkeys(
    "responses response_mask loss_mask old_log_probs ref_log_prob rollout_log_probs entropys values rm_scores "
    "token_level_scores token_level_rewards advantages returns rollout_is_weights selected_tokens "
    "response_weights sum_pi_squared rollout_versions "
    "teacher_log_probs teacher_topk_log_probs teacher_topk_ids".split(),
    "response",
)


_TOKEN_IDS = ("input_ids", "prompts", "responses")


def join_windows(prompt: Ragged, response: Ragged) -> dict[str, Ragged]:
    """Return the columns of whole sequences, (B, P + R), from prompts (B, P) and responses (B, R).

    ``input_ids``, ``attention_mask`` (ones) and ``position_ids`` that count each row from 0.
    """
    tokens = JoinedTokens.of(prompt, response)
    return {"input_ids": tokens, "attention_mask": tokens.constant(1), "position_ids": CountedPositions(tokens.layout)}


def register_ragged_column(name: str, window: str) -> None:
    """Declare that column ``name`` (B, width, ...) has values on valid tokens of ``window`` only.

    Such a column travels without its padding and comes back with zeros there. ``window``: "all", "prompt" or
    "response". Register where the column is made, before it is sent.
    """
    if window not in ("all", "prompt", "response"):
        raise ValueError(f"register_ragged_column({name!r}): window={window!r} is none of 'all', 'prompt', 'response'.")
    WINDOWS[name] = window


def window_layouts(columns: Mapping[str, Tensor | Ragged]) -> dict[str, Layout]:
    """Return the layout of each window: by the attention mask, else of a packed column of that window."""
    packed = {name: column.layout for name, column in columns.items() if isinstance(column, Ragged)}
    layouts = {WINDOWS[name]: layout for name, layout in packed.items() if name in WINDOWS}
    mask = columns.get("attention_mask")
    if mask is None or len(mask.shape) != 2:
        return layouts
    layouts["all"] = whole = packed["attention_mask"] if isinstance(mask, Ragged) else Layout.from_mask(mask)
    shapes = {name: columns[name].shape for name in ("prompts", "responses") if name in columns}
    widths = {name: shape[1] for name, shape in shapes.items() if len(shape) > 1}
    if sum(widths.values()) > whole.width or (len(widths) == 2 and sum(widths.values()) != whole.width):
        return layouts  # a mask of prompts alone holds no responses
    if "prompts" in widths:
        layouts["prompt"] = whole.window(0, widths["prompts"])
    if "responses" in widths:
        layouts["response"] = whole.window(whole.width - widths["responses"], whole.width)
    return layouts


def pack_column(name: str, column: Tensor, layouts: Mapping[str, Layout], pad_token_id: int | None) -> Ragged | None:
    """Pack a padded column; None if it is unknown, its window is, or its shape is not that of its window."""
    layout = layouts.get(WINDOWS.get(name, ""))
    if layout is None or column.shape[:2] != (len(layout), layout.width):
        return None
    fill: Fill = "position" if name == "position_ids" else 0
    if name in _TOKEN_IDS and column.ndim == 2:
        fill = pad_token_id or 0
        padded_rows = (layout.lengths < layout.width).nonzero()[:1]
        if len(padded_rows):  # the value that its padding has
            row = int(padded_rows)
            fill = column[row, 0 if layout.starts[row] > 0 else layout.lengths[row]].item()
    return Ragged.from_padded(column, layout, fill)


# -- Equality in value of two columns or entries of ``meta_info``, and their first difference ------------------------


def first_difference(a, b) -> str | None:
    """Return a text on how ``a`` and ``b`` differ, with the first row; None if they are equal.

    A packed and a padded column are compared on the valid tokens of the packed one.
    """
    if isinstance(a, Ragged) != isinstance(b, Ragged) and a.shape == b.shape:
        layout = a.layout if isinstance(a, Ragged) else b.layout
        a, b = (column if isinstance(column, Ragged) else Ragged.from_padded(column, layout) for column in (a, b))
    if is_same(a, b):
        return None
    if not (getattr(a, "shape", ()) and getattr(b, "shape", ())):
        return f"{_short(a)} and {_short(b)}"
    kinds = [(c.values.dtype if isinstance(c, Ragged) else c.dtype, tuple(c.shape)) for c in (a, b)]
    if kinds[0] != kinds[1]:
        return " and ".join(f"{dtype} {shape}" for dtype, shape in kinds)
    rows = (column.rows() if isinstance(column, Ragged) else column for column in (a, b))
    for i, (x, y) in enumerate(zip(*rows, strict=True)):
        if not is_same(x, y):
            return f"first at row {i}, {_short(x)} and {_short(y)}"
    return "equal rows, but at other positions of the window"


def is_same(a, b) -> bool:
    """Equal in value. In arrays and nested objects NaN equals NaN; in tensors it does not, as in ``torch.equal``."""
    if a is b:
        return True
    if isinstance(a, Ragged) and isinstance(b, Ragged):
        return a.layout == b.layout and is_same(a.values, b.values)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.dtype == object or b.dtype == object:
            return a.shape == b.shape and all(map(is_same, a.flat, b.flat))
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc")
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_same, a, b))
    return bool(np.all(a == b)) or (isinstance(a, float | np.floating) and bool(a != a and b != b))


def _short(value) -> str:
    text = repr(value.tolist() if isinstance(value, Tensor | np.ndarray) else value)
    return text if len(text) <= 80 else text[:77] + "..."
