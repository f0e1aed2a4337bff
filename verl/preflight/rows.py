"""Row checks of data files: unusable rows with reasons, data sources, prompt sizes, duplicates.

Every row is checked with Arrow, by the same functions as in the dataset; the first rows of each file also as Python
objects. No tokenizer or rewards here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.data.domains import in_domains
from verl.data.files import open_table
from verl.data.row_checks import bad_ground_truths, bad_ids, bad_prompts, known_roles, parse_messages
from verl.data.table import DataError, RowTable, is_json
from verl.data.vision import open_image

_SLICE = 10_000
"""Rows turned into Python objects at a time."""

_BYTES = 64 << 20
"""Bytes of columns turned into Python objects at a time: rows with images are large."""

_NAMED = 1000
"""Most bad rows listed with their reasons; further ones are only counted."""


@dataclass(frozen=True)
class FileInfo:
    """One data file."""

    path: str
    rows: int
    """Including lines that are not records."""
    columns: dict[str, str]
    """Name -> Arrow's type."""


@dataclass(frozen=True)
class RowProblem:
    """A row that a run cannot use."""

    file: str
    row: int
    """From 0."""
    why: str

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {self.why}"


@dataclass
class RowStatistics:
    """Statistics and problems of the rows of all files."""

    files: list[FileInfo] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Path -> why it cannot be read."""
    keys: dict[str, list[str]] = field(default_factory=dict)
    """Path as it was given -> names of its files."""
    bad: list[RowProblem] = field(default_factory=list)
    num_bad: int = 0
    bad_of: Counter = field(default_factory=Counter)
    """File -> number of bad rows."""
    good: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Positions, over all files, of rows whose prompt can be rendered."""
    sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Bytes of text in each prompt of ``good``."""
    kinds: dict[tuple[str, ...], int] = field(default_factory=dict)
    """Roles of a prompt's messages -> the first position with these, among the rows checked closely."""
    sources: Counter = field(default_factory=Counter)
    """Data source -> rows."""
    rows_of: dict[str, np.ndarray] = field(default_factory=dict)
    """Data source -> positions of its rows that have a ground truth."""
    num_duplicates: int = 0
    """Rows whose prompt (and images) repeat an earlier row of any file."""
    first_duplicate: tuple[str, str] | None = None
    """Location of the first repeated prompt, and of the row it repeats."""
    without_user: list[str] = field(default_factory=list)
    """Rows without a user message."""
    marks: Counter = field(default_factory=Counter)
    """Chat template marker -> prompts that contain it."""
    agents: Counter = field(default_factory=Counter)
    """``agent_name`` -> rows."""
    bad_positions: dict[int, str] = field(default_factory=dict)
    """Position -> why the row cannot be used; `finish_checks` adds these to ``bad``."""
    first_positions: dict[Any, int] = field(default_factory=dict, repr=False)
    """Prompt and images -> position of their first row."""

    def refuse(self, where: str, why: str) -> None:
        """Add a row that cannot be used; ``where`` is in the format of ``RowTable.where``."""
        path, row = where.rsplit(", row ", 1)
        self.num_bad += 1
        self.bad_of[path] += 1
        if len(self.bad) < _NAMED:
            self.bad.append(RowProblem(path, int(row), why))


def open_files(paths: Sequence[str], config: Mapping[str, Any], stats: RowStatistics) -> RowTable:
    """Open all readable files as one table; unreadable files and bad lines are added to ``stats``."""
    table = RowTable([], [])
    for path in dict.fromkeys(map(str, paths)):
        try:
            opened = open_table(
                path, cache_dir=config.get("cache_dir"), use_shm=config.get("use_shm", False), bad_rows="skip"
            )
            if domains := config.get("domains"):
                opened = in_domains(opened, domains, config["reward_fn_key"])
        except (OSError, ImportError, DataError) as error:
            stats.unreadable[path] = str(error)
            continue
        stats.keys[path] = list(opened.names)
        known = {file.path for file in stats.files}  # two globs may share files
        opened = _only(opened, [i for i, name in enumerate(opened.names) if name not in known])
        filled = [i for i, part in enumerate(opened.tables) if part.num_rows]
        table = table.followed_by(opened if len(filled) == len(opened.tables) else _only(opened, filled))
        num_skipped = Counter(row.where.rsplit(", row ", 1)[0] for row in opened.skipped)
        for part, name in zip(opened.tables, opened.names, strict=True):
            kinds = {field.name: str(field.type) for field in part.schema}
            stats.files.append(FileInfo(name, part.num_rows + num_skipped[name], kinds))
        for row in opened.skipped:
            stats.refuse(row.where, row.why)
    return table


