"""Rows of one or more data files, kept as Arrow columns and converted to Python objects a few rows at a time.

No tokenizer, prompts or file formats here (``files.py``). Files need not agree on their columns.
"""

import copy
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.utils.exit_codes import ExitCode
from verl.utils.py_functional import nearest_name

JSON_COLUMN = {b"verl": b"json"}


"""Metadata of a text column whose values are JSON because they have no common type (a number, a list)."""


_BLOCK = 1000


"""Rows held as Python objects at a time while many are read."""


class DataError(ValueError):
    """Something in a data file cannot be used; the message names file, row and rule."""

    exit_class = ExitCode.DATA


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
        self.row_numbers: list[np.ndarray | None] = list(row_numbers) if row_numbers else [None] * len(self.tables)
        self._starts = np.cumsum([0, *(table.num_rows for table in self.tables)])
        # positions of the rows among all: a selection changes only this
        self._index = np.arange(self._starts[-1])
        # Rows are read from batches: slicing a table visits every chunk of every column.
        self._batches = [batch for table in self.tables for batch in table.to_batches() if batch.num_rows]
        self._batch_starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        self._json = {field.name for table in self.tables for field in table.schema if is_json(field)}

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

    @classmethod
    def joined(cls, parts: Sequence["RowTable"]) -> "RowTable":
        """Return the rows of several, one after the other."""
        table = cls(
            [file for part in parts for file in part.tables],
            [name for part in parts for name in part.names],
            [numbers for part in parts for numbers in part.row_numbers],
            [row for part in parts for row in part.skipped],
        )
        # rows that a part leaves out stay in its columns
        starts = np.cumsum([0, *(part._starts[-1] for part in parts)])
        indices = [part._index + start for part, start in zip(parts, starts, strict=False)]
        table._index = np.concatenate([np.zeros(0, np.int64), *indices])
        return table

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, item: int) -> dict[str, Any]:
        if not -len(self) <= item < len(self):
            raise IndexError(f"row {item} of a table of {len(self)} rows")
        row = int(self._index[item])
        # the last batch that starts at or before the row
        number = int(np.searchsorted(self._batch_starts, row, side="right")) - 1
        found = self._batches[number].slice(row - int(self._batch_starts[number]), 1).to_pylist()
        return self._decoded(found)[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (row for block in self.blocks() for row in self.rows(block))

    @property
    def column_names(self) -> list[str]:
        """Columns of all files, in order of first appearance."""
        return list(dict.fromkeys(name for table in self.tables for name in table.column_names))

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
            # a slice shares memory, take copies
            if inside[-1] - inside[0] == len(inside) - 1 and (np.diff(inside) == 1).all():
                found = batch.slice(int(inside[0]), len(inside))
            else:
                found = batch.take(arrow_positions(inside))
            # of no columns Arrow makes no rows
            values = found.to_pylist() if found.num_columns else [{} for _ in places]
            for place, row in zip(places.tolist(), self._decoded(values), strict=True):
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
        # in file order, so that neighbours in a file are read together
        return self.select(np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False)))

    def select(self, indices: Sequence[int] | np.ndarray) -> "RowTable":
        """Return the rows at these positions, in this order."""
        # shallow: the columns are shared
        chosen = copy.copy(self)
        chosen._index = self._index[np.asarray(indices, dtype=np.int64)]
        return chosen

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
        numbers = self.row_numbers[number]
        return f"{self.names[number]}, row {row if numbers is None else numbers[row]}"

    def positions(self) -> np.ndarray:
        """Return the number of each row among all rows of the files as they were opened."""
        return self._index

    def to_arrow(self) -> pa.Table:
        """Return the rows as one table; a column that a file lacks is null there.

        Raises:
            DataError: files have columns of one name and of types that cannot be joined.
        """
        if not self.tables:
            return pa.table({})
        try:
            joined = pa.concat_tables(self.tables, promote_options="permissive")
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{', '.join(self.names)}: columns of one name differ in type, and cannot stand in one file: {error}. "
                "Name the files one by one."
            ) from error
        return joined.take(arrow_positions(self._index))

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
    """Whether the values of a column are JSON text to be parsed (``JSON_COLUMN``)."""
    return field.metadata is not None and field.metadata.get(b"verl") == b"json"


