"""Rows of a batch laid side by side for one forward pass.

Rows are right padded to the longest among them; only the positions that predict response tokens are read. Knows
columns and lengths, and passes image tensors on; not models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from verl.models.multimodal import collate_vision_inputs
from verl.protocol import DataProto
from verl.utils.ragged import Layout, Ragged, select_columns, slice_columns
from verl.utils.seqlen_balancing import inverse_permutation


@dataclass(frozen=True)
class MicroBatch:
    """b rows of a batch on the device, l tokens wide, with r response tokens at most and t in total."""

    input_ids: Tensor
    """(b, l), right padded."""
    position_ids: Tensor | None
    """(b, l), or None where every row counts from 0."""
    cells: Tensor
    """(t,): positions in the flattened (b * l,) that predict a response token: the one before each."""
    targets: Tensor
    """(t,): the response tokens."""
    slots: Tensor
    """(t,): their places in the flattened (b * r,)."""
    shape: tuple[int, int]
    """(b, r); r is at least 1."""
    columns: Mapping[str, Tensor]
    """What the loss reads, each (b, r) or, for columns of one value a row, (b, ...)."""
    vision_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Image tensors of all rows, joined in their order; empty where no row has an image."""

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on another device."""
        position_ids = None if self.position_ids is None else self.position_ids.to(device)
        return MicroBatch(
            input_ids=self.input_ids.to(device),
            position_ids=position_ids,
            cells=self.cells.to(device),
            targets=self.targets.to(device),
            slots=self.slots.to(device),
            shape=self.shape,
            columns={name: column.to(device) for name, column in self.columns.items()},
            vision_inputs={name: tensor.to(device) for name, tensor in self.vision_inputs.items()},
        )

    def with_dummy_row(self, token: int, vision_inputs: Mapping[str, Tensor]) -> MicroBatch:
        """One row more, of an image of one ``token``, which no cell reads."""
        row = self.input_ids.new_zeros(1, self.input_ids.shape[1])
        row[0, 0] = token
        positions = self.position_ids
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, row]),
            position_ids=None if positions is None else torch.cat([positions, positions.new_zeros(1, row.shape[1])]),
            vision_inputs={name: tensor.to(row.device) for name, tensor in vision_inputs.items()},
        )

    def tight(self, flat: Tensor | None) -> Tensor | None:
        """(t,) to (b, r), zero at the padding; differentiable."""
        if flat is None:
            return None
        rows, width = self.shape
        return flat.new_zeros(rows * width).scatter(0, self.slots, flat).view(rows, width)


@dataclass(frozen=True)
class Cut:
    """A batch cut into micro-batches."""

    micro_batches: list[MicroBatch]
    order: Tensor
    """Rows of the batch in the order the micro-batches hold them."""
    response: Layout
    """Layout of the batch's response columns."""

    def restore(self, parts: Sequence[Tensor]) -> Ragged:
        """Join flat results (t,) of the micro-batches into a response column in the batch's row order."""
        joined = Ragged(torch.cat(list(parts)).cpu(), self.response.select(self.order))
        return Ragged(joined.select(inverse_permutation(self.order)).values, self.response)


VISION_COLUMN = "multi_modal_inputs"
"""Object column: of each row what the model's processor made of its images, a dict of tensors, or nothing."""


def vision_rows(data: DataProto) -> list[Mapping[str, Tensor] | None]:
    """The image tensors of each row; None for a row without images."""
    rows = data.non_tensor_batch.get(VISION_COLUMN)
    return [None] * len(data) if rows is None else [row or None for row in rows]


def row_lengths(data: DataProto) -> list[int]:
    """Real tokens of each row, prompt and response."""
    return data.ragged("input_ids").layout.lengths.tolist()


