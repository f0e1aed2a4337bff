"""Micro-batches: rows of a batch laid out for one forward pass, right padded or packed into one sequence.

Only the positions that predict response tokens are scored. Packed rows with the same prompt can run it once: the first
of them runs whole, the others only their responses, which attend to the prompt in the first row. Knows columns and
lengths, and passes image tensors on; not models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from verl.batch.balancing import Prompts, inverse_permutation
from verl.batch.layout import Layout
from verl.batch.ragged import Column, CountedPositions, Ragged, select_columns, slice_columns
from verl.models.attention.kernels import Packing
from verl.models.attention.sequence_parallel import Group, SequenceShard
from verl.models.multimodal import (
    VISION_INPUTS,
    check_placeholders,
    collate_vision_inputs,
    dummy_vision_inputs,
    has_images_and_videos,
    image_token,
    is_vision_language,
)
from verl.protocol import DataProto

# -- Rows with images or videos: their tensors in a batch, keys of equal images, dummies for ranks without any -------

_NAMED_ROWS = 4

VISION_COLUMN = "multi_modal_inputs"
"""Object column: the processor's image tensors of each row, a dict, or nothing."""


def vision_rows(data: DataProto) -> list[Mapping[str, Tensor] | None]:
    """Return the image tensors of each row; None for a row without images."""
    rows = data.non_tensor_batch.get(VISION_COLUMN)
    return [None] * len(data) if rows is None else [row or None for row in rows]


def image_keys(rows: Sequence[Mapping[str, Tensor] | None]) -> list[object]:
    """Return equal keys for equal images. Rows of a group mostly hold one object, which is hashed once."""
    known: dict[int, object] = {}
    for row in rows:
        if row and id(row) not in known:
            tensors = [torch.as_tensor(row[name]) for name in sorted(row)]
            digests = [blake2b(tensor.reshape(-1).view(torch.uint8).numpy().data).digest() for tensor in tensors]
            known[id(row)] = *sorted(row), *(tensor.shape for tensor in tensors), *digests
    return [known[id(row)] if row else None for row in rows]


def check_vision_rows(model: Any, data: DataProto) -> tuple[bool, bool]:
    """Return whether any row has images, and whether any has videos, after checking placeholders.

    Raises:
        ValueError: rows have images and the model reads text only, or placeholders do not match the images.
    """
    rows = vision_rows(data)
    if is_vision_language(model.config):
        check_placeholders(model.config, data.ragged("input_ids").rows(), rows)
    elif any(rows):
        raise ValueError(f"the batch has images, and {type(model).__name__} is a model of text only")
    return has_images_and_videos(rows)


def add_dummy_images(micro: MicroBatch, config: Any, kinds: Sequence[str]) -> MicroBatch:
    """Append a row with an image (or video) of one token for each of ``kinds`` that ``micro`` lacks.

    All ranks gather the vision tower's weights together, once for images and once for videos. The rows are outside the
    valid positions.
    """
    for kind in kinds:
        if VISION_INPUTS[kind][0] in micro.vision_inputs:
            continue
        is_packed = micro.packing is not None
        row = micro.input_ids.new_zeros(1, 1 if is_packed else micro.input_ids.shape[1])
        row[0, 0] = image_token(config, kind)
        positions = micro.position_ids
        if positions is not None:
            positions = torch.cat([positions, positions.new_zeros(1, row.shape[1])], dim=int(is_packed))
        dummy = {name: tensor.to(row.device) for name, tensor in dummy_vision_inputs(config, kind).items()}
        micro = replace(
            micro,
            input_ids=torch.cat([micro.input_ids, row], dim=int(is_packed)),
            position_ids=positions,
            vision_inputs=dummy | dict(micro.vision_inputs),
            packing=None if micro.packing is None else micro.packing.append_segment(1),
        )
    return micro