def is_list(kind: pa.DataType) -> bool:
    """Whether the values of a column are lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def read_table(path: str) -> pa.Table:
    """Read one local file as an Arrow table.

    Raises:
        FileNotFoundError: there is no such file; names the working directory of a relative path.
        DataError: the file is not in the format of its extension.
    """
    from verl.data.files import read_file

    return read_file(path).table


# -- Rows that training cannot use, each with its reason. Columns are checked with Arrow; only suspicious rows become
# Python objects. --

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


"""Roles accepted in any conversation; others must appear in the chat template."""


_QUOTED = re.compile(r"""['"]([\w-]+)['"]""")


def known_roles(chat_template: Any) -> set[str]:
    """Return the usual roles and the quoted words of a chat template, which compares its own roles by name."""
    templates = chat_template.values() if isinstance(chat_template, dict) else [chat_template]
    return {*ROLES, *(word for text in templates if isinstance(text, str) for word in _QUOTED.findall(text))}


def parse_messages(prompt: Any) -> Any:
    """Parse messages from JSON text; anything else is returned as it is.

    Raises:
        ValueError: the text is not JSON.
    """
    return json.loads(prompt) if isinstance(prompt, str) else prompt


def why_unusable(prompt: Any, roles: Collection[str], is_messages: bool = False) -> str | None:
    """Return what is wrong with a prompt, or None.

    Args:
        roles: allowed roles of a message.
        is_messages: the prompt must be messages, or their JSON text; else plain text is allowed too.
    """
    # JSON of messages, as ROLL's files have them
    if is_messages and isinstance(prompt, str):
        try:
            prompt = json.loads(prompt)
        except ValueError as error:
            return f"is text that is not the JSON of messages: {error}"
        if isinstance(prompt, str):
            return "is a text where messages are expected"
    if prompt is None or _is_nan(prompt):
        return "is null" if prompt is None else "is NaN"
    if isinstance(prompt, str):
        return _why_no_text(prompt)
    if not isinstance(prompt, list | tuple | np.ndarray):
        return f"is {type(prompt).__name__}; a prompt is a text or a list of {{role, content}} messages"
    if not len(prompt):
        return "is an empty list"
    problems = (_why_no_message(message, number, roles) for number, message in enumerate(prompt))
    problem = next(filter(None, problems), None)
    if problem is None and all(
        _is_blank(message.get("content")) and not message.get("tool_calls") for message in prompt
    ):
        return "is empty: no message has a text"
    return problem


def _why_no_text(text: str) -> str | None:
    if not text.strip():
        return "is empty"
    return None if _is_unicode(text) else "is not valid Unicode"


def _why_no_message(message: Any, number: int, roles: Collection[str]) -> str | None:
    if not isinstance(message, dict):
        return f"has {type(message).__name__} as message {number} where {{role, content}} is expected"
    role, content = message.get("role"), message.get("content")
    if role is None:
        return f"has no role in message {number}"
    if not isinstance(role, str) or role not in roles:
        return (
            f"has the role {role!r} in message {number}, which is none of {', '.join(ROLES)} nor of the chat template"
        )
    # a turn that only calls tools has no text
    if content is None:
        return None if message.get("tool_calls") else f"has no content in message {number}"
    if not isinstance(content, str | list):
        return f"has a content of type {type(content).__name__} in message {number}"
    if isinstance(content, str) and not _is_unicode(content):
        return f"is not valid Unicode in message {number}"
    return None


def _is_blank(content: Any) -> bool:
    return not content or isinstance(content, str) and not content.strip()