def _only(table: RowTable, files: Sequence[int]) -> RowTable:
    """Return some files of a table from which no rows were selected yet."""
    names = [table.names[i] for i in files]
    skipped = [row for row in table.skipped if row.where.rsplit(", row ", 1)[0] in names]
    return RowTable([table.tables[i] for i in files], names, [table._row_numbers[i] for i in files], skipped)


def prompt_column(config: Mapping[str, Any]) -> str:
    """Return the column of prompts."""
    return config.get("messages_key", None) or config["prompt_key"]


def prompt_option(config: Mapping[str, Any]) -> str:
    """Return the option that names the column of prompts."""
    return "data.messages_key" if config.get("messages_key", None) else "data.prompt_key"


def read_prompt(prompt: Any, config: Mapping[str, Any]) -> Any:
    """Return a cell of :func:`prompt_column` as a prompt; the JSON of ``data.messages_key`` is parsed.

    Raises:
        ValueError: it is not JSON.
    """
    return parse_messages(prompt) if config.get("messages_key", None) else prompt


def check_prompts(
    table: RowTable,
    config: Mapping[str, Any],
    stats: RowStatistics,
    template: str | None,
    marks: re.Pattern,
    limit: int,
) -> None:
    """Check the prompt of every row.

    Args:
        config: the ``data`` section.
        template: the chat template, whose own roles are allowed in addition to the usual ones.
        marks: pattern of chat template markers.
        limit: rows of each file that are checked closely.

    Raises:
        DataError: the prompt column of a file has another type.
    """
    key, bad = prompt_column(config), stats.bad_positions
    bad |= bad_prompts(table, key, known_roles(template), prompt_option(config), bool(config.get("messages_key", None)))
    bad |= {i: why for i, why in bad_ground_truths(table).items() if i not in bad}
    if config.get("prompt_id_key", None) in table.column_names:
        bad |= {i: why for i, why in bad_ids(table, config["prompt_id_key"]).items() if i not in bad}
    for position, row in _first_rows(table, config, limit):
        if position not in bad and (why := _check_closely(table, position, row, config, stats, marks)):
            bad[position] = why


def _check_closely(
    table: RowTable,
    position: int,
    row: dict[str, Any],
    config: Mapping[str, Any],
    stats: RowStatistics,
    marks: re.Pattern,
) -> str | None:
    """Return what is wrong with a row that passed the column checks; updates the statistics."""
    prompt, image_key = read_prompt(row[prompt_column(config)], config), config["image_key"]
    if image_key in row and (why := _bad_image(row[image_key])):
        return why
    text = prompt_text(prompt)
    if not isinstance(prompt, str):
        roles = tuple(message["role"] for message in prompt)
        stats.kinds.setdefault(roles, position)
        if "user" not in roles:
            stats.without_user.append(table.where(position))
    stats.marks.update(dict.fromkeys(marks.findall(text)).keys())
    first = stats.first_positions.setdefault((text, _image_key(row.get(image_key))), position)
    if first != position:
        stats.num_duplicates += 1
        stats.first_duplicate = stats.first_duplicate or (table.where(position), table.where(first))
    return None


def check_ground_truths(
    table: RowTable, config: Mapping[str, Any], stats: RowStatistics, needs_truth: bool, is_built_in: bool
) -> None:
    """Check the data source and ground truth of every row.

    Args:
        config: the ``data`` section.
        needs_truth: whether a function is called with the ground truth.
        is_built_in: whether the built-in rules score, which need a ground truth that is not null.
    """
    start, key, rows_of = 0, config["reward_fn_key"], {}
    for part in table.tables:
        sources, (truths, is_model) = _texts(part, key), _ground_truth_states(part)
        stats.sources.update(map(str, sources))
        stats.agents.update(name for name in _texts(part, "agent_name") if name is not None)
        for row, source in enumerate(sources):
            if truths[row] == 2 and source != "":
                rows_of.setdefault(str(source), []).append(start + row)
        if needs_truth and "reward_model" in part.column_names:
            lacking = (truths == 0) | ((truths == 1) & ~is_model if is_built_in else False)
            _add(stats.bad_positions, start + np.flatnonzero(lacking), "reward_model has no ground_truth")
        if needs_truth and is_built_in and key in part.column_names:
            empty = np.array([start + row for row, source in enumerate(sources) if source in (None, "")], np.int64)
            _add(stats.bad_positions, empty, f"{key!r} is empty, so no scorer is chosen (data.reward_fn_key)")
        start += part.num_rows
    stats.rows_of = {source: np.array(rows, np.int64) for source, rows in rows_of.items()}


def _add(bad: dict[int, str], positions: np.ndarray, why: str) -> None:
    for position in positions.tolist():
        bad[position] = f"{bad[position]}; {why}" if position in bad else why


