"""Readers of JSON, JSON lines and CSV, record by record with line numbers; of parquet and Arrow, as tables.

Measured against ``pyarrow.json`` and ``datasets``: these name no file and line of a bad record, cannot leave one out,
turn a ground truth 5 into 5.0 and long integers into floats, and refuse JSON lists and columns of mixed types.
"""

import csv
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.table import JSON_COLUMN, DataError, is_json
from verl.utils.fs import written_once

_PIECE = 1 << 20
"""Characters of a JSON list that are read at a time."""

_LONGEST_TOKEN = 32
"""If a piece ends inside a JSON value, the parser fails at most this many characters before the end."""

_SPACE = re.compile(r"[ \t\r\n]*")


class Record(NamedTuple):
    """One record of a file: its dict, or the reason it is not one, and the line it starts on (from 1)."""

    row: dict[str, Any] | None
    line: int
    why: str | None = None


def json_records(path: str, suffix: str) -> Iterator[Record]:
    """Yield the records of a ``.json`` file (one list of objects, or one object a line) or of a ``.jsonl`` file.

    Raises:
        DataError: a list is not JSON from some line on, or the text is neither a list nor lines of objects.
    """
    with open(path, "rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"["):
        yield from _json_list(path)
        return
    for number, record in enumerate(_json_lines(path)):
        # such as one object over several lines
        if record.why and number == 0 and suffix == ".json":
            raise DataError(
                f"{path} is neither a JSON list of objects nor one object a line (line {record.line}: {record.why}). "
                "Write it as a list, [{...}, {...}], or name it .jsonl with one object a line."
            )
        yield record


def _json_lines(path: str) -> Iterator[Record]:
    with open(path, "rb") as file:  # bytes are split at \n only; text would be split inside strings, at U+2028
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield _parsed(line, number)


def _parsed(line: bytes, number: int) -> Record:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Record(None, number, f"byte {error.start} is not UTF-8")
    except json.JSONDecodeError as error:
        return Record(None, number, f"not JSON: {error.msg.removesuffix(' at')} at column {error.pos + 1}")
    # json raises it where brackets are nested deeper than Python's stack
    except RecursionError:
        return Record(None, number, "nested too deeply")
    return _object(row, number)


def _object(row: Any, line: int) -> Record:
    if isinstance(row, dict):
        return Record(row, line)
    return Record(None, line, f"{type(row).__name__} {str(row)[:40]!r} where an object {{...}} is expected")


def _json_list(path: str) -> Iterator[Record]:
    """Yield the items of one list, parsed one at a time, so that a large file is never in memory as a whole."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        text = _TextBuffer(file, path)
        separator = text.take()  # the opening bracket
        while True:
            if text.peek() == "]" and separator == "[":
                text.take()
                break
            line = text.line
            yield _object(text.item(), line)
            separator = text.take()
            if separator == "]":
                break
            if separator != ",":
                raise text.broken(f"expected a comma or ], found {separator!r}" if separator else "the list has no end")
        if text.peek():
            raise text.broken(f"{text.peek()!r} after the end of the list")


class _TextBuffer:
    """Streaming buffer over the text of a file that holds no more than the current item needs."""

    def __init__(self, file: TextIO, path: str):
        self.file, self.path = file, path
        self.text, self.at, self.line = "", 0, 1
        self.decoder = json.JSONDecoder()

    def more(self) -> bool:
        """Read on; False at the end of the file."""
        # what was parsed is dropped: memory holds one item and one piece
        self.text, self.at = self.text[self.at :], 0
        try:
            # doubling, so that a long item is not scanned once for each piece
            piece = self.file.read(max(_PIECE, len(self.text)))
        except UnicodeDecodeError as error:
            raise self.broken(f"the text after it is not UTF-8 ({error.reason})") from error
        self.text += piece
        return bool(piece)

    def peek(self) -> str:
        """Return the next non-space character; empty at the end."""
        while True:
            end = _SPACE.match(self.text, self.at).end()
            self.line += self.text.count("\n", self.at, end)
            self.at = end
            if end < len(self.text):
                return self.text[end]
            if not self.more():
                return ""

    def take(self) -> str:
        """Consume and return the next non-space character."""
        mark = self.peek()
        self.at += len(mark)
        return mark

    def item(self) -> Any:
        """Parse the JSON value that begins here."""
        self.peek()
        while True:
            try:
                item, end = self.decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                # an error in the middle is one; at the end of the text the rest may be missing
                is_incomplete = error.msg.startswith("Unterminated") or error.pos > len(self.text) - _LONGEST_TOKEN
                if not (is_incomplete and self.more()):
                    raise self.broken(error.msg) from error
                continue
            except RecursionError as error:
                raise self.broken("nested too deeply") from error
            if end == len(self.text) and not isinstance(item, (dict, list, str)) and self.more():
                continue  # a number may continue in the next piece
            self.line += self.text.count("\n", self.at, end)
            self.at = end
            return item

    def broken(self, why: str) -> DataError:
        return DataError(f"{self.path} cannot be read as JSON: line {self.line}: {why}. Write the file again.")


def csv_records(path: str) -> Iterator[Record]:
    """Yield the records of a CSV file with a header line: every cell is text, an empty one is None.

    A column ``a.b`` is the entry ``b`` of an object ``a``.

    Raises:
        DataError: the header is empty or names a column twice, or a quote is never closed.
    """
    # the default of 128 KiB refuses long prompts
    csv.field_size_limit(2**31 - 1)
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        # strict: a quote that is never closed would swallow the rest of the file
        reader = csv.reader(file, strict=True)
        line = 1
        try:
            header = next(reader, [])
            _check_header(header, path)
            paths = [name.split(".") for name in header]
            while True:
                # before reading: a record may span several lines
                line = reader.line_num + 1
                try:
                    values = next(reader)
                except StopIteration:
                    return
                if values:
                    yield _csv_row(values, paths, line)
        except csv.Error as error:
            raise DataError(
                f"{path} cannot be read as CSV: line {line}: {error}. Cells with quotes, commas or line breaks stand "
                'in double quotes, and a quote in them is written twice ("").'
            ) from error


def _check_header(header: list[str], path: str) -> None:
    twice = sorted({name for name in header if header.count(name) > 1})
    nested = sorted(name for name in header if any(other.startswith(f"{name}.") for other in header))
    if not header or not all(header):
        problem = "has no header line" if not any(header) else "has a column without a name"
    elif twice or nested:
        problem = f"has the column {(twice or nested)[0]!r} twice"
    elif not _is_utf8("".join(header)):
        problem = "is not UTF-8"
    else:
        return
    raise DataError(
        f"{path} cannot be read as CSV: line 1 {problem}. The first line names the columns, separated by commas."
    )


def _csv_row(values: list[str], paths: list[list[str]], line: int) -> Record:
    if len(values) != len(paths):
        return Record(None, line, f"{len(values)} cells where the header names {len(paths)} columns")
    row: dict[str, Any] = {}
    for names, value in zip(paths, values, strict=True):
        if not _is_utf8(value):
            return Record(None, line, f"column {'.'.join(names)!r} is not UTF-8")
        place = row
        for name in names[:-1]:
            place = place.setdefault(name, {})
        place[names[-1]] = _csv_value(value)
    return Record(row, line)


def _is_utf8(text: str) -> bool:
    """Whether a text read with ``surrogateescape`` was valid: each byte that was not has become a lone surrogate."""
    return text.isascii() or not any("\udc80" <= char <= "\udcff" for char in text)


def _csv_value(text: str) -> Any:
    """Return None for an empty cell, the parsed object or list of objects if it is JSON, else the text."""
    start = text.lstrip()[:2]
    if start[:1] == "{" or start[:1] == "[":
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        # numbers and lists of texts stay text: an answer [1, 2] is one
        if isinstance(value, dict) or (value and all(isinstance(item, dict) for item in value)):
            return value
    return text or None


# -- Records of a text file to Arrow columns, a chunk at a time; large tables are written to a file --------------------

_CHUNK = 2000
"""Rows held as Python objects at a time."""


def table_in_memory(rows: Iterable[dict[str, Any]]) -> pa.Table:
    """Return all rows as one table."""
    chunks = list(_chunks(rows))
    schema = _merged([chunk.schema for chunk in chunks])
    return pa.concat_tables([schema.empty_table(), *(_conformed(chunk, schema) for chunk in chunks)]).combine_chunks()


def write_arrow(rows: Iterable[dict[str, Any]], path: str) -> None:
    """Write all rows to an Arrow file with at most one chunk in memory.

    The type of a column is known only after its last row: until then chunks are buffered in ``path.chunks``.
    """
    buffered = f"{path}.chunks"
    try:
        schemas, ends = [], [0]
        with pa.OSFile(buffered, "wb") as file:
            for chunk in _chunks(rows):
                with pa.ipc.new_stream(file, chunk.schema) as writer:
                    writer.write_table(chunk)
                schemas.append(chunk.schema)
                ends.append(file.tell())
        schema = _merged(schemas)
        with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for chunk in _buffered_chunks(buffered, ends):
                writer.write_table(_conformed(chunk, schema).combine_chunks())
    finally:
        if os.path.exists(buffered):
            os.remove(buffered)


def _buffered_chunks(path: str, ends: Sequence[int]) -> Iterator[pa.Table]:
    with pa.OSFile(path, "rb") as file:
        for start, end in zip(ends, ends[1:], strict=False):
            file.seek(start)
            with pa.ipc.open_stream(pa.py_buffer(file.read(end - start))) as reader:
                yield reader.read_all()


def _chunks(rows: Iterable[dict[str, Any]]) -> Iterator[pa.Table]:
    """Yield tables of at most ``_CHUNK`` rows, each with the columns and types of its rows."""
    chunk: list[dict[str, Any]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == _CHUNK:
            yield _table(chunk)
            chunk = []
    if chunk:
        yield _table(chunk)


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    # in order of first appearance; null where a row lacks one
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = [_column(name, [row.get(name) for row in rows]) for name in names]
    if not columns:  # a record {} is still a row
        return pa.table({"": pa.nulls(len(rows))})
    return pa.table([array for _, array in columns], schema=pa.schema([field for field, _ in columns]))


def _column(name: str, values: list[Any]) -> tuple[pa.Field, pa.Array]:
    try:
        array = pa.array(values)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        return _json_field(name), _as_json(values)
    # Arrow takes [5, 0.5] as [5.0, 0.5]
    if _would_turn_to_float(values, array.type):
        return _json_field(name), _as_json(values)
    return pa.field(name, array.type), array


def _would_turn_to_float(values: Iterable[Any], kind: pa.DataType) -> bool:
    """Whether a non-float would be read back as a float: a ground truth 5 as 5.0, which is a different answer."""
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
    """Return one schema that can hold the rows of all."""
    names = dict.fromkeys(name for schema in schemas for name in schema.names)
    return pa.schema([_merged_field(name, [s.field(name) for s in schemas if name in s.names]) for name in names])


def _merged_field(name: str, fields: Sequence[pa.Field]) -> pa.Field:
    kind: pa.DataType | None = pa.null()
    for field in fields:  # no early exit: Arrow ignores metadata, so a JSON field compares equal to a text field
        kind = None if kind is None or is_json(field) else _common_type(kind, field.type)
    return _json_field(name) if kind is None else pa.field(name, kind)


def _common_type(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """Return the type that can hold both: null fits any type, an object fits one with more entries; else None."""
    if a == b or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    if pa.types.is_list(a) and pa.types.is_list(b):
        inner = _common_type(a.value_type, b.value_type)
        return None if inner is None else pa.list_(inner)
    # entries that only one has are null in the other
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        entries = {field.name: field.type for field in a}
        for field in b:
            entries[field.name] = _common_type(entries.get(field.name, pa.null()), field.type)
        return None if None in entries.values() else pa.struct(list(entries.items()))
    return None


def _conformed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the same rows with the columns and types of ``schema``."""
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


# -- Parquet and Arrow files to tables: small ones into memory, large ones as memory-mapped Arrow files --------------


IN_MEMORY = 64 << 20
"""Largest file (bytes of its columns) held in memory; larger files are memory-mapped."""

_BATCH = 8192
"""Rows written at a time; also rows of one batch of a mapped file."""


def read_parquet(path: str, cache_dir: str, rows: int | None = None) -> pa.Table:
    """Return the rows of a parquet file, or the first ``rows``."""
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
    """Return ``path`` converted by ``write`` to a memory-mapped Arrow file; converted again only when it changes.

    Args:
        variant: anything else the copy depends on.
    """
    # size and time instead of the content, which would take as long as reading it
    stamp = os.stat(path)
    key = f"{os.path.realpath(path)} {stamp.st_size} {stamp.st_mtime_ns} {variant}"
    name = f"{hashlib.sha1(key.encode()).hexdigest()[:16]}-{Path(path).stem}.arrow"
    target = os.path.join(os.path.expanduser(cache_dir), "arrow", name)
    return _mapped(written_once(target, write))


def read_arrow(path: str) -> pa.Table:
    """Return the memory-mapped rows of an Arrow file, in the file or the stream format."""
    return _validated(_mapped(path))


def _mapped(path: str) -> pa.Table:
    source = pa.memory_map(path)
    # datasets writes streams, most other tools files
    if source.size() >= 6 and source.read(6) == b"ARROW1":
        return pa.ipc.open_file(source).read_all()
    source.seek(0)
    with pa.ipc.open_stream(source) as reader:
        return reader.read_all()


def _validated(rows: Any) -> Any:
    """Validate and return a table or batch: damaged offsets would crash later, bad UTF-8 appear only in training."""
    rows.validate(full=True)
    return rows


def saved_dataset_files(folder: str) -> list[str] | None:
    """Return the Arrow files of a folder written by ``datasets.Dataset.save_to_disk``, or None for other folders.

    Raises:
        DataError: the folder holds several splits, or its description cannot be read.
    """
    if os.path.isfile(os.path.join(folder, "dataset_dict.json")):
        splits = _dataset_field(folder, "dataset_dict.json", "splits")
        raise DataError(
            f"{folder} is a saved DatasetDict with the splits {', '.join(splits)}: name the folder of one of them, "
            f"{os.path.join(folder, splits[0] if splits else 'train')}."
        )
    if not os.path.isfile(os.path.join(folder, "state.json")):
        return None
    # in the order of the data set, which need not be that of the names
    files = _dataset_field(folder, "state.json", "_data_files")
    return [os.path.join(folder, os.path.basename(file["filename"])) for file in files]


def _dataset_field(folder: str, name: str, key: str) -> list:
    path = os.path.join(folder, name)
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))[key]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} does not describe a saved dataset ({type(error).__name__}: {error}). Save it again with "
            "datasets' save_to_disk."
        ) from error
