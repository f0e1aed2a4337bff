"""Rows of a DataProto in one safetensors file: tensors, text, numbers and images; reading one runs no code."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from verl.batch.layout import Layout
from verl.batch.ragged import Ragged
from verl.protocol import DataProto, DataProtoError
from verl.utils.fs import write_atomic

_FORMAT = "verl-rows-1"
_METADATA = "facts"
"""Key of the metadata in the file, as version 1 of the format has it."""
_TENSOR, _IMAGE, _TUPLE = "\0tensor", "\0png", "\0tuple"
"""The one key of a dict that stands for something JSON lacks."""


def save_rows(path: Path, rows: DataProto, metadata: Mapping[str, Any]) -> None:
    """Write all columns, packed where they are ragged, the padding token, and ``metadata`` (JSON values) of the rows.

    The file is there whole or not at all.

    Raises:
        ValueError: a column without tensors holds what no such file does; nothing was written.
    """
    tensors: dict[str, Tensor] = {}
    columns = {name: _take_column(rows, name, tensors) for name in rows.keys()}
    objects = {
        name: {"dtype": str(array.dtype), "values": _plain_column(name, array, tensors)}
        for name, array in rows.non_tensor_batch.items()
    }
    pad = rows.meta_info.get("pad_token_id")
    about = {_METADATA: metadata, "columns": columns, "objects": objects, "pad_token_id": pad}
    path.parent.mkdir(parents=True, exist_ok=True)
    # a clone of each: columns may share memory, which the format does not allow
    whole = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    metadata_of_file = {"format": _FORMAT, "about": json.dumps(about)}
    write_atomic(path, lambda part: save_file(whole, part, metadata=metadata_of_file))


def load_rows(path: Path) -> tuple[DataProto, dict[str, Any]]:
    """Return the rows and metadata that `save_rows` wrote.

    Raises:
        ValueError: the file is not one of these, or is damaged.
    """
    about, tensors = _read(path, with_tensors=True)
    layouts: dict[Any, Layout] = {}
    ragged, dense, objects = {}, {}, {}
    for name, column in about["columns"].items():
        if "width" not in column:
            dense[name] = tensors[f"{name}/dense"]
            continue
        starts, lengths, width = tensors[f"{name}/starts"], tensors[f"{name}/lengths"], column["width"]
        same = (*starts.tolist(), *lengths.tolist(), width)
        layout = layouts.setdefault(same, Layout(starts, lengths, width))  # columns of one window share theirs
        ragged[name] = Ragged(tensors[f"{name}/values"], layout, column["fill"])
    for name, array in about["objects"].items():
        # row by row: numpy would make a matrix of values that are lists of one length
        objects[name] = np.empty(len(array["values"]), dtype=array["dtype"])
        for row, value in enumerate(array["values"]):
            objects[name][row] = _restored(value, tensors)
    meta = {} if about["pad_token_id"] is None else {"pad_token_id": about["pad_token_id"]}
    return DataProto.from_ragged(ragged, dense, objects, meta), about[_METADATA]


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata in a file, without its rows."""
    return _read(path, with_tensors=False)[0][_METADATA]


def check_savable(rows: DataProto) -> None:
    """Raise the ValueError that `save_rows` would raise for its object columns, without writing."""
    for name, array in rows.non_tensor_batch.items():
        _plain_column(name, array, {})


def _read(path: Path, with_tensors: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = list(file.keys()) if with_tensors else []
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Delete it; what it held is made again.") from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path} holds no rows of a batch. Move it elsewhere, or name another folder.")
    return json.loads(metadata["about"]), tensors


def _take_column(rows: DataProto, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    try:
        column = rows.ragged(name)
    except DataProtoError:
        tensors[f"{name}/dense"] = rows.column(name)
        return {}
    layout = column.layout
    parts = {"values": column.values, "starts": layout.starts, "lengths": layout.lengths}
    tensors |= {f"{name}/{part}": tensor for part, tensor in parts.items()}
    return {"width": layout.width, "fill": column.fill}


def _plain_column(name: str, array: np.ndarray, tensors: dict[str, Tensor]) -> list:
    try:
        return [_plain(value, f"{name}/object", tensors) for value in array.tolist()]
    except TypeError as problem:
        raise ValueError(f"column {name!r} holds what no such file does: {problem}.") from None


def _plain(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """A value in JSON; tensors, and images as the bytes of PNG files, go to ``tensors``."""
    # exactly these types: a subclass would come back as its base
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Tensor):
        return {_TENSOR: _put(value, place, tensors)}
    if type(value).__module__.startswith("PIL."):
        file = io.BytesIO()
        value.save(file, format="PNG")
        return {_IMAGE: _put(torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8), place, tensors)}
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(item, place, tensors) for item in value]}
    if isinstance(value, list):
        return [_plain(item, place, tensors) for item in value]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: _plain(item, place, tensors) for key, item in value.items()}
    raise TypeError(f"a {type(value).__name__}, for example")


def _put(tensor: Tensor, place: str, tensors: dict[str, Tensor]) -> str:
    # with every entry the count grows, so the name is new
    tensors[name := f"{place}/{len(tensors)}"] = tensor
    return name


def _restored(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `_plain` wrote."""
    if isinstance(value, list):
        return [_restored(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(_restored(item, tensors) for item in value[_TUPLE])
    if _IMAGE in value:
        from PIL import Image

        # PNG only: the file chooses no other decoder; copied, since an opened image reads its pixels later
        return Image.open(io.BytesIO(tensors[value[_IMAGE]].numpy().tobytes()), formats=["PNG"]).copy()
    return {key: _restored(item, tensors) for key, item in value.items()}
