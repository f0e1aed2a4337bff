"""Columns without padding: the valid tokens of rows of unequal length, and their positions in the padded window.

A padded column is (B, width); each row is one run of valid tokens, with padding left and right. ``Layout`` holds the
positions of the runs, ``Ragged`` their values one after the other: T = sum of lengths values instead of B * width.
Columns of one batch share their Layout object, so what is derived from it (offsets, valid positions) is derived once.

Knows torch and numpy only. Which columns of a batch are ragged, and by which mask, is in `WINDOWS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from typing import Literal

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
        return values.repeat_interleave(self.lengths, output_size=self.total)

    @cached_property
    def valid_positions(self) -> Tensor:
        """(T,) int64: position of each valid token in the flattened (B * width) window."""
        outside = (self.starts < 0) | (self.lengths < 0) | (self.starts + self.lengths > self.width)
        if outside.any():  # an index too large would land in the next row, unseen
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
        return Layout._from_wire, (self.starts.cpu().numpy(), self.lengths.cpu().numpy(), self.width)

    @staticmethod
    def _from_wire(starts: np.ndarray, lengths: np.ndarray, width: int) -> Layout:
        return Layout(tensor_from_numpy(starts), tensor_from_numpy(lengths), width)


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
        return replace(self, layout=self.layout.trimmed).padded()

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

    def __reduce__(self):
        return Ragged._from_wire, (*tensor_to_numpy(self.values), self.layout, self.fill)

    @staticmethod
    def _from_wire(array: np.ndarray, dtype: torch.dtype | None, layout: Layout, fill: Fill) -> Ragged:
        return Ragged(tensor_from_numpy(array, dtype), layout, fill)


# Several columns at once: each layout is worked out once, and columns that shared a layout share the new one.
def select_columns(columns: Mapping[str, Ragged], idx: Tensor) -> dict[str, Ragged]:
    """Rows ``idx`` of every column, copied."""
    idx = torch.as_tensor(idx, dtype=torch.int64)

    @cache
    def plan(layout: Layout) -> tuple[Layout, Tensor]:
        local = idx.to(layout.starts.device)
        chosen = layout.select(local)
        return chosen, chosen._count_from(layout.offsets[local])

    def chosen(column: Ragged) -> Ragged:
        layout, positions = plan(column.layout)
        return Ragged(column.values.index_select(0, positions.to(column.values.device)), layout, column.fill)

    return {name: chosen(column) for name, column in columns.items()}


def slice_columns(columns: Mapping[str, Ragged], first: int, last: int) -> dict[str, Ragged]:
    """Rows [first, last) of every column, as views."""

    @cache
    def plan(layout: Layout) -> tuple[Layout, int, int]:
        begin, end, _ = slice(first, last).indices(len(layout))
        end = max(begin, end)
        return layout.slice(begin, end), int(layout.offsets[begin]), int(layout.offsets[end])

    def sliced(column: Ragged) -> Ragged:
        layout, begin, end = plan(column.layout)
        return Ragged(column.values[begin:end], layout, column.fill)

    return {name: sliced(column) for name, column in columns.items()}


def cat_columns(parts: Sequence[Mapping[str, Ragged]]) -> dict[str, Ragged]:
    """Join the rows of all parts column by column; every part holds the same names. Fill of the first part."""
    join = cache(lambda *layouts: Layout.cat(layouts))

    def joined(name: str) -> Ragged:
        pieces = [part[name] for part in parts]
        layout = join(*(piece.layout for piece in pieces))
        return Ragged(torch.cat([piece.values for piece in pieces]), layout, pieces[0].fill)

    return {name: joined(name) for name in parts[0]}


def move_columns(columns: Mapping[str, Ragged], device: torch.device | str) -> dict[str, Ragged]:
    move = cache(lambda layout: layout.to(device))
    return {name: Ragged(c.values.to(device), move(c.layout), c.fill) for name, c in columns.items()}


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
    lengths = torch.stack([prompt.layout.lengths, response.layout.lengths], 1)
    # prompt and response of a row alternate in the packed order: filled by two masks, without a loop over rows
    is_response = torch.tensor([False, True]).repeat(len(lengths)).repeat_interleave(lengths.flatten())
    tokens = torch.empty(len(is_response), dtype=torch.int64)
    tokens[is_response] = response.values
    tokens[~is_response] = prompt.values
    whole = Layout(prompt.layout.starts, lengths.sum(1), prompt.layout.width + response.layout.width)
    positions = torch.arange(whole.total) - whole.spread(whole.offsets[:-1])
    return {
        "input_ids": Ragged(tokens, whole, response.fill),
        "attention_mask": Ragged(torch.ones_like(tokens), whole),
        "position_ids": Ragged(positions, whole, "position"),
    }


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
