"""Rows of a DataProto in a file of numbers, text, tensors and images: reading one runs no code, unlike a pickle."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto, DataProtoError
from verl.utils.ragged import Layout, Ragged

_IMAGE = "\0png"
"""The one key of a dict that stands for an image."""


def save_rows(path: Path, rows: DataProto, facts: dict[str, int]) -> None:
    """Write all columns, packed where they are ragged, the padding token, and ``facts`` about the rows.

    Raises:
        ValueError: an object column holds something else; nothing was written.
    """
    columns = {name: _tensors_of(rows, name) for name in rows.keys()}
    objects = {name: (str(array.dtype), _plain_column(name, array)) for name, array in rows.non_tensor_batch.items()}
    pad = rows.meta_info.get("pad_token_id")
    torch.save({"columns": columns, "objects": objects, "pad_token_id": pad, "facts": facts}, path)


def load_rows(path: Path) -> tuple[DataProto, dict[str, int]]:
    """The rows and facts that `save_rows` wrote."""
    content = torch.load(path, weights_only=True)
    columns = {name: _column(*parts) for name, parts in content["columns"].items()}
    objects = {}
    for name, (dtype, values) in content["objects"].items():
        objects[name] = np.empty(len(values), dtype=dtype)
        for row, value in enumerate(values):
            objects[name][row] = _restored(value)
    ragged = {name: column for name, column in columns.items() if isinstance(column, Ragged)}
    dense = {name: column for name, column in columns.items() if name not in ragged}
    meta = {} if content["pad_token_id"] is None else {"pad_token_id": content["pad_token_id"]}
    return DataProto.from_ragged(ragged, dense, objects, meta), content["facts"]


def check_savable(rows: DataProto) -> None:
    """Raise what `save_rows` would, without writing."""
    for name, array in rows.non_tensor_batch.items():
        _plain_column(name, array)


def _tensors_of(rows: DataProto, name: str) -> tuple:
    try:
        column = rows.ragged(name)
    except DataProtoError:
        return (rows.column(name),)
    return column.values, column.layout.starts, column.layout.lengths, column.layout.width, column.fill


def _column(values: Any, *layout: Any) -> Any:
    return Ragged(values, Layout(*layout[:3]), layout[3]) if layout else values


def _plain_column(name: str, array: np.ndarray) -> list:
    try:
        return [_plain(value) for value in array.tolist()]
    except TypeError as problem:
        raise ValueError(f"column {name!r} holds what no such file does: {problem}.") from None


def _plain(value: Any) -> Any:
    """A value as text, numbers, tensors, and lists and dicts of them; an image as the bytes of a PNG file."""
    if value is None or type(value) in (str, int, float, bool) or isinstance(value, Tensor):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if type(value).__module__.startswith("PIL."):
        file = io.BytesIO()
        value.save(file, format="PNG")
        return {_IMAGE: torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)}
    raise TypeError(f"a {type(value).__name__}, for example")


def _restored(value: Any) -> Any:
    """The value that `_plain` took."""
    if isinstance(value, (list, tuple)):
        return type(value)(_restored(item) for item in value)
    if isinstance(value, dict):
        if _IMAGE in value:
            from PIL import Image

            return Image.open(io.BytesIO(bytes(value[_IMAGE].tolist())), formats=["PNG"]).copy()
        return {key: _restored(item) for key, item in value.items()}
    return value