def cut_batch(
    data: DataProto, groups: list[list[int]], reads: Sequence[str] = (), device: torch.device | str = "cpu"
) -> Cut:
    """Lay out the micro-batches that ``groups`` of row numbers name.

    Args:
        data: ``input_ids`` and ``responses``, packed or padded; ``position_ids`` if they do not count from 0;
            ``multi_modal_inputs`` if rows have images.
        groups: row numbers of each micro-batch, from ``plan_micro_batches``; every row once.
        reads: columns to hand to the loss; those that ``data`` has not are left out.

    Raises:
        ValueError: if a response begins a row, so that nothing stands before it to predict it from.
    """
    names = [name for name in dict.fromkeys(reads) if name in data]
    vision = vision_rows(data)
    data = data.packed()
    ids, responses = data.ragged("input_ids"), data.ragged("responses")
    order = torch.tensor([row for group in groups for row in group])
    before = _tokens_before_response(ids.layout, responses.layout)[order]

    ragged, dense = {"input_ids": ids, "responses": responses}, {}
    positions = _uneven_positions(data, ids)
    if positions is not None:
        ragged["position_ids"] = positions
    for name in names:
        column = data.ragged(name) if _is_packed(data, name) else None
        if column is not None and column.layout == responses.layout:
            ragged[name] = column
        else:
            dense[name] = data.column(name)[order]
    # laid out in host memory: every length read back from a device would wait for the device
    ragged = select_columns(ragged, order)

    micro_batches, first = [], 0
    for last in torch.tensor([len(group) for group in groups]).cumsum(0).tolist():
        part = slice_columns(ragged, first, last)
        columns = {name: _tight(part[name]) if name in part else dense[name][first:last] for name in names}
        images = collate_vision_inputs([vision[row] for row in order[first:last].tolist()])
        micro_batches.append(replace(_micro_batch(part, before[first:last], columns), vision_inputs=images).to(device))
        first = last
    return Cut(micro_batches, order, responses.layout)


def _micro_batch(part: Mapping[str, Ragged], before: Tensor, columns: Mapping[str, Tensor]) -> MicroBatch:
    input_ids, responses = part["input_ids"].tight(), part["responses"]
    response = responses.layout.tight
    # the same runs in the window of the rows, moved to the token before each response token
    predicting = Layout(before - 1, response.lengths, input_ids.shape[1])
    return MicroBatch(
        input_ids=input_ids,
        position_ids=part["position_ids"].tight() if "position_ids" in part else None,
        cells=predicting.cells,
        targets=responses.values,
        slots=response.cells,
        shape=(len(response), max(response.width, 1)),
        columns=columns,
    )


def _tight(column: Ragged) -> Tensor:
    tensor = column.tight()
    return tensor if tensor.shape[1] else tensor.new_zeros(tensor.shape[0], 1, *tensor.shape[2:])


def _is_packed(data: DataProto, name: str) -> bool:
    try:
        data.ragged(name)
    except ValueError:  # of no known window: one value a row
        return False
    return True


def _tokens_before_response(whole: Layout, response: Layout) -> Tensor:
    """(B,): real tokens of each row that stand before its first response token; 1 for rows without a response."""
    before = whole.width - response.width + response.starts - whole.starts
    missing = (before < 1) & (response.lengths > 0)
    if missing.any():
        raise ValueError(
            f"row {int(missing.nonzero()[0])} has no prompt token before its response, so its first response token "
            "cannot be scored: give every prompt at least one token"
        )
    return torch.where(response.lengths > 0, before, 1)


def _uneven_positions(data: DataProto, ids: Ragged) -> Ragged | None:
    """``position_ids`` if they do anything but count each row from 0, which every model does by itself."""
    if "position_ids" not in data:
        return None
    positions = data.ragged("position_ids")
    firsts = ids.layout.offsets[:-1].repeat_interleave(ids.layout.lengths)
    counted = torch.arange(ids.layout.total) - firsts
    return None if torch.equal(positions.values, counted.to(positions.values.dtype)) else positions