def _is_unicode(text: str) -> bool:
    """Whether a text can be encoded as UTF-8; a lone surrogate, which JSON allows, cannot."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def bad_prompts(table: RowTable, key: str, roles: set[str], option: str, is_messages: bool) -> dict[int, str]:
    """Return position in a table as it was read -> what is wrong with the prompt there.

    Args:
        key: the column of prompts.
        option: the config key that names it.

    Raises:
        DataError: the column of a file is of a type that no prompt has.
    """
    bad: dict[int, str] = {}
    start = 0
    for file, name in zip(table.tables, table.names, strict=True):
        field = file.schema.field(key)
        if not is_json(field):
            _check_type(field.type, name, key, option)
        for batch in file.select([key]).to_batches():
            suspects = np.arange(len(batch)) if is_messages or is_json(field) else _suspects(batch.column(0), roles)
            prompts = batch.column(0).take(arrow_positions(suspects)).to_pylist() if len(suspects) else []
            for row, prompt in zip(suspects.tolist(), prompts, strict=True):
                prompt = json.loads(prompt) if is_json(field) and prompt is not None else prompt
                if why := why_unusable(prompt, roles, is_messages):
                    bad[start + row] = f"{key!r} ({option}) {why}"
            start += len(batch)
    return bad


def _check_type(kind: pa.DataType, path: str, key: str, option: str) -> None:
    # writers of Parquet may encode repeated texts as a dictionary
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_null(kind) or is_text(text) or pa.types.is_string_view(text):
        return
    if not is_list(kind) or not (pa.types.is_struct(kind.value_type) or pa.types.is_null(kind.value_type)):
        raise DataError(
            f"{path}: column {key!r} is of type {kind}; a prompt is a text or a list of {{role, content}} messages. "
            f"Name the right column with {option} or write the file again."
        )
    # every list is empty: each row is named later
    if pa.types.is_null(kind.value_type):
        return
    fields = [field.name for field in kind.value_type]
    missing = [name for name in ("role", "content") if name not in fields]
    if missing:
        raise DataError(
            f"{path}: the messages of column {key!r} have no {' and no '.join(missing)}; their fields are "
            f"{', '.join(fields) or 'none'}. A message is {{role, content}}: name the right column with {option} or "
            "write the file again."
        )


def _suspects(column: pa.Array, roles: set[str]) -> np.ndarray:
    """Return the rows of a column of texts or messages that may be bad; every bad row is among them."""
    if pa.types.is_null(column.type) or pa.types.is_null(getattr(column.type, "value_type", pa.int8())):
        return np.arange(len(column))
    if not is_list(column.type):
        return np.flatnonzero(_blank(column)) if is_text(column.type) else np.arange(len(column))
    # one flat array of all messages, and the row of each
    messages = pc.list_flatten(column)
    parents = whole_numbers(pc.list_parent_indices(column))
    role, content = pc.struct_field(messages, "role"), pc.struct_field(messages, "content")
    if not is_text(role.type) or not is_text(content.type):
        return np.arange(len(column))
    distinct = role.dictionary_encode()
    known = np.array([name in roles for name in distinct.dictionary.to_pylist()], bool)
    odd = ~bools(role.is_valid()) | ~bools(content.is_valid())
    odd[~odd] = ~known[whole_numbers(distinct.indices)[~odd]]
    blank = _blank(content)
    texts = np.bincount(parents[~blank], minlength=len(column))
    # no message with a text
    suspect = texts == 0
    suspect[parents[odd]] = True
    return np.flatnonzero(suspect)


def is_text(kind: pa.DataType) -> bool:
    """Whether the values of a column are texts."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _blank(texts: pa.Array) -> np.ndarray:
    """Return a mask of texts that are null, empty or only space."""
    # utf8_is_space is false for an empty text
    return (text_lengths(texts) == 0) | bools(pc.utf8_is_space(texts))


# -- Arrow to numpy and back; pa.array, pa.scalar and to_numpy import pandas, 0.2 CPU seconds -------------------------


def arrow_positions(values: np.ndarray) -> pa.Array:
    """Return positions as Arrow takes them."""
    values = np.ascontiguousarray(values, np.int64)
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])


def whole_numbers(values: pa.Array) -> np.ndarray:
    """Return whole numbers; a null is any of them."""
    numbers = np.frombuffer(values.buffers()[1] or b"", f"int{values.type.bit_width}")
    return numbers[values.offset : values.offset + len(values)]