@dataclass(frozen=True)
class MicroBatch:
    """b rows of a batch on the device, with r response tokens at most and t in total.

    Padded rows are l tokens wide; packed rows are T tokens in total.
    """

    input_ids: Tensor
    """(b, l), right padded; packed: (1, T)."""
    position_ids: Tensor | None
    """(b, l), or None where every row counts from 0; packed: (1, T), from 0 in each row."""
    valid_positions: Tensor
    """(t,): positions in the flattened ``input_ids`` that predict a response token: the one before each. With shared
    prompts some repeat: the last token of a prompt predicts the first of several responses."""
    targets: Tensor
    """(t,): the response tokens."""
    response: Layout
    """Rows of the response tokens, in a window of r columns; r is at least 1."""
    columns: Mapping[str, Column]
    """Columns of the loss: the values (t, ...) of each response token in ``response``, or one value a row, (b, ...)."""
    vision_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Image tensors of all rows in order, those of shared prompts once; empty without images."""
    packing: Packing | None = None
    """Boundaries of packed rows and the tokens they attend to; None for padded rows."""
    shard: SequenceShard | None = None
    """Part of the sequence that this rank runs; None: all of it."""

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return a copy on another device."""
        position_ids = None if self.position_ids is None else self.position_ids.to(device)
        response = self.response.to(device)

        def moved(column: Column) -> Column:
            if isinstance(column, Ragged):  # one layout for all
                return Ragged(column.values.to(device), response, column.fill)
            return column.to(device)

        return MicroBatch(
            input_ids=self.input_ids.to(device),
            position_ids=position_ids,
            valid_positions=self.valid_positions.to(device),
            targets=self.targets.to(device),
            response=response,
            columns={name: moved(column) for name, column in self.columns.items()},
            vision_inputs={name: tensor.to(device) for name, tensor in self.vision_inputs.items()},
            packing=None if self.packing is None else self.packing.to(device),
            shard=None if self.shard is None else self.shard.to(device),
        )

    def sharded_over(self, group: Group, rank: int, size: int) -> MicroBatch:
        """Shard packed rows over the ranks of ``group``, at any token; in host memory."""
        # every rank runs as many tokens: the padding is a segment of its own, which nothing attends to
        extra = -self.input_ids.shape[1] % size
        padding = torch.arange(extra)[None]
        shard = SequenceShard.of(self.valid_positions, self.input_ids.shape[1] + extra, group, rank, size)
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, torch.zeros_like(padding)], 1),
            position_ids=torch.cat([self.position_ids, padding], 1),
            packing=self.packing.append_segment(extra) if extra else self.packing,
            shard=shard,
        )


@dataclass(frozen=True)
class MicroBatches:
    """Micro-batches of a batch, and the row order that joins their results."""

    micro_batches: list[MicroBatch]
    order: Tensor
    """Rows of the batch in the order the micro-batches hold them."""
    response: Layout
    """Layout of the batch's response columns."""

    def restore(self, parts: Sequence[Tensor]) -> Ragged:
        """Join results (t,) of the micro-batches into a response column in the batch's row order."""
        joined = Ragged(torch.cat(list(parts)).cpu(), self.response.select(self.order))
        return Ragged(joined.select(inverse_permutation(self.order)).values, self.response)


def row_names(batches: MicroBatches, data: DataProto) -> list[str]:
    """The rows of each micro-batch in a few words, for reports: how many, and the first by ``uid`` or by number."""
    uids, order = data.non_tensor_batch.get("uid"), batches.order.tolist()
    found, first = [], 0
    for micro in batches.micro_batches:
        rows = order[first : first + len(micro.response)]
        first += len(rows)
        names = [f"number {row}" if uids is None else str(uids[row]) for row in rows[:_NAMED_ROWS]]
        found.append(f"{len(rows)} rows, the first of them {', '.join(names)}" if rows else "no rows of its own")
    return found


