"""What a user names as data to the rows of it: paths, lists, globs, folders, remote paths, Hugging Face data sets.

    table = open_table(["train.jsonl", "more/*.parquet"])
    len(table), table[0], table.where(0)

Knows formats by their extension; what the columns mean is for others to know.
"""

import glob
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from verl.data.readers import (
    IN_MEMORY,
    Record,
    csv_records,
    json_records,
    mapped_copy,
    read_arrow,
    read_parquet,
    saved_dataset_files,
)
from verl.data.table import JSON_COLUMN, BadRow, DataError, FileTable, RowTable, is_json
from verl.utils.fs import copy_to_local, is_non_local, list_remote

# -- Records of a text file to Arrow columns, a chunk at a time; what is large goes to a file as it comes ------------


_CHUNK = 2000
"""Rows that are Python objects at a time."""


def table_in_memory(rows: Iterable[dict[str, Any]]) -> pa.Table:
    """All rows as one table."""
    chunks = list(_chunks(rows))
    schema = _merged([chunk.schema for chunk in chunks])
    return pa.concat_tables([schema.empty_table(), *(_conformed(chunk, schema) for chunk in chunks)]).combine_chunks()


def write_arrow(rows: Iterable[dict[str, Any]], path: str) -> None:
    """All rows to an Arrow file of which no more than a chunk is ever in memory.

    The type of a column is known when its last row was read: until then chunks wait in ``path.chunks``.
    """
    waiting = f"{path}.chunks"
    try:
        schemas, ends = [], [0]
        with pa.OSFile(waiting, "wb") as file:
            for chunk in _chunks(rows):
                with pa.ipc.new_stream(file, chunk.schema) as writer:
                    writer.write_table(chunk)
                schemas.append(chunk.schema)
                ends.append(file.tell())
        schema = _merged(schemas)
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for chunk in _written_chunks(waiting, ends):
                writer.write_table(_conformed(chunk, schema).combine_chunks())
    finally:
        if os.path.exists(waiting):
            os.remove(waiting)


def _written_chunks(path: str, ends: Sequence[int]) -> Iterator[pa.Table]:
    with pa.OSFile(path, "rb") as file:
        for start, end in zip(ends, ends[1:], strict=False):
            file.seek(start)
            with pa.ipc.open_stream(pa.py_buffer(file.read(end - start))) as reader:
                yield reader.read_all()


