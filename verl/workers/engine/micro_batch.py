"""Rows of a batch laid out for one forward pass: side by side, right padded, or packed one behind another.

Only the positions that predict response tokens are read. Packed rows that begin with one prompt can run it once: the
first of them runs whole, the others their responses alone, which see the prompt's keys in the first row. Knows columns
and lengths, and passes image tensors on; not models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import torch
from torch import Tensor

from verl.batch.balancing import Prompts, inverse_permutation
from verl.batch.ragged import Layout, Ragged, select_columns, slice_columns
from verl.models.attention.packing import Packing
from verl.models.attention.sequence_parallel import Group, SequenceShare
from verl.models.multimodal import collate_vision_inputs
from verl.protocol import DataProto


@dataclass(frozen=True)
class MicroBatch:
    """b rows of a batch on the device, with r response tokens at most and t in total.

    Padded rows are l tokens wide; packed rows are T tokens in total.
    """

    input_ids: Tensor
    """(b, l), right padded; packed: (1, T)."""
    position_ids: Tensor | None
    """(b, l), or None where every row counts from 0; packed: (1, T), each row counting anew."""
    cells: Tensor
    """(t,): positions in the flattened ``input_ids`` that predict a response token: the one before each. With shared
    prompts some repeat: the last token of a prompt predicts the first of several responses."""
    targets: Tensor
    """(t,): the response tokens."""
    slots: Tensor
    """(t,): their places in the flattened (b * r,)."""
    shape: tuple[int, int]
    """(b, r); r is at least 1."""
    columns: Mapping[str, Tensor]
    """What the loss reads, each (b, r) or, for columns of one value a row, (b, ...)."""
    vision_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Image tensors of all rows, of shared prompts once, joined in their order; empty where no row has an image."""
    packing: Packing | None = None
    """How packed rows lie in the sequence and which tokens each sees; None for padded rows."""
    share: SequenceShare | None = None
    """Which part of the sequence this rank runs; None: all of it."""

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
            packing=None if self.packing is None else self.packing.to(device),
            share=None if self.share is None else self.share.to(device),
        )

    def shared_by(self, group: Group, rank: int, size: int) -> MicroBatch:
        """Packed rows cut over the ranks of ``group``, whatever tokens the cut goes through; in host memory."""
        extra = -self.input_ids.shape[1] % size
        counted = torch.arange(extra)[None]
        share = SequenceShare.of(self.cells, self.input_ids.shape[1] + extra, group, rank, size)
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, torch.zeros_like(counted)], 1),
            position_ids=torch.cat([self.position_ids, counted], 1),
            packing=self.packing.padded_to(size),
            share=share,
        )

    def with_dummy_row(self, token: int, vision_inputs: Mapping[str, Tensor]) -> MicroBatch:
        """One row more, of an image (or video) of one ``token``, which no cell reads."""
        behind = self.packing is not None
        row = self.input_ids.new_zeros(1, 1 if behind else self.input_ids.shape[1])
        row[0, 0] = token
        positions = self.position_ids
        if positions is not None:
            positions = torch.cat([positions, positions.new_zeros(1, row.shape[1])], dim=int(behind))
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, row], dim=int(behind)),
            position_ids=positions,
            vision_inputs={name: tensor.to(row.device) for name, tensor in vision_inputs.items()}
            | dict(self.vision_inputs),
            packing=self.packing.followed_by(1) if behind else None,
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


def find_prompts(data: DataProto) -> Prompts:
    """Which rows begin with the same prompt: equal tokens, positions and images before their first response token.

    A row without a response shares with none.
    """
    images = _image_keys(vision_rows(data))
    data = data.packed()
    ids = data.ragged("input_ids")
    lengths = _tokens_before_response(ids.layout, data.ragged("responses").layout).tolist()
    empty = (data.ragged("responses").layout.lengths == 0).tolist()
    positions = _uneven_positions(data, ids)
    columns = [ids.rows()] if positions is None else [ids.rows(), positions.rows()]
    known: dict[object, int] = {}
    numbers = []
    for row, length in enumerate(lengths):
        key = row if empty[row] else (images[row], *(column[row][:length].numpy().tobytes() for column in columns))
        known.setdefault(key, len(known))
        numbers.append(known[key])
    return Prompts(numbers, lengths)


def _image_keys(rows: Sequence[Mapping[str, Tensor] | None]) -> list[object]:
    """Equal for equal images. Siblings mostly hold one and the same object, which is looked through once."""
    known: dict[int, object] = {}
    for row in rows:
        if row and id(row) not in known:
            tensors = [torch.as_tensor(row[name]) for name in sorted(row)]
            digests = [blake2b(tensor.reshape(-1).view(torch.uint8).numpy()).digest() for tensor in tensors]
            known[id(row)] = *sorted(row), *(tensor.shape for tensor in tensors), *digests
    return [known[id(row)] if row else None for row in rows]


