"""Rows of one or more data files, kept as Arrow columns and converted to Python objects a few rows at a time.

No tokenizer, prompts or file formats here (``files.py``). Files need not agree on their columns.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.utils.py_functional import nearest_name

JSON_COLUMN = {b"verl": b"json"}
"""Metadata of a text column whose cells are JSON because its values have no common type (a number, a list)."""

_BLOCK = 1000
"""Rows held as Python objects at a time while many are read."""


class DataError(ValueError):
    """Something in a data file cannot be used; the message names file, row and rule."""


class BadRow(NamedTuple):
    """A row that was left out: its location (``file, row k``) and the reason."""

    where: str
    why: str


class FileTable(NamedTuple):
    """Rows of one file.

    ``row_numbers`` are positions in the file (from 0) if some rows were left out, else None; ``skipped`` lists those.
    """

    table: pa.Table
    name: str
    row_numbers: np.ndarray | None = None
    skipped: tuple[BadRow, ...] = ()


class RowTable:
    """Rows of several tables, one after the other; ``table[i]`` is a new dict of Python objects.

    Only the requested rows become Python objects. Tables of memory-mapped files stay on disk.

    Args:
        tables: one per file.
        names: of each table for messages: the paths.
        row_numbers: of each file, the number in the file of each row; None: they count from 0.
        skipped: rows of the files that were left out, and why.
    """

    def __init__(
        self,
        tables: Sequence[pa.Table],
        names: Sequence[str],
        row_numbers: Sequence[np.ndarray | None] | None = None,
        skipped: Sequence[BadRow] = (),
    ):
        self.tables = list(tables)
        self.names = list(names)
        self.skipped = list(skipped)
        self._row_numbers = list(row_numbers) if row_numbers else [None] * len(self.tables)
        self._starts = np.cumsum([0, *(table.num_rows for table in self.tables)])
        self._index = np.arange(self._starts[-1])
        # Rows are read from batches: slicing a table visits every chunk of every column.
        batches = [[batch for batch in table.to_batches() if batch.num_rows] for table in self.tables]
        self._batches = [batch for of_table in batches for batch in of_table]
        self._batch_starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        self._json = {
            name
            for table in self.tables
            for name, field in zip(table.column_names, table.schema, strict=True)
            if is_json(field)
        }

    @classmethod
    def from_files(cls, paths: Sequence[str]) -> "RowTable":
        """Read local files (:func:`verl.data.files.open_table` takes globs, folders and remote paths too)."""
        from verl.data.files import read_file

        return cls.of([read_file(path) for path in paths])

    @classmethod
    def of(cls, files: Sequence[FileTable]) -> "RowTable":
        """Join the rows of files."""
        skipped = [row for file in files for row in file.skipped]
        numbers = [file.row_numbers for file in files]
        return cls([file.table for file in files], [file.name for file in files], numbers, skipped)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, item: int) -> dict[str, Any]:
        if not -len(self) <= item < len(self):
            raise IndexError(f"row {item} of a table of {len(self)} rows")
        row = int(self._index[item])
        number = int(np.searchsorted(self._batch_starts, row, side="right")) - 1
        found = self._batches[number].slice(row - int(self._batch_starts[number]), 1).to_pylist()
        return self._decoded(found)[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (row for block in self.blocks() for row in self.rows(block))

    @property
    def column_names(self) -> list[str]:
        """Columns of all files, in order of first appearance."""
        return list(dict.fromkeys(name for table in self.tables for name in table.column_names))

    @property
    def row_numbers(self) -> list[np.ndarray | None]:
        """Of each file, the number in the file of each row; None: they count from 0."""
        return self._row_numbers

    def blocks(self, size: int = _BLOCK) -> list[range]:
        """Return all positions, split into ranges of at most ``size``, for :meth:`rows`."""
        return [range(start, min(start + size, len(self))) for start in range(0, len(self), size)]

    def rows(self, block: range, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return the rows at a range of positions as dicts.

        Args:
            names: the columns to read; a row of a file without one has no such key. None: all.
        """
        index = self._index[block.start : block.stop]
        numbers = np.searchsorted(self._batch_starts, index, side="right") - 1
        rows: list[Any] = [None] * len(index)
        for number in np.unique(numbers).tolist():
            batch = self._batches[number]
            if names is not None:
                batch = batch.select([name for name in names if name in batch.schema.names])
            places = np.flatnonzero(numbers == number)
            inside = index[places] - self._batch_starts[number]
            if inside[-1] - inside[0] == len(inside) - 1 and (np.diff(inside) == 1).all():
                found = batch.slice(int(inside[0]), len(inside))
            else:
                found = batch.take(pa.array(inside))
            for place, row in zip(places.tolist(), self._decoded(_pylist(found)), strict=True):
                rows[place] = row
        return rows

    def column(self, name: str) -> list[Any]:
        """Return one column as Python objects; ``None`` where a file has no such column."""
        return [row.get(name) for block in self.blocks() for row in self.rows(block, [name])]

    def distinct(self, name: str) -> list[Any]:
        """Return the distinct values of a column of texts or numbers, in order of first appearance."""
        if len(self) < self._starts[-1]:  # some rows of the files are left out
            return list(dict.fromkeys(self.column(name)))
        columns = [table[name] for table in self.tables if name in table.column_names]
        return list(dict.fromkeys(value for column in columns for value in pc.unique(column).to_pylist()))

    def require(self, name: str, option: str) -> None:
        """Check that every file has a column.

        Args:
            option: the config key that names the column.

        Raises:
            DataError: a file does not have it; lists the columns it has.
        """
        for table, path in zip(self.tables, self.names, strict=True):
            if name not in table.column_names:
                raise DataError(
                    f"{path} has no column {name!r} ({option}); its columns are "
                    f"{', '.join(table.column_names) or 'none'}.{nearest_name(name, table.column_names)} Set {option} "
                    "to the right one or write the file again."
                )

    def at_most(self, count: int, seed: int | None) -> "RowTable":
        """Return at most ``count`` rows: the first, or with a seed a random sample in file order."""
        if count >= len(self):
            return self
        if seed is None:
            return self.select(np.arange(count))
        return self.select(np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False)))

    def select(self, indices: Sequence[int] | np.ndarray) -> "RowTable":
        """Return the rows at these positions, in this order."""
        chosen = copy.copy(self)
        chosen._index = self._index[np.asarray(indices, dtype=np.int64)]
        return chosen

    def followed_by(self, other: "RowTable") -> "RowTable":
        """Return the rows of this table, then those of ``other``."""
        numbers = [*self._row_numbers, *other._row_numbers]
        skipped = [*self.skipped, *other.skipped]
        both = RowTable([*self.tables, *other.tables], [*self.names, *other.names], numbers, skipped)
        both._index = np.concatenate([self._index, other._index + self._starts[-1]])
        return both

    def without(self, bad: dict[int, str]) -> "RowTable":
        """Return the rows without those at the positions in ``bad`` (position -> reason); they go to ``skipped``."""
        keep = np.ones(len(self), dtype=bool)
        keep[list(bad)] = False
        chosen = self.select(np.flatnonzero(keep))
        chosen.skipped = [*self.skipped, *(BadRow(self.where(item), why) for item, why in sorted(bad.items()))]
        return chosen

    def filter(self, keep: Callable[[dict[str, Any]], bool]) -> "RowTable":
        """Return the rows for which ``keep(row)`` is true."""
        return self.select(np.flatnonzero([bool(keep(row)) for row in self]))

    def where(self, item: int) -> str:
        """Return ``path, row k`` (from 0) of the row at a position, for messages."""
        row = int(self._index[item])
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        row -= int(self._starts[number])
        numbers = self._row_numbers[number]
        return f"{self.names[number]}, row {row if numbers is None else numbers[row]}"

    def positions(self) -> np.ndarray:
        """Return the number of each row among all rows of the files as they were opened."""
        return self._index

    def _decoded(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for name in self._json:
            for row in rows:
                if isinstance(row.get(name), str):
                    row[name] = json.loads(row[name])
        return rows


def distinct_values(datasets: Iterable[Any], column: str) -> list[Any]:
    """Return the values of a column over all datasets that are rows of files."""
    found: dict[Any, None] = {}
    for dataset in datasets:
        rows = getattr(dataset, "dataframe", None)
        if isinstance(rows, RowTable) and column in rows.column_names:
            found |= dict.fromkeys(rows.distinct(column))
    return list(found)


def is_json(field: pa.Field) -> bool:
    """Whether the cells of a column are JSON text to be parsed (``JSON_COLUMN``)."""
    return field.metadata is not None and field.metadata.get(b"verl") == b"json"


def read_table(path: str) -> pa.Table:
    """Read one local file as an Arrow table.

    Raises:
        FileNotFoundError: there is no such file; names the working directory of a relative path.
        DataError: the file is not in the format of its extension.
    """
    from verl.data.files import read_file

    return read_file(path).table


def _pylist(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    return batch.to_pylist() if batch.num_columns else [{} for _ in range(batch.num_rows)]
