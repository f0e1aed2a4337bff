"""Rows of a DataProto in a file that holds numbers and text only: reading one runs no code, unlike a pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto, DataProtoError
from verl.utils.ragged import Layout, Ragged


def save_rows(path: Path, rows: DataProto, facts: dict[str, int]) -> None:
    """Write all columns, packed where they are ragged, the padding token, and ``facts`` about the rows.

    Raises:
        ValueError: an object column holds something else than JSON does; nothing was written.
    """
    columns = {name: _tensors_of(rows, name) for name in rows.keys()}
    objects = {name: (str(array.dtype), _as_json(name, array)) for name, array in rows.non_tensor_batch.items()}
    pad = rows.meta_info.get("pad_token_id")
    torch.save({"columns": columns, "objects": objects, "pad_token_id": pad, "facts": facts}, path)


def load_rows(path: Path) -> tuple[DataProto, dict[str, int]]:
    """The rows and facts that `save_rows` wrote."""
    content = torch.load(path, weights_only=True)
    columns = {name: _column(*parts) for name, parts in content["columns"].items()}
    objects = {}
    for name, (dtype, text) in content["objects"].items():
        values = json.loads(text)
        objects[name] = np.empty(len(values), dtype=dtype)
        objects[name][:] = values
    ragged = {name: column for name, column in columns.items() if isinstance(column, Ragged)}
    dense = {name: column for name, column in columns.items() if name not in ragged}
    meta = {} if content["pad_token_id"] is None else {"pad_token_id": content["pad_token_id"]}
    return DataProto.from_ragged(ragged, dense, objects, meta), content["facts"]


def check_savable(rows: DataProto) -> None:
    """Raise what `save_rows` would, without writing."""
    for name, array in rows.non_tensor_batch.items():
        _as_json(name, array)


def _tensors_of(rows: DataProto, name: str) -> tuple:
    try:
        column = rows.ragged(name)
    except DataProtoError:
        return (rows.column(name),)
    return column.values, column.layout.starts, column.layout.lengths, column.layout.width, column.fill


def _column(values: Any, *layout: Any) -> Any:
    return Ragged(values, Layout(*layout[:3]), layout[3]) if layout else values


def _as_json(name: str, array: np.ndarray) -> str:
    values = array.tolist()
    try:
        text = json.dumps(values)
        if json.loads(text) == values:
            return text
    except (TypeError, ValueError):
        pass
    raise ValueError(f"column {name!r} holds what JSON does not: a {type(values[0]).__name__}, for example.")
