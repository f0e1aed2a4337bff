"""Weights of a distributed checkpoint under their Hugging Face names, read in one process: no ranks, no device.

A folder holds a parameter of all layers as one tensor with the layer in front, and of all experts with the expert
behind it. One layer's and one expert's is read at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from verl.models.megatron.parallel import import_megatron

import_megatron()

from mbridge.core.parallel_states import ParallelStates  # noqa: E402

from verl.models.megatron.bridge import _OUTPUT, Head, _bridge_class, _plain, check_model  # noqa: E402

_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERTS = re.compile(r"mlp\.experts\.experts\.(linear_fc[12])\.weight")
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Name of a norm where Transformer Engine fuses it into the layer behind it -> its name by itself. Checkpoints have the
former with and without Transformer Engine."""


class _Piece(NamedTuple):
    """One parameter of one layer, and of one expert."""

    key: str
    """Of the stored tensor."""
    place: tuple[int, ...]
    """Where it lies in the dimensions in front: layer, expert, both or none."""
    name: str
    """In the whole model, as mbridge maps it."""


class StoredWeights(Mapping[str, Tensor]):
    """Hugging Face name -> tensor, read when it is asked for.

    Args:
        folder: with ``metadata.json`` and the ranks' ``.distcp`` files.
        config: of Hugging Face.
        head: of the model.

    Raises:
        ImportError: megatron-core or mbridge is not installed.
        ValueError: a weight in the folder is of no model like that of ``config``.
    """

    def __init__(self, folder: Path, config: Any, head: Head = "lm") -> None:
        check_model(config, str(folder))
        self._bridge = _bridge_class(config.model_type)(_plain(config), parallel_states=ParallelStates(vpp_size=None))
        if head != "lm":
            self._bridge._DIRECT_MAPPING |= {_OUTPUT: "score.weight", "output_layer.bias": "score.bias"}
        self._vocabulary, self._folder = config.vocab_size, folder
        self._reader = FileSystemReader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._stored = {
            key: stored
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and not key.startswith(("optimizer.", "chained_"))
        }
        self._places: dict[str, tuple[_Piece, int]] = {}
        for key, stored in self._stored.items():
            for piece in self._pieces(key, stored.size):
                for part, name in enumerate(self._bridge._weight_name_mapping_mcore_to_hf(piece.name)):
                    self._places[name] = piece, part
        self._last: tuple[_Piece, list[Tensor]] | None = None

    def _pieces(self, key: str, size: Size) -> Iterator[_Piece]:
        found = _LAYER.fullmatch(key)
        if found is None:
            yield _Piece(key, (), self._mapped(key))
            return
        numbered, rest = found.groups()
        for layer in [int(numbered)] if numbered else range(size[0]):
            place = () if numbered else (layer,)
            expert = _EXPERTS.fullmatch(rest)
            if expert is None:
                yield _Piece(key, place, self._mapped(f"decoder.layers.{layer}.{rest}"))
                continue
            for number in range(size[len(place)]):
                name = f"decoder.layers.{layer}.mlp.experts.{expert[1]}.weight{number}"
                yield _Piece(key, (*place, number), self._mapped(name))

    def _mapped(self, name: str) -> str:
        """The name of those that a norm may have which mbridge maps.

        Raises:
            ValueError: it maps none.
        """
        names = [name, *(name.replace(*pair) for pair in _FUSED_NORMS.items() if pair[0] in name)]
        for one in names:
            try:
                self._bridge._weight_name_mapping_mcore_to_hf(one)
            except (NotImplementedError, KeyError, IndexError):
                continue
            return one
        kind = self._bridge.hf_config.model_type
        raise ValueError(
            f"{self._folder} holds {name}, which a model of type {kind} has not: it is of another model. Give the "
            "config of the one that it was saved from"
        )

    def __getitem__(self, name: str) -> Tensor:
        piece, part = self._places[name]
        if self._last is None or self._last[0] != piece:  # of three projections that are stored as one, read once
            tensor = self._read(piece)
            if piece.name.startswith(("embedding.", "output_layer.")) and len(tensor) > self._vocabulary:
                tensor = tensor[: self._vocabulary]  # rows that make it divisible by the ranks
            self._last = piece, self._bridge._weight_to_hf_format(piece.name, tensor)[1]
        return self._last[1][part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _read(self, piece: _Piece) -> Tensor:
        stored, front = self._stored[piece.key], len(piece.place)
        size = Size([1] * front + list(stored.size[front:]))
        chunk = ChunkStorageMetadata(Size([*piece.place, *[0] * (len(size) - front)]), size)
        items = create_read_items_for_chunk_list(piece.key, stored, [chunk])
        if sum(item.lengths.numel() for item in items) != size.numel():
            raise ValueError(f"{self._folder} holds {piece.key} in part only: copy all of its files")
        whole = torch.empty(size, dtype=stored.properties.dtype)
        self._reader.read_data(LoadPlan(items), _Into(whole)).wait()
        return whole.view(stored.size[front:])


class _Into(DefaultLoadPlanner):
    """Planner that fills one tensor."""

    def __init__(self, whole: Tensor) -> None:
        super().__init__()
        self.whole = whole

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        starts, lengths = read_item.dest_offsets, read_item.lengths
        return self.whole[tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: the tensor is a part of the whole one."""
