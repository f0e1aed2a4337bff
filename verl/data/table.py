"""Rows of one or more data files, kept in Arrow's columns and turned into Python objects a few rows at a time.

Knows files and rows; no tokenizer, no prompts, no formats (``files.py``). Files need not agree on their columns.
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
"""Metadata of a text column whose cells are JSON: what it holds has no one type (a number here, a list there)."""

_BLOCK = 1000
"""Rows that are Python objects at a time while many are read."""


class DataError(ValueError):
    """Something in a data file cannot be used; the message names file, row and rule."""


class BadRow(NamedTuple):
    """A row that was left out: where it stands, and why."""

    where: str
    why: str


class FileTable(NamedTuple):
    """What was read of one file.

    ``row_numbers`` are those in the file (from 0) where some were left out, else None; ``skipped`` are these.
    """

    table: pa.Table
    name: str
    row_numbers: np.ndarray | None = None
    skipped: tuple[BadRow, ...] = ()


class RowTable:
    """The rows of several tables in a row; ``table[i]`` is a fresh dict of Python objects.

    Only the rows asked for become Python objects. Tables of memory-mapped files stay on disk.

    Args:
        tables: one per file.
        names: how messages call each of them: the paths.
        row_numbers: of each file, the number in the file of each row; None: they count from 0.
        skipped: rows of the files that are not here, and why.
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
        # Rows are read from batches: slicing a table looks at every chunk of every column.
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
        """The rows of local files (:func:`verl.data.files.open_table` takes more than these)."""
        from verl.data.files import read_file

        return cls.of([read_file(path) for path in paths])

    @classmethod
    def of(cls, files: Sequence[FileTable]) -> "RowTable":
        """The rows of files that were read."""
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
        """Columns of any of the files, in the order they are met."""
        return list(dict.fromkeys(name for table in self.tables for name in table.column_names))

    @property
    def row_numbers(self) -> list[np.ndarray | None]:
        """Of each file, the number in the file of each row; None: they count from 0."""
        return self._row_numbers

    def blocks(self, size: int = _BLOCK) -> list[range]:
        """All positions, cut into ranges of at most ``size``: what to hand to :meth:`rows` one after the other."""
        return [range(start, min(start + size, len(self))) for start in range(0, len(self), size)]

    def rows(self, block: range, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The rows at a range of positions as dicts.

        Args:
            names: the columns wanted; a row of a file without one has no such key. None: all.
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
        """One column as Python objects; ``None`` where a file has no such column."""
        return [row.get(name) for block in self.blocks() for row in self.rows(block, [name])]

    def distinct(self, name: str) -> list[Any]:
        """The different values of a column that holds texts or numbers, in the order they are met."""
        if len(self) < self._starts[-1]:  # some rows of the files are left out
            return list(dict.fromkeys(self.column(name)))
        columns = [table[name] for table in self.tables if name in table.column_names]
        return list(dict.fromkeys(value for column in columns for value in pc.unique(column).to_pylist()))

    def require(self, name: str, option: str) -> None:
        """Every file must have this column, or the error lists what it has.

        Args:
            option: the config key that named the column.
        """
        for table, path in zip(self.tables, self.names, strict=True):
            if name not in table.column_names:
                raise DataError(
                    f"{path} has no column {name!r} ({option}); its columns are "
                    f"{', '.join(table.column_names) or 'none'}.{nearest_name(name, table.column_names)} Set {option} "
                    "to the right one or write the file anew."
                )

    def at_most(self, count: int, seed: int | None) -> "RowTable":
        """That many rows: the first, or with a seed those it draws, in their order."""
        if count >= len(self):
            return self
        if seed is None:
            return self.select(np.arange(count))
        return self.select(np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False)))

    def select(self, indices: Sequence[int] | np.ndarray) -> "RowTable":
        """The rows at these positions, in this order."""
        chosen = copy.copy(self)
        chosen._index = self._index[np.asarray(indices, dtype=np.int64)]
        return chosen

    def followed_by(self, other: "RowTable") -> "RowTable":
        """The rows of both."""
        numbers = [*self._row_numbers, *other._row_numbers]
        skipped = [*self.skipped, *other.skipped]
        both = RowTable([*self.tables, *other.tables], [*self.names, *other.names], numbers, skipped)
        both._index = np.concatenate([self._index, other._index + self._starts[-1]])
        return both

    def without(self, bad: dict[int, str]) -> "RowTable":
        """The rows but for those at the positions of ``bad``, which says why; they are added to ``skipped``."""
        keep = np.ones(len(self), dtype=bool)
        keep[list(bad)] = False
        chosen = self.select(np.flatnonzero(keep))
        chosen.skipped = [*self.skipped, *(BadRow(self.where(item), why) for item, why in sorted(bad.items()))]
        return chosen

    def filter(self, keep: Callable[[dict[str, Any]], bool]) -> "RowTable":
        """The rows for which ``keep(row)`` is true."""
        return self.select(np.flatnonzero([bool(keep(row)) for row in self]))

    def where(self, item: int) -> str:
        """``path, row k`` (from 0) of the row at a position: for messages."""
        row = int(self._index[item])
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        row -= int(self._starts[number])
        numbers = self._row_numbers[number]
        return f"{self.names[number]}, row {row if numbers is None else numbers[row]}"

    def positions(self) -> np.ndarray:
        """Of each row here, its number among all rows of the files as they were opened."""
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
    """Whether the cells of a column are JSON text that stands for what it says."""
    return field.metadata is not None and field.metadata.get(b"verl") == b"json"


def read_table(path: str) -> pa.Table:
    """The rows of one local file as an Arrow table.

    Raises:
        FileNotFoundError: there is no such file; names the working directory of a relative path.
        DataError: the file is not what its name says.
    """
    from verl.data.files import read_file

    return read_file(path).table


def _pylist(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    return batch.to_pylist() if batch.num_columns else [{} for _ in range(batch.num_rows)]