def find_shared_prompts(data: DataProto) -> Prompts:
    """Find the rows with the same prompt: equal tokens, positions and images before their first response token.

    A row without a response shares its prompt with none.
    """
    images = image_keys(vision_rows(data))
    data = data.packed()
    ids = data.ragged("input_ids")
    lengths = _tokens_before_response(ids.layout, data.ragged("responses").layout).tolist()
    empty = (data.ragged("responses").layout.lengths == 0).tolist()
    positions = _uneven_positions(data, ids)
    columns = [ids.rows()] if positions is None else [ids.rows(), positions.rows()]
    # equal tokens are not enough: with other images or positions the prompt's states differ
    known: dict[object, int] = {}
    numbers = []
    for row, length in enumerate(lengths):
        key = row if empty[row] else (images[row], *(column[row][:length].numpy().tobytes() for column in columns))
        known.setdefault(key, len(known))
        numbers.append(known[key])
    return Prompts(numbers, lengths)


def split_batch(
    data: DataProto,
    groups: list[list[int]],
    columns: Sequence[str] = (),
    device: torch.device | str = "cpu",
    packed: bool = False,
    prompts: Prompts | None = None,
) -> MicroBatches:
    """Split a batch into the micro-batches given as ``groups`` of row numbers.

    Args:
        data: ``input_ids`` and ``responses``, packed or padded; ``position_ids`` if they do not count from 0;
            ``multi_modal_inputs`` if rows have images.
        groups: row numbers of each micro-batch, from ``plan_micro_batches``; every row once.
        columns: names to pass to the loss; those missing in ``data`` are left out.
        packed: rows packed into one sequence, without padding.
        prompts: with ``packed``, from ``find_shared_prompts``: a prompt shared by rows of a micro-batch runs once.
            None: every row runs whole.

    Raises:
        ValueError: a row has no prompt token, from which its first response token is predicted.
    """
    names = [name for name in dict.fromkeys(columns) if name in data]
    vision = vision_rows(data) if VISION_COLUMN in data.non_tensor_batch else None
    data = data.packed()
    ids, responses = data.ragged("input_ids"), data.ragged("responses")
    order = torch.tensor([row for group in groups for row in group], dtype=torch.int64)
    # tokens of each row before its first response token, which the last of them predicts
    before = _tokens_before_response(ids.layout, responses.layout)[order]

    ragged, dense = {"input_ids": ids, "responses": responses}, {}
    uneven_positions = _uneven_positions(data, ids)
    if uneven_positions is not None:
        ragged["position_ids"] = uneven_positions
    for name in names:
        try:
            column = data.ragged(name)
        except ValueError:  # one value a row
            column = None
        if column is not None and column.layout == responses.layout:
            ragged[name] = column
        else:
            dense[name] = data.column(name)[order]
    # in host memory: every length read back from a device would synchronise with it
    ragged = select_columns(ragged, order)

    micro_batches, first = [], 0
    for last in torch.tensor([len(group) for group in groups]).cumsum(0).tolist():
        part, rows = slice_columns(ragged, first, last), order[first:last].tolist()
        response, owners = part["responses"].layout.trimmed, None
        if not response.width:  # where no row has a response, one column of padding stays for the loss to read
            response = replace(response, width=1)
        if packed:
            owners = None if prompts is None else _prompt_owners([prompts.numbers[row] for row in rows])
            tokens = _pack(part, before[first:last], owners)
        else:
            input_ids = part["input_ids"].trim_padding()
            # the responses' ranges in the whole rows, shifted by one to the predicting tokens
            predicting = Layout(before[first:last] - 1, response.lengths, input_ids.shape[1])
            positions = part["position_ids"].trim_padding() if "position_ids" in part else None
            tokens = input_ids, positions, predicting.valid_positions, None
        images = {}
        if vision is not None:  # those of a shared prompt once, with the row that runs it
            runs = [row for index, row in enumerate(rows) if owners is None or owners[index] == index]
            images = collate_vision_inputs([vision[row] for row in runs])
        micro = MicroBatch(
            *tokens[:3],
            targets=part["responses"].values,
            response=response,
            columns={
                name: part[name].with_layout(response) if name in part else dense[name][first:last] for name in names
            },
            vision_inputs=images,
            packing=tokens[3],
        )
        micro_batches.append(micro if micro.input_ids.device == torch.device(device) else micro.to(device))
        first = last
    return MicroBatches(micro_batches, order, responses.layout)


