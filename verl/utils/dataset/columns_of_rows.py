"""Records of a text file to Arrow columns, a chunk at a time; what is large goes to a file as it comes.

A column takes the type all its cells share. Cells of several types (a number here, a list there) stay what they are:
the column is kept as JSON text, marked so (``table.JSON_COLUMN``).
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from verl.utils.dataset.table import JSON_COLUMN, is_json

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
