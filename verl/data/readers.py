"""JSON, JSON lines and CSV, read record by record: a bad one is known by its line.

Knows text and its records; how they become columns is ``columns_of_rows``' matter, what they mean nobody's here.
"""

import csv
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.table import DataError
from verl.utils.fs import written_once

_PIECE = 1 << 20
"""Characters of a JSON list that are read at a time."""

_LONGEST_TOKEN = 32
"""Where JSON is cut off by the end of what was read, the parser stumbles at most this many characters before it."""

_SPACE = re.compile(r"[ \t\r\n]*")


class Record(NamedTuple):
    """One record of a file: the dict it holds, or what is wrong with it, and the line it starts on (from 1)."""

    row: dict[str, Any] | None
    line: int
    why: str | None = None


def json_records(path: str, suffix: str) -> Iterator[Record]:
    """The records of a ``.json`` file (one list of objects, or one object a line) or of a ``.jsonl`` file.

    Raises:
        DataError: a list is not JSON from some line on, or the text is neither a list nor lines of objects.
    """
    with open(path, "rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"["):
        yield from _json_list(path)
        return
    for number, record in enumerate(_json_lines(path)):
        if record.why and number == 0 and suffix == ".json":
            raise DataError(
                f"{path} is neither a JSON list of objects nor one object a line (line {record.line}: {record.why}). "
                "Write it as a list, [{...}, {...}], or name it .jsonl with one object a line."
            )
        yield record


def _json_lines(path: str) -> Iterator[Record]:
    with open(path, "rb") as file:  # bytes are cut at \n only; text would be cut inside strings, at U+2028
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
    except RecursionError:
        return Record(None, number, "nested too deeply")
    return _object(row, number)


def _object(row: Any, line: int) -> Record:
    if isinstance(row, dict):
        return Record(row, line)
    return Record(None, line, f"{type(row).__name__} {str(row)[:40]!r} where an object {{...}} should be")


def _json_list(path: str) -> Iterator[Record]:
    """The items of one list, parsed one at a time, so that a large file is never whole in memory."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        text = _Pieces(file, path)
        mark = text.take()  # the opening bracket
        while True:
            if text.peek() == "]" and mark == "[":
                text.take()
                break
            line = text.line
            yield _object(text.item(), line)
            mark = text.take()
            if mark == "]":
                break
            if mark != ",":
                raise text.broken(f"{mark!r} where a comma or ] should be" if mark else "the list has no end")
        if text.peek():
            raise text.broken(f"{text.peek()!r} after the end of the list")


class _Pieces:
    """The text of a file, of which no more is held than the item at hand needs."""

    def __init__(self, file: TextIO, path: str):
        self.file, self.path = file, path
        self.text, self.at, self.line = "", 0, 1
        self.decoder = json.JSONDecoder()

    def more(self) -> bool:
        """Read on; False at the end of the file."""
        self.text, self.at = self.text[self.at :], 0
        try:
            piece = self.file.read(max(_PIECE, len(self.text)))
        except UnicodeDecodeError as error:
            raise self.broken(f"behind it is text that is not UTF-8 ({error.reason})") from error
        self.text += piece
        return bool(piece)

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            end = _SPACE.match(self.text, self.at).end()
            self.line += self.text.count("\n", self.at, end)
            self.at = end
            if end < len(self.text):
                return self.text[end]
            if not self.more():
                return ""

    def take(self) -> str:
        """:meth:`peek`, and step behind it."""
        mark = self.peek()
        self.at += len(mark)
        return mark

    def item(self) -> Any:
        """The JSON value that begins here."""
        self.peek()
        while True:
            try:
                item, end = self.decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos > len(self.text) - _LONGEST_TOKEN
                if not (is_cut and self.more()):
                    raise self.broken(error.msg) from error
                continue
            except RecursionError as error:
                raise self.broken("nested too deeply") from error
            if end == len(self.text) and not isinstance(item, (dict, list, str)) and self.more():
                continue  # a number may go on
            self.line += self.text.count("\n", self.at, end)
            self.at = end
            return item

    def broken(self, why: str) -> DataError:
        return DataError(f"{self.path} cannot be read as JSON: line {self.line}: {why}. Write the file anew.")


def csv_records(path: str) -> Iterator[Record]:
    """The records of a CSV file with a header line: every cell is text, an empty one is None.

    A column ``a.b`` is the entry ``b`` of an object ``a``.

    Raises:
        DataError: the header is empty or names a column twice, or a quote is never closed.
    """
    csv.field_size_limit(2**31 - 1)
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        line = 1
        try:
            header = next(reader, [])
            _check_header(header, path)
            paths = [name.split(".") for name in header]
            while True:
                line = reader.line_num + 1
                try:
                    cells = next(reader)
                except StopIteration:
                    return
                if cells:
                    yield _csv_row(cells, paths, line)
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
        problem = f"names the column {(twice or nested)[0]!r} twice"
    elif not "".join(header).isascii() and any("\udc80" <= char <= "\udcff" for char in "".join(header)):
        problem = "is not UTF-8"
    else:
        return
    raise DataError(
        f"{path} cannot be read as CSV: line 1 {problem}. The first line names the columns, separated by commas."
    )


def _csv_row(cells: list[str], paths: list[list[str]], line: int) -> Record:
    if len(cells) != len(paths):
        return Record(None, line, f"{len(cells)} cells where the header names {len(paths)} columns")
    row: dict[str, Any] = {}
    for names, cell in zip(paths, cells, strict=True):
        if not cell.isascii() and any("\udc80" <= char <= "\udcff" for char in cell):
            return Record(None, line, f"column {'.'.join(names)!r} is not UTF-8")
        place = row
        for name in names[:-1]:
            place = place.setdefault(name, {})
        place[names[-1]] = _cell(cell)
    return Record(row, line)


def _cell(text: str) -> Any:
    """A cell: None if empty, an object or a list of objects if it is the JSON of one, else its text."""
    start = text.lstrip()[:2]
    if start[:1] == "{" or start[:1] == "[":
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if isinstance(value, dict) or (value and all(isinstance(item, dict) for item in value)):
            return value
    return text or None


# -- Parquet and Arrow files to tables: small ones into memory, large ones as memory-mapped Arrow files --------------


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