def cut_batch(
    data: DataProto,
    groups: list[list[int]],
    reads: Sequence[str] = (),
    device: torch.device | str = "cpu",
    packed: bool = False,
    prompts: Prompts | None = None,
) -> Cut:
    """Lay out the micro-batches that ``groups`` of row numbers name.

    Args:
        data: ``input_ids`` and ``responses``, packed or padded; ``position_ids`` if they do not count from 0;
            ``multi_modal_inputs`` if rows have images.
        groups: row numbers of each micro-batch, from ``plan_micro_batches``; every row once.
        reads: columns to hand to the loss; those that ``data`` has not are left out.
        packed: rows one behind another in one sequence, without padding.
        prompts: with ``packed``, from ``find_prompts``: a prompt that several rows of a micro-batch begin with runs
            once. None: every row runs whole.

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
        rows = seeing = order[first:last].tolist()
        if packed:
            leaders = None if prompts is None else _leaders([prompts.numbers[row] for row in rows])
            micro = _packed_micro_batch(part, before[first:last], leaders, columns)
            if leaders is not None:
                seeing = [row for place, row in enumerate(rows) if leaders[place] == place]
        else:
            micro = _micro_batch(part, before[first:last], columns)
        images = collate_vision_inputs([vision[row] for row in seeing])
        micro_batches.append(replace(micro, vision_inputs=images).to(device))
        first = last
    return Cut(micro_batches, order, responses.layout)


def _micro_batch(part: Mapping[str, Ragged], before: Tensor, columns: Mapping[str, Tensor]) -> MicroBatch:
    input_ids, responses = part["input_ids"].trim_padding(), part["responses"]
    response = responses.layout.trimmed
    # the same runs in the window of the rows, moved to the token before each response token
    predicting = Layout(before - 1, response.lengths, input_ids.shape[1])
    return MicroBatch(
        input_ids=input_ids,
        position_ids=part["position_ids"].trim_padding() if "position_ids" in part else None,
        cells=predicting.valid_positions,
        targets=responses.values,
        slots=response.valid_positions,
        shape=(len(response), max(response.width, 1)),
        columns=columns,
    )


def _packed_micro_batch(
    part: Mapping[str, Ragged], before: Tensor, leaders: Tensor | None, columns: Mapping[str, Tensor]
) -> MicroBatch:
    """Rows one behind another; those that another row leads leave their prompt to it.

    Args:
        before: (b,) tokens of each row before its response.
        leaders: (b,) of each row, the row that runs its prompt, itself or an earlier one; None: each its own.
    """
    ids, responses = part["input_ids"], part["responses"]
    lengths, offsets, response = ids.layout.lengths, ids.layout.offsets[:-1], responses.layout.trimmed
    positions = part["position_ids"].values if "position_ids" in part else _runs(torch.zeros_like(lengths), lengths)
    input_ids, cells = ids.values, _runs(offsets + before - 1, response.lengths)
    packing = None
    if leaders is not None:
        runs, place = _run_once(lengths, before, leaders)
        input_ids, positions, cells = input_ids[runs], positions[runs], place[cells]
        kept = torch.where(leaders == torch.arange(len(leaders)), lengths, lengths - before)
        packing = Packing.sharing(kept.tolist(), place.split(lengths.tolist()))
    return MicroBatch(
        input_ids=input_ids[None],
        position_ids=positions[None],
        cells=cells,
        targets=responses.values,
        slots=response.valid_positions,
        shape=(len(response), max(response.width, 1)),
        columns=columns,
        packing=packing or Packing.of_lengths(lengths.tolist()),
    )


def _leaders(prompts: Sequence[int]) -> Tensor | None:
    """(b,): the first row with each row's prompt; None where no two rows have one prompt."""
    first: dict[int, int] = {}
    leaders = [first.setdefault(prompt, row) for row, prompt in enumerate(prompts)]
    return None if len(first) == len(leaders) else torch.tensor(leaders)


def _run_once(lengths: Tensor, before: Tensor, leaders: Tensor) -> tuple[Tensor, Tensor]:
    """Of whole rows one behind another, which tokens run, and at which place among these every token is found."""
    offsets = lengths.cumsum(0) - lengths
    is_led = leaders != torch.arange(len(leaders))
    skipped = torch.where(is_led, before, 0)
    runs = _runs(offsets + skipped, lengths - skipped)
    place = torch.empty(int(lengths.sum()), dtype=torch.int64)
    place[runs] = torch.arange(len(runs))
    # a leader is led by none, so its prompt has places already
    place[_runs(offsets, skipped)] = place[_runs(offsets[leaders], skipped)]
    return runs, place


def _runs(firsts: Tensor, lengths: Tensor) -> Tensor:
    """Count on from each of ``firsts`` (n,) for ``lengths`` (n,) steps, one run after the other."""
    shift = (firsts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
    return shift + torch.arange(len(shift))


def _tight(column: Ragged) -> Tensor:
    tensor = column.trim_padding()
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
