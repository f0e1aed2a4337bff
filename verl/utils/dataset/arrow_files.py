"""Parquet and Arrow files to tables: small ones into memory, large ones as memory-mapped Arrow files.

A parquet file of which more than ``IN_MEMORY`` bytes would be held is written once, row group by row group, as an
Arrow file into the cache folder; the pages of it that are read come from disk and go again when memory is short.
"""

import hashlib
import json
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.dataset.table import DataError
from verl.utils.fs import written_once

IN_MEMORY = 64 << 20
"""Bytes of columns of a file that are held in memory; larger files are memory-mapped."""

_BATCH = 8192
"""Rows written at a time, and rows of a mapped file that are found together."""


def read_parquet(path: str, cache_dir: str, rows: int | None = None) -> pa.Table:
    """The rows of a parquet file, or the first ``rows``."""
    with pq.ParquetFile(path) as file:  # pq.read_table first imports pyarrow's dataset layer: 0.2 CPU-s
        if rows is not None:
            batches = [_validated(batch) for batch in islice(file.iter_batches(rows), 1)]
            return pa.Table.from_batches(batches, file.schema_arrow)
        groups = range(file.metadata.num_row_groups)
        if sum(file.metadata.row_group(group).total_byte_size for group in groups) <= IN_MEMORY:
            return _validated(file.read()).combine_chunks()

        def write(target: str) -> None:
            with pa.OSFile(target, "wb") as sink, pa.ipc.new_file(sink, file.schema_arrow) as writer:
                for batch in file.iter_batches(_BATCH):
                    writer.write_batch(_validated(batch))

        return mapped_copy(path, cache_dir, write)


def mapped_copy(path: str, cache_dir: str, write: Callable[[str], None], variant: str = "") -> pa.Table:
    """The Arrow file ``write`` makes of ``path``, memory-mapped; made once, and anew when ``path`` changes.

    Args:
        variant: what the copy depends on beside the file.
    """
    stamp = os.stat(path)
    key = f"{os.path.realpath(path)} {stamp.st_size} {stamp.st_mtime_ns} {variant}"
    name = f"{hashlib.sha1(key.encode()).hexdigest()[:16]}-{Path(path).stem}.arrow"
    target = os.path.join(os.path.expanduser(cache_dir), "arrow", name)
    return _mapped(written_once(target, write))


def read_arrow(path: str) -> pa.Table:
    """The rows of an Arrow file, of the file format or the stream format, memory-mapped."""
    return _validated(_mapped(path))


def _mapped(path: str) -> pa.Table:
    source = pa.memory_map(path)
    if source.size() >= 6 and source.read(6) == b"ARROW1":
        return pa.ipc.open_file(source).read_all()
    source.seek(0)
    with pa.ipc.open_stream(source) as reader:
        return reader.read_all()


def _validated(rows: Any) -> Any:
    """The table or batch itself; damaged offsets would be read past their ends, bad UTF-8 only be seen in training."""
    rows.validate(full=True)
    return rows


def saved_dataset_files(folder: str) -> list[str] | None:
    """The Arrow files of a folder written by ``datasets.Dataset.save_to_disk``, in order; None: it is no such folder.

    Raises:
        DataError: the folder holds several splits, or its description cannot be read.
    """
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        splits = _described(folder, "dataset_dict.json", "splits")
        raise DataError(
            f"{folder} is a saved DatasetDict with the splits {', '.join(splits)}: name the folder of one of them, "
            f"{os.path.join(folder, splits[0] if splits else 'train')}."
        )
    if not os.path.isfile(os.path.join(folder, "state.json")):
        return None
    files = _described(folder, "state.json", "_data_files")
    return [os.path.join(folder, os.path.basename(file["filename"])) for file in files]


def _described(folder: str, name: str, key: str) -> list:
    path = os.path.join(folder, name)
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))[key]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} does not describe a saved dataset ({type(error).__name__}: {error}). Save it anew with "
            "datasets' save_to_disk."
        ) from error
