"""The weights of a model folder read one by one, or some rows of one, from its safetensors files.

`WeightFiles` knows files and the names a model gives their tensors; it knows no sharding and moves nothing to a device.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.models.weight_names import Origin, converted, keeps_rows, origins

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Stored(NamedTuple):
    """Where a tensor lies in a file."""

    path: Path
    start: int
    """Its first byte."""
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_tensors(folder: str) -> dict[str, Stored] | None:
    """Name -> place of the tensors that transformers would load from ``folder``, a path or a downloaded hub id.

    None where the folder has no such files, not all of them, or numbers of types other than plain ones.
    """
    home = Path(folder)
    if not home.is_dir():
        from huggingface_hub import try_to_load_from_cache

        known = next(filter(None, (try_to_load_from_cache(folder, name) for name in (_WHOLE, _INDEX))), None)
        if not isinstance(known, str):
            return None
        home = Path(known).parent
    names = [_WHOLE]
    try:
        if not (home / _WHOLE).exists():
            names = sorted(set(json.loads((home / _INDEX).read_text())["weight_map"].values()))
        found: dict[str, Stored] = {}
        for name in names:
            with open(home / name, "rb") as file:
                # safetensors: eight bytes of the header's length, the header as JSON, the tensors
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            for key, entry in header.items():
                if key != "__metadata__":
                    start = 8 + length + entry["data_offsets"][0]
                    found[key] = Stored(home / name, start, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
    except (OSError, ValueError, KeyError, MemoryError, OverflowError):  # loading the whole model says what is wrong
        return None
    return found


class WeightFiles:
    """A model's weights by the names of its parameters, each read when asked for.

    Args:
        model: on the meta device.
    """

    def __init__(self, stored: Mapping[str, Stored], model: Any) -> None:
        self._stored, self._model = stored, model
        self._origins: dict[str, Origin] = {}
        self._names: dict[str, str] = {}  # those that a wrapper changed: new name -> old name
        self._last: tuple[Origin, torch.dtype, dict[str, Tensor]] | None = None
        self.mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        """(name, shape in the files, shape in the model) of what does not fit."""
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        for origin in origins(model, stored):
            empty = {key: torch.empty(stored[key].shape, device="meta") for key, _ in origin.stored}
            try:
                made = converted(origin, empty, model)
            except (RuntimeError, ValueError, IndexError) as error:
                raise ValueError(f"{[key for key, _ in origin.stored][:2]} cannot be converted: {error}") from error
            for name in made.keys() & shapes.keys():
                if made[name].shape != shapes[name]:
                    self.mismatched.append((name, tuple(made[name].shape), tuple(shapes[name])))
                else:
                    self._origins[name] = origin

    def __contains__(self, name: object) -> bool:
        return name in self._origins

    def rename(self, names: Mapping[str, str]) -> None:
        """Find the weights under new names only, given the old one of each."""
        self._origins = {new: self._origins[old] for new, old in names.items()}
        self._names = dict(names)

    def rows(self, name: str, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Rows ``first`` to ``last`` of a weight, of all its axes; what is joined of several tensors is cast before."""
        origin = self._origins[name]
        if origin.converter is None:
            return self._read(origin.stored[0][0], first, last).to(dtype)
        old_name = self._names.get(name, name)
        if keeps_rows(origin) and first < last:
            # every tensor of the files is a row: an expert
            kept: dict[str, list[str]] = {}
            for key, pattern in origin.stored:
                kept.setdefault(pattern, []).append(key)
            wanted = {key for keys in kept.values() for key in keys[first:last]}
            part = origin._replace(stored=tuple(pair for pair in origin.stored if pair[0] in wanted))
            return converted(part, self._whole(wanted, dtype), self._model)[old_name]
        if self._last is None or self._last[:2] != (origin, dtype):
            self._last = None  # before its successor takes memory
            made = converted(origin, self._whole((key for key, _ in origin.stored), dtype), self._model)
            if len(made) == 1:
                return made[old_name][first:last]
            self._last = origin, dtype, made  # the others of them are wanted next
        return self._last[2][old_name][first:last]

    def _whole(self, keys: Iterable[str], dtype: torch.dtype) -> dict[str, Tensor]:
        return {key: self._read(key, 0, None).to(dtype) for key in keys}

    def _read(self, key: str, first: int, last: int | None) -> Tensor:
        """Rows of a tensor of the files, in its own type; a number alone is one row."""
        path, start, dtype, shape = self._stored[key]
        inner = torch.Size(shape[1:])
        last = (shape[0] if shape else 1) if last is None else last
        rows = torch.empty((last - first, *inner) if shape else (), dtype=dtype)
        if not rows.numel():
            return rows
        data = memoryview(rows.view(-1).view(torch.uint8).numpy().data)
        # read, not mapped: a mapped file would count as this process's memory
        with open(path, "rb", buffering=0) as file:
            file.seek(start + first * inner.numel() * rows.itemsize if shape else start)
            while data:
                if not (count := file.readinto(data)):
                    raise ValueError(f"{path} ends within {key}: the copy was cut. Download it again.")
                data = data[count:]
        return rows
