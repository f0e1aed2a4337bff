"""Rows of one or more data files, kept in Arrow's columns and turned into Python objects one row at a time.

Knows files and rows; no tokenizer, no prompts. Files need not agree on their columns.
"""

import copy
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.py_functional import nearest_name


class DataError(ValueError):
    """Something in a data file cannot be used; the message names file, row and rule."""


def read_table(path: str) -> pa.Table:
    """Read a ``.parquet``, ``.jsonl`` or ``.json`` file (the last: one list of objects, or one object a line).

    Raises:
        FileNotFoundError: there is no such file; names the working directory of a relative path.
        DataError: the file is not what its name says.
    """
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        where = "" if os.path.isabs(path) else f" (relative to {os.getcwd()})"
        what = "is a folder, not a file" if os.path.isdir(path) else "does not exist"
        raise FileNotFoundError(f"Data file {path!r}{where} {what}.")
    suffix = Path(path).suffix.lower()
    try:
        if suffix in (".json", ".jsonl"):
            rows = _read_json(path)
            names = dict.fromkeys(name for row in rows for name in row)
            return pa.table({name: [row.get(name) for row in rows] for name in names})
        with pq.ParquetFile(path) as file:  # pq.read_table first imports pyarrow's dataset layer: 0.2 CPU-s
            return file.read()
    except (pa.ArrowException, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as {'JSON' if suffix in ('.json', '.jsonl') else 'parquet'}: {error}"
        ) from error


def _read_json(path: str) -> list[dict]:
    text = Path(path).read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        return json.loads(text)
    rows = []
    for number, line in enumerate(text.split("\n")):  # splitlines would cut inside strings, at U+2028
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number + 1}: {error}") from error
    return rows


class RowTable:
    """The rows of several tables in a row; ``table[i]`` is a fresh dict of Python objects.

    Args:
        tables: one per file.
        names: how messages call each of them: the paths.
    """

    def __init__(self, tables: Sequence[pa.Table], names: Sequence[str]):
        self.tables = [table.combine_chunks() for table in tables]
        self.names = list(names)
        self._starts = np.cumsum([0, *(table.num_rows for table in self.tables)])
        self._index = np.arange(self._starts[-1])

    @classmethod
    def from_files(cls, paths: Sequence[str]) -> "RowTable":
        return cls([read_table(path) for path in paths], paths)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, item: int) -> dict[str, Any]:
        table, row = self._locate(item)
        return self.tables[table].slice(row, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[item] for item in range(len(self)))

    @property
    def column_names(self) -> list[str]:
        """Columns of any of the files, in the order they are met."""
        return list(dict.fromkeys(name for table in self.tables for name in table.column_names))

    def column(self, name: str) -> list[Any]:
        """One column as Python objects; ``None`` where a file has no such column."""
        values: list[Any] = [None] * len(self)
        files = np.searchsorted(self._starts, self._index, side="right") - 1
        for number, table in enumerate(self.tables):
            places = np.flatnonzero(files == number)
            if len(places) and name in table.column_names:
                rows = self._index[places] - self._starts[number]
                for place, value in zip(places, table[name].take(rows).to_pylist(), strict=True):
                    values[place] = value
        return values

    def require(self, name: str, option: str) -> None:
        """Every file must have this column, or the error lists what it has.

        Args:
            option: the config key that named the column.
        """
        for table, path in zip(self.tables, self.names, strict=True):
            if name not in table.column_names:
                raise DataError(
                    f"{path} has no column {name!r} ({option}); its columns are {', '.join(table.column_names)}."
                    f"{nearest_name(name, table.column_names)} Set {option} to the right one or write the file anew."
                )

    def select(self, indices: Sequence[int] | np.ndarray) -> "RowTable":
        """The rows at these positions, in this order."""
        chosen = copy.copy(self)
        chosen._index = self._index[np.asarray(indices, dtype=np.int64)]
        return chosen

    def filter(self, keep: Callable[[dict[str, Any]], bool]) -> "RowTable":
        """The rows for which ``keep(row)`` is true."""
        return self.select([item for item in range(len(self)) if keep(self[item])])

    def where(self, item: int) -> str:
        """``path, row k`` (from 0) of the row at a position: for messages."""
        table, row = self._locate(item)
        return f"{self.names[table]}, row {row}"

    def _locate(self, item: int) -> tuple[int, int]:
        if not -len(self) <= item < len(self):
            raise IndexError(f"row {item} of a table of {len(self)} rows")
        row = self._index[item]
        table = int(np.searchsorted(self._starts, row, side="right")) - 1
        return table, int(row - self._starts[table])