def finish_checks(table: RowTable, config: Mapping[str, Any], stats: RowStatistics) -> None:
    """Record the bad rows, and the prompt sizes of the good ones."""
    for position, why in sorted(stats.bad_positions.items()):
        stats.refuse(table.where(position), why)
    is_good = np.ones(len(table), bool)
    is_good[list(stats.bad_positions)] = False
    sizes = [_sizes(part, prompt_column(config)) for part in table.tables]
    stats.good = np.flatnonzero(is_good)
    stats.sizes = np.concatenate([np.zeros(0, np.int64), *sizes])[stats.good]


def _texts(part: pa.Table, key: str) -> list[Any]:
    """Return the values of a column; Nones if the file does not have it."""
    return part[key].to_pylist() if key in part.column_names else [None] * part.num_rows


def _ground_truth_states(part: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Return of each row 2 (has a ground truth), 1 (null) or 0 (no such field); and whether its style is model."""
    nothing = np.zeros(part.num_rows, np.int8), np.zeros(part.num_rows, bool)
    if "reward_model" not in part.column_names:
        return nothing
    kind, column = part.schema.field("reward_model"), part["reward_model"].combine_chunks()
    if is_json(kind) or not pa.types.is_struct(kind.type):
        cells = RowTable([part.select(["reward_model"])], [""]).column("reward_model")
        has = [0 if not isinstance(c, Mapping) or "ground_truth" not in c else 2 - (c["ground_truth"] is None)
               for c in cells]  # fmt: skip
        judged = [isinstance(c, Mapping) and c.get("style") == "model" for c in cells]
        return np.array(has, np.int8), np.array(judged, bool)
    there = np.asarray(pc.is_valid(column).to_numpy(zero_copy_only=False))
    names = [kind.type.field(i).name for i in range(kind.type.num_fields)]
    if "ground_truth" not in names:
        return nothing
    truth = np.asarray(pc.is_valid(pc.struct_field(column, "ground_truth")).to_numpy(zero_copy_only=False))
    is_model = nothing[1]
    if "style" in names and pa.types.is_string(kind.type.field("style").type):
        equal = pc.equal(pc.struct_field(column, "style"), "model")
        is_model = np.asarray(pc.fill_null(equal, False).to_numpy(zero_copy_only=False))
    return np.where(there, 1 + truth, 0).astype(np.int8), is_model


def _first_rows(table: RowTable, config: Mapping[str, Any], limit: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield position and columns of the first rows of each file, read in small slices."""
    names = [prompt_column(config), config["image_key"]]
    start = 0
    for part in table.tables:
        there = [name for name in names if name in part.column_names]
        size = min(_SLICE, max(1, part.num_rows * _BYTES // max(part.select(there).nbytes, 1)))
        for begin in range(start, start + min(limit, part.num_rows), size):
            block = range(begin, min(begin + size, start + min(limit, part.num_rows)))
            yield from zip(block, table.rows(block, there), strict=True)
        start += part.num_rows


def _sizes(part: pa.Table, key: str) -> np.ndarray:
    """Return the bytes of text of each prompt: exact for texts and messages of text, else an upper bound."""
    column = part[key].combine_chunks() if part[key].num_chunks != 1 else part[key].chunk(0)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    kind = getattr(column.type, "value_type", None)
    if kind is not None and pa.types.is_struct(kind) and kind.get_field_index("content") >= 0:
        contents = pc.struct_field(pc.list_flatten(column), "content")
        if pa.types.is_string(contents.type) or pa.types.is_large_string(contents.type):
            lengths = pc.fill_null(pc.binary_length(contents), 0).to_numpy(zero_copy_only=False) + 1
            parents = pc.list_parent_indices(column).to_numpy()
            sums = np.bincount(parents, weights=lengths, minlength=len(column)).astype(np.int64)
            return np.maximum(sums - 1, 0)
    return np.array([len(prompt_text(cell or "").encode()) for cell in column.to_pylist()], np.int64)


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the contents of a prompt as one text."""
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content") for message in prompt]
    return "\n".join(text if isinstance(text, str) else str(text) for text in contents)


def _bad_image(images: Any) -> str | None:
    """Return the error of the first image of a row that cannot be opened."""
    for number, image in enumerate(_listed(images)):
        try:
            open_image(image)
        except ValueError as error:
            return f"image {number}: {error}"
    return None


def _image_key(images: Any) -> tuple:
    """Return a key that is equal for equal images."""
    images = (image if isinstance(image, Mapping) else {"path": image} for image in _listed(images))
    return tuple(image.get("bytes") or str(image.get("path")) for image in images)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def evenly_spaced(count: int, limit: int | None) -> Sequence[int]:
    """Return at most ``limit`` of ``count`` positions, evenly spaced, including the first."""
    if limit is None or count <= limit:
        return range(count)
    return [i * count // limit for i in range(limit)]
