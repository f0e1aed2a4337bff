"""Positions of the valid tokens of rows of unequal length in a padded window; tensors as numpy arrays and back.

A padded column is (B, width); each row is one run of valid tokens, with padding left and right. Columns of one batch
share their `Layout` object, so what is derived from it (offsets, valid positions) is derived once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

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