def _chunks(rows: Iterable[dict[str, Any]]) -> Iterator[pa.Table]:
    """Tables of at most ``_CHUNK`` rows, each with the columns and types of its rows."""
    chunk: list[dict[str, Any]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == _CHUNK:
            yield _table(chunk)
            chunk = []
    if chunk:
        yield _table(chunk)


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [_column(name, [row.get(name) for row in rows]) for name in names]
    if not columns:  # objects without entries are rows all the same
        return pa.table({"": pa.nulls(len(rows))})
    return pa.table([array for _, array in columns], schema=pa.schema([field for field, _ in columns]))


def _column(name: str, values: list[Any]) -> tuple[pa.Field, pa.Array]:
    try:
        array = pa.array(values)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return _json_field(name), _as_json(values)
    if _would_turn_to_float(values, array.type):
        return _json_field(name), _as_json(values)
    return pa.field(name, array.type), array


def _would_turn_to_float(values: Iterable[Any], kind: pa.DataType) -> bool:
    """Whether another value among fractions would come back as one: 5 as 5.0, which is another answer."""
    if pa.types.is_floating(kind):
        return any(value is not None and type(value) is not float for value in values)
    values = [value for value in values if value is not None]
    if pa.types.is_list(kind):
        return _would_turn_to_float([item for value in values for item in value], kind.value_type)
    if pa.types.is_struct(kind):
        return any(_would_turn_to_float([value.get(f.name) for value in values], f.type) for f in kind)
    return False


def _json_field(name: str) -> pa.Field:
    return pa.field(name, pa.string(), metadata=JSON_COLUMN)


def _as_json(values: Iterable[Any]) -> pa.Array:
    return pa.array([None if value is None else json.dumps(value) for value in values], type=pa.string())


def _merged(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """One schema that can hold the rows of all."""
    names = dict.fromkeys(name for schema in schemas for name in schema.names)
    return pa.schema([_merged_field(name, [s.field(name) for s in schemas if name in s.names]) for name in names])


def _merged_field(name: str, fields: Sequence[pa.Field]) -> pa.Field:
    kind: pa.DataType | None = pa.null()
    for field in fields:  # all of them: a field of JSON equals one of text, as Arrow compares no metadata
        kind = None if kind is None or is_json(field) else _common_type(kind, field.type)
    return _json_field(name) if kind is None else pa.field(name, kind)


def _common_type(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """The type of which both are a part: null is part of all, an object of one with more entries; else None."""
    if a == b or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    if pa.types.is_list(a) and pa.types.is_list(b):
        inner = _common_type(a.value_type, b.value_type)
        return None if inner is None else pa.list_(inner)
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        entries = {field.name: field.type for field in a}
        for field in b:
            entries[field.name] = _common_type(entries.get(field.name, pa.null()), field.type)
        return None if None in entries.values() else pa.struct(list(entries.items()))
    return None


def _conformed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The same rows with the columns and types of ``schema``."""
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        own, column = table.schema.field(field.name), table[field.name]
        if own.type == field.type and is_json(own) == is_json(field):
            columns.append(column)
        elif is_json(field):
            columns.append(_as_json(column.to_pylist()))
        else:
            columns.append(pa.array(column.to_pylist(), type=field.type))
    return pa.table(columns, schema=schema) if columns else table


logger = logging.getLogger(__name__)

CACHE_DIR = "~/.cache/verl/rlhf"
FORMATS = {".parquet": "parquet", ".arrow": "Arrow", ".json": "JSON", ".jsonl": "JSON lines", ".csv": "CSV"}
"""Extension -> what such a file is called in messages."""

_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"}
_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))??(:(?P<split>[\w.-]+(\[[^\]]*\])?))?")

BadRows = Literal["refuse", "skip"]


def open_table(
    paths: str | Sequence[str],
    *,
    cache_dir: str | None = None,
    use_shm: bool = False,
    bad_rows: BadRows = "refuse",
    rows: int | None = None,
) -> RowTable:
    """The rows of all files ``paths`` names, in that order.

    Args:
        paths: one or several of: a file (``.parquet``, ``.arrow``, ``.json``, ``.jsonl``, ``.csv``); a glob; a folder
            of files of one format, or one that ``datasets`` saved; a remote path (``hdfs://``, ``s3://``, ``gs://``,
            ...); a data set of the Hugging Face hub, ``owner/name``, ``owner/name:split`` or
            ``owner/name:config:split``.
        cache_dir: where copies of remote and of large files lie; None: ``~/.cache/verl/rlhf``.
        use_shm: read copies in shared memory.
        bad_rows: what to do with a line that is no record: raise, or leave it out and name it in ``table.skipped``.
        rows: of each file the first of them only; None: all.

    Raises:
        FileNotFoundError: nothing is there.
        DataError: a file is not what its name says; or, with ``refuse``, a line of it is no record.
    """
    cache_dir = os.path.expanduser(cache_dir or CACHE_DIR)
    named = [str(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    found = [one for path in named for one in resolve(path)]
    return read_files(found, [localized(path, cache_dir, use_shm) for path in found], cache_dir, bad_rows, rows)


def localized(path: str, cache_dir: str | None = None, use_shm: bool = False) -> str:
    """A local path that holds what one found by :func:`resolve` does; a data set of the hub stays as it is."""
    if hub_parts(path) is not None or not (use_shm or is_non_local(path)):
        return path
    return copy_to_local(path, cache_dir=os.path.expanduser(cache_dir or CACHE_DIR), use_shm=use_shm)


def read_files(
    names: Sequence[str],
    local: Sequence[str],
    cache_dir: str | None = None,
    bad_rows: BadRows = "refuse",
    rows: int | None = None,
) -> RowTable:
    """The rows of local files and of data sets of the hub, under the names they are called by in messages."""
    tables = []
    for name, path in zip(names, local, strict=True):
        hub = hub_parts(path)
        read = _hub_table(*hub, cache_dir or CACHE_DIR) if hub else read_file(path, cache_dir, bad_rows, name, rows)
        tables.append(read if rows is None else read._replace(table=read.table.slice(0, rows)))
    return RowTable.of(tables)


def resolve(path: str) -> list[str]:
    """The files that one entry of ``data.train_files`` names, sorted; a data set of the hub stays as it is.

    Raises:
        FileNotFoundError: nothing is there.
        DataError: a glob or folder holds no data files, or such that hardly belong together.
    """
    if is_non_local(path):
        return _resolve_remote(path)
    if hub_parts(path) is not None:
        return [path]
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        saved = saved_dataset_files(path)
        return _in_folder(path, sorted(os.listdir(path))) if saved is None else saved
    if not os.path.exists(path) and glob.has_magic(path):
        found = sorted(one for one in glob.glob(path, recursive=True) if os.path.isfile(one))
        if not found:
            raise FileNotFoundError(f"Data files {path!r}{_relative(path)}: no file fits. Correct the pattern.")
        return found
    return [path]


def _resolve_remote(path: str) -> list[str]:
    if glob.has_magic(path):
        found = list_remote(path)
        if not found:
            raise FileNotFoundError(f"Data files {path!r}: no file fits. Correct the pattern.")
        return found
    if Path(path).suffix.lower() in FORMATS:
        return [path]
    names = [os.path.basename(one) for one in list_remote(f"{path.rstrip('/')}/*")]
    return _in_folder(path.rstrip("/"), names)


def _in_folder(folder: str, names: Sequence[str]) -> list[str]:
    """The data files among the names in a folder; they must be of one format and not of several splits."""
    found = [name for name in names if Path(name).suffix.lower() in FORMATS and name[0] not in "._"]
    formats = sorted({Path(name).suffix.lower() for name in found})
    splits = sorted({split for name in found for split in re.split(r"[^a-z]+", Path(name).stem.lower())} & _SPLITS)
    if not found:
        what = f"no file ending in {', '.join(FORMATS)}"
        raise DataError(f"Data folder {folder!r}{_relative(folder)} holds {what}. Name the folder of the files.")
    if len(formats) > 1 or len(splits) > 1:
        several = " and ".join(splits if len(splits) > 1 else formats)
        shown = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        raise DataError(
            f"Data folder {folder!r} holds {several} files ({shown}), which would be read as one data set. "
            f"Name the files wanted, or a glob: {folder}/*{formats[0]}."
        )
    return [f"{folder.rstrip('/')}/{name}" for name in found]


def read_file(
    path: str,
    cache_dir: str | None = None,
    bad_rows: BadRows = "refuse",
    name: str | None = None,
    rows: int | None = None,
) -> FileTable:
    """The rows of one local file, called ``name`` in messages; of large files perhaps more than the first ``rows``.

    See :func:`open_table`.
    """
    path = os.path.expanduser(path)
    suffix = _checked_suffix(path)
    cache_dir, name = cache_dir or CACHE_DIR, name or path
    try:
        if suffix == ".parquet":
            return FileTable(read_parquet(path, cache_dir, rows), name)
        if suffix == ".arrow":
            return FileTable(read_arrow(path), name)
        return _read_text(path, suffix, cache_dir, bad_rows, name, rows)
    except DataError:
        raise
    except PermissionError as error:
        raise DataError(f"{path} cannot be read: permission denied. Make it readable for this user.") from error
    except (pa.ArrowException, ValueError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as {FORMATS[suffix]}: {error}{_look(path, suffix)}. Write the file anew."
        ) from error


def _checked_suffix(path: str) -> str:
    if not os.path.isfile(path):
        what = "is a folder" if os.path.isdir(path) else "is no ordinary file" if os.path.exists(path) else None
        hint = "" if hub_parts(path) is None else "; as a data set of the Hugging Face hub it is read by open_table"
        raise FileNotFoundError(f"Data file {path!r}{_relative(path)} {what or 'does not exist'}{hint}.")
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise DataError(
            f"{path} is of no known format: its name ends in {suffix or 'nothing'!r}. Name it by what it is, "
            f"{', '.join(f'{end} ({name})' for end, name in FORMATS.items())}, or convert it{_look(path, suffix)}."
        )
    if os.path.getsize(path) == 0:
        raise DataError(f"{path} is empty (0 bytes) where {FORMATS[suffix]} should be. Write the file anew.")
    return suffix


def _look(path: str, suffix: str) -> str:
    """What the first bytes say a file is, if that is not what its name says."""
    with open(path, "rb") as file:
        start = file.read(8)
    for mark, kind, ends in (
        (b"PAR1", "parquet", ".parquet"),
        (b"ARROW1", "an Arrow file", ".arrow"),
        (b"\x1f\x8b", "compressed with gzip", ""),
        (b"PK\x03\x04", "a zip archive", ""),
        (b"version ", "a Git LFS pointer: the file itself was not downloaded (git lfs pull)", ""),
    ):
        if start.startswith(mark) and suffix != ends:
            return f" (by its content it is {kind})"
    return ""


def _relative(path: str) -> str:
    return "" if os.path.isabs(path) or is_non_local(path) else f" (relative to {os.getcwd()})"


# text -------------------------------------------------------------------------------------------------------------
def _read_text(path: str, suffix: str, cache_dir: str, bad_rows: BadRows, name: str, first: int | None) -> FileTable:
    records = partial(csv_records, path) if suffix == ".csv" else partial(json_records, path, suffix)
    reading = _Reading(name, FORMATS[suffix], records, bad_rows)
    if first is not None:
        return reading.result(table_in_memory(islice(reading.rows(), first)))
    if os.path.getsize(path) <= IN_MEMORY:
        return reading.result(table_in_memory(reading.rows()))
    return reading.result(mapped_copy(path, cache_dir, lambda target: write_arrow(reading.rows(), target), bad_rows))


class _Reading:
    """The records of one file on their way to a table: which are rows, and what is to be said of the others."""

    def __init__(self, path: str, kind: str, records: Callable[[], Iterator[Record]], bad_rows: BadRows):
        self.path, self.kind, self.records, self.bad_rows = path, kind, records, bad_rows
        self.skipped: list[tuple[int, BadRow]] = []
        self.was_read = False

    def rows(self) -> Iterator[dict[str, Any]]:
        self.was_read = True
        for number, record in enumerate(self.records()):
            if record.row is not None:
                yield record.row
            elif self.bad_rows == "skip":
                why = f"line {record.line}: {record.why}"
                self.skipped.append((number, BadRow(f"{self.path}, row {number}", why)))
            else:
                raise DataError(
                    f"{self.path} cannot be read as {self.kind}: line {record.line} (row {number}): {record.why}. "
                    "Correct the line, or set data.bad_rows=skip to leave such rows out."
                )

    def result(self, table: pa.Table) -> FileTable:
        if not self.was_read:  # the mapped copy was there; what it left out is found by reading once more
            for _ in self.rows() if self.bad_rows == "skip" else ():
                pass
        if not self.skipped:
            return FileTable(table, self.path)
        left_out = [number for number, _ in self.skipped]
        numbers = np.delete(np.arange(table.num_rows + len(left_out)), left_out)
        return FileTable(table, self.path, numbers, tuple(row for _, row in self.skipped))


# the hub ----------------------------------------------------------------------------------------------------------
def hub_parts(path: str) -> tuple[str, str | None, str | None] | None:
    """(name, config, split) of a data set of the Hugging Face hub; None: the path is of a file, there or not."""
    found = _HUB_NAME.fullmatch(path)
    if found is None or Path(found["name"]).suffix.lower() in FORMATS or os.path.exists(path) or path[0] in "./~":
        return None
    return found["name"], found["config"], found["split"]


def _hub_table(name: str, config: str | None, split: str | None, cache_dir: str) -> FileTable:
    """A data set of the hub, or of its cache on this machine, through ``datasets``."""
    import datasets  # a second of CPU time

    label = ":".join(filter(None, (name, config, split)))
    try:
        if split is None:
            splits = datasets.get_dataset_split_names(name, config)
            if len(splits) != 1:
                raise DataError(
                    f"{label} has the splits {', '.join(splits)}: say which, as {label}:{splits[0] if splits else 'x'}."
                )
            split = splits[0]
        loaded = datasets.load_dataset(name, config, split=split, cache_dir=os.path.join(cache_dir, "hub"))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, DataError):
            raise
        why = " ".join(str(error).split())[:300]
        raise DataError(
            f"{label} is no file here (looked from {os.getcwd()}), and as a data set of the Hugging Face hub it cannot "
            f"be had: {type(error).__name__}: {why}. Check name, config and split (owner/name:config:split) and the "
            "connection, or save it elsewhere with save_to_disk and name that folder."
        ) from error
    return FileTable(loaded.flatten_indices().data.table if loaded._indices else loaded.data.table, label)
