"""Values of a column as they are sent: bit for bit the same, in fewer bytes where that can be seen at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from verl.batch.layout import Layout, tensor_from_numpy, tensor_to_numpy

Encoded = tuple[str, np.ndarray, torch.dtype | None, torch.dtype | None]

SAMPLE = 256
"""Tokens looked at first, before a look at all."""

_BLOCK = 1 << 18
"""Tokens looked at together."""


def is_constant(values: Tensor) -> bool:
    """Whether the values are one, repeated in place."""
    return values.ndim == 1 and len(values) > 0 and values.stride(0) == 0


def form(values: Tensor, layout: Layout) -> Encoded:
    """Return how the values are sent, what is sent of them, its dtype where numpy has none, and theirs if it differs.

    ``all``: the one value that they have in common. ``row``: one a row. ``rare``: those that are not 0, and their
    places. ``each``: every one.
    """
    if is_constant(values):
        return "all", *tensor_to_numpy(values[:1]), None
    if not values.numel():
        return "each", *tensor_to_numpy(values), None
    if values.ndim == 1 and not values.dtype.is_complex and (found := _repeated(values, layout)):
        return found
    return "each", *tensor_to_numpy(values), None


def carrier_of(values: Tensor) -> torch.dtype | None:
    """The smallest dtype that holds these integers; None if it is theirs, or they are none."""
    if values.dtype not in (torch.int16, torch.int32, torch.int64) or not values.numel():
        return None
    low, high = values.aminmax()
    for dtype in (torch.int8, torch.int16, torch.uint16, torch.int32):
        limits = torch.iinfo(dtype)
        if dtype.itemsize < values.element_size() and limits.min <= int(low) and int(high) <= limits.max:
            return dtype
    return None


def encode(values: Tensor, layout: Layout) -> Encoded:
    """Return how the values are sent: as `form`, integers in the fewest bytes that hold them."""
    values = values.detach().cpu()
    layout = layout if layout.lengths.device.type == "cpu" else layout.to("cpu")
    kind, array, carried, dtype = form(values, layout)
    if kind == "each" and (carrier := carrier_of(values)):
        return kind, *tensor_to_numpy(values.to(carrier)), values.dtype
    return kind, array, carried, dtype


def _repeated(values: Tensor, layout: Layout) -> Encoded | None:
    """Return what `encode` does if the values are one, or one a row, or nearly all 0; else None."""
    bits = values.contiguous().view(_INTEGERS[values.element_size()])  # -0.0 is not 0.0, and NaN is itself
    firsts = layout.offsets[:-1].clamp(max=len(values) - 1)
    rows = int(torch.searchsorted(layout.offsets[1:], SAMPLE)) + 1
    sampled = layout.slice(0, rows)
    if torch.equal(bits[: sampled.total], sampled.spread(bits[firsts[:rows]])):
        low, high = bits.aminmax()
        if low == high:
            return "all", *tensor_to_numpy(values[:1]), None
        if _is_one_a_row(bits, bits[firsts], layout):
            return "row", *tensor_to_numpy(values[firsts]), None
    if 16 * int(torch.count_nonzero(bits[:SAMPLE])) < len(bits[:SAMPLE]) and len(values) < 1 << 31:
        places = bits.nonzero().squeeze(1)
        if 4 * len(places) < len(values):
            return rare(places, values[places])
    return None


def rare(places: Tensor, values: Tensor) -> Encoded:
    """Values (n,) at these places (n,) among others that are 0."""
    bits = values.detach().cpu().contiguous().view(_INTEGERS[values.element_size()])
    return (
        "rare",
        np.concatenate([places.cpu().int().numpy().view(np.uint8), bits.numpy().view(np.uint8)]),
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


def decode(encoded: Encoded, layout: Layout) -> Tensor:
    """Undo `encode`."""
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