def text_lengths(texts: pa.Array) -> np.ndarray:
    """Return the bytes of each text, int64; of a null 0."""
    return np.where(bools(texts.is_valid()), whole_numbers(pc.binary_length(texts)), 0).astype(np.int64)


def bools(values: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return whether each is true; a null is not."""
    if isinstance(values, pa.ChunkedArray):
        return np.concatenate([np.zeros(0, bool), *map(bools, values.chunks)])
    mask = np.ones(len(values), bool)
    for bits in filter(None, values.buffers()):  # valid, true
        one_each = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        mask &= one_each[values.offset : values.offset + len(values)].astype(bool)
    return mask


def bad_ground_truths(table: RowTable) -> dict[int, str]:
    """Return position in a table as it was read -> the reason, of rows whose ``ground_truth`` is NaN."""
    bad: dict[int, str] = {}
    start = 0
    for file in table.tables:
        rows: list[int] = []
        field = file.schema.field("reward_model") if "reward_model" in file.column_names else None
        if field is not None and is_json(field):
            values = [None if text is None else json.loads(text) for text in file["reward_model"].to_pylist()]
            truths = [value.get("ground_truth") if isinstance(value, dict) else None for value in values]
            rows = [row for row, truth in enumerate(truths) if _is_nan(truth)]
        elif field is not None and pa.types.is_struct(field.type) and field.type.get_field_index("ground_truth") >= 0:
            column = pc.struct_field(file["reward_model"], "ground_truth")
            rows = np.flatnonzero(bools(pc.is_nan(column))).tolist() if pa.types.is_floating(column.type) else []
        # NaN equals no answer, itself included
        bad |= dict.fromkeys((start + row for row in rows), "'reward_model' has the ground_truth NaN")
        start += file.num_rows
    return bad


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def bad_ids(table: RowTable, key: str) -> dict[int, str]:
    """Return position -> what is wrong with the prompt id there: empty, or repeated."""
    bad: dict[int, str] = {}
    first: dict[str, int] = {}
    # compared as text: 7 and '7' would be one id in the rollout
    for item, value in enumerate(table.column(key)):
        if value is None or _is_nan(value) or str(value) == "":
            bad[item] = f"{key!r} (data.prompt_id_key) is empty"
        elif (earlier := first.setdefault(str(value), item)) != item:
            bad[item] = f"{key!r} (data.prompt_id_key) is {value!r}, as in {table.where(earlier)}"
    return bad


def long_ids(table: RowTable, key: str, limit: int, encode: Callable[[list[str]], list[list[int]]]) -> dict[int, str]:
    """Return position -> the reason, of prompt ids with more than ``limit`` tokens."""
    lengths = (len(encode([str(value)])[0]) for value in table.column(key))
    rule = f"tokens, more than data.max_prompt_id_length={limit}"
    return {item: f"{key!r} has {length} {rule}" for item, length in enumerate(lengths) if length > limit}


def first_bad_rows(bad: Sequence[BadRow], count: int = 5) -> str:
    """Return the first bad rows with their reasons, for a message."""
    first = "; ".join(f"{row.where}: {row.why}" for row in bad[:count])
    return f"{first}{'; ...' if len(bad) > count else ''}"


def leave_out(table: RowTable, bad: Mapping[int, str], bad_rows: str = "refuse") -> RowTable:
    """Return the rows that are not bad; the others are added to ``skipped``.

    Args:
        bad: position -> reason.
        bad_rows: ``refuse`` or ``skip``, as ``data.bad_rows``.

    Raises:
        DataError: some rows are bad and ``refuse``, or none is left; lists the first.
    """
    if not bad:
        return table
    first = first_bad_rows([BadRow(table.where(item), why) for item, why in sorted(bad.items())])
    if bad_rows != "skip":
        raise DataError(
            f"{len(bad)} of {len(table)} rows cannot be used ({first}). Rows count from 0. Correct or remove them, or "
            "set data.bad_rows=skip to leave them out."
        )
    # a run without rows would fail later, and say less
    if len(bad) == len(table):
        raise DataError(f"data.bad_rows=skip leaves none of {len(table)} rows ({first}). Correct the files.")
    return table.without(dict(bad))