_Tokens = tuple[Tensor, Tensor | None, Tensor, Packing | None]
"""Input ids, position ids, valid positions and packing of a ``MicroBatch``."""


def _pack(part: Mapping[str, Ragged], before: Tensor, owners: Tensor | None) -> _Tokens:
    """Pack rows into one sequence; a prompt shared by several rows runs once, in the row that owns it.

    Args:
        before: (b,) tokens of each row before its response.
        owners: (b,) row that runs each row's prompt, itself or an earlier one; None: each its own.
    """
    ids = part["input_ids"]
    lengths, offsets = ids.layout.lengths, ids.layout.offsets[:-1]
    positions = part["position_ids"].values if "position_ids" in part else _ranges(torch.zeros_like(lengths), lengths)
    input_ids, valid_positions = ids.values, _ranges(offsets + before - 1, part["responses"].layout.lengths)
    packing = Packing.of_lengths(lengths.tolist())
    if owners is not None:
        kept_tokens, index = _deduplicate_prompts(lengths, before, owners)
        input_ids, positions, valid_positions = input_ids[kept_tokens], positions[kept_tokens], index[valid_positions]
        q_lengths = torch.where(owners == torch.arange(len(owners)), lengths, lengths - before)
        packing = Packing.with_shared_keys(q_lengths.tolist(), index.split(lengths.tolist()))
    return input_ids[None], positions[None], valid_positions, packing


def _prompt_owners(prompts: Sequence[int]) -> Tensor | None:
    """(b,): the first row with each row's prompt; None where all prompts differ."""
    first: dict[int, int] = {}
    owners = [first.setdefault(prompt, row) for row, prompt in enumerate(prompts)]
    return None if len(first) == len(owners) else torch.tensor(owners)


def _deduplicate_prompts(lengths: Tensor, before: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens of packed rows run when each prompt runs once, and the index of every token among them."""
    offsets = lengths.cumsum(0) - lengths
    is_duplicate = owners != torch.arange(len(owners))
    skipped = torch.where(is_duplicate, before, 0)
    kept_tokens = _ranges(offsets + skipped, lengths - skipped)
    index = torch.empty(int(lengths.sum()), dtype=torch.int64)
    index[kept_tokens] = torch.arange(len(kept_tokens))
    # an owner runs its own prompt, so those tokens have indices already
    index[_ranges(offsets, skipped)] = index[_ranges(offsets[owners], skipped)]
    return kept_tokens, index


def _ranges(firsts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenate the ranges of ``lengths`` (n,) that begin at ``firsts`` (n,)."""
    shift = (firsts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
    return shift + torch.arange(len(shift))


def _tokens_before_response(whole: Layout, response: Layout) -> Tensor:
    """(B,): tokens of each row before its first response token; 1 for rows without a response."""
    before = whole.width - response.width + response.starts - whole.starts
    missing = (before < 1) & (response.lengths > 0)
    if missing.any():
        raise ValueError(
            f"row {int(missing.nonzero()[0])} has no prompt token before its response, so its first response token "
            "cannot be scored: give every prompt at least one token"
        )
    return torch.where(response.lengths > 0, before, 1)


def _uneven_positions(data: DataProto, ids: Ragged) -> Ragged | None:
    """Return ``position_ids`` unless they count each row from 0, which is every model's default."""
    if "position_ids" not in data:
        return None
    # None saves a tensor a layer, and lets models that take no positions run
    positions = data.ragged("position_ids")
    if isinstance(positions, CountedPositions):
        return None
    counted = torch.arange(ids.layout.total) - ids.layout.spread(ids.layout.offsets[:-1])
    return None if torch.equal(positions.values, counted.to(positions.values.dtype)) else positions
