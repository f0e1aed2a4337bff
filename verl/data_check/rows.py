"""One pass over the rows of some files: which cannot be used and why, which prompts come up twice, how long they are.

Knows columns and values; no tokenizer, no rewards.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from verl.utils.dataset.table import DataError, RowTable
from verl.utils.dataset.vision_utils import open_image, placeholder_mismatch, uneven_image_rows
from verl.utils.fs import copy_to_local

_SLICE = 10_000
"""Rows turned into Python objects at a time."""

_BYTES = 64 << 20
"""Bytes of columns turned into Python objects at a time: rows with images are heavy."""

_NAMED = 1000
"""Bad rows that are kept with their reasons; the others are counted."""


@dataclass(frozen=True)
class FileFacts:
    """One data file."""

    path: str
    rows: int
    columns: dict[str, str]
    """Name -> Arrow's type."""


@dataclass(frozen=True)
class RowProblem:
    """A row that a run could not use."""

    file: str
    row: int
    """From 0."""
    why: str

    def __str__(self) -> str:
        return f"{self.file}, row {self.row}: {self.why}"


@dataclass
class RowFacts:
    """What the pass over all rows found."""

    files: list[FileFacts] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Path -> why it cannot be read."""
    bad: list[RowProblem] = field(default_factory=list)
    num_bad: int = 0
    good: list[int] = field(default_factory=list)
    """Positions, over all files, of rows whose prompt can be rendered."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of text in each prompt of ``good``."""
    sources: Counter = field(default_factory=Counter)
    """Data source -> rows."""
    rows_of: dict[str, list[int]] = field(default_factory=dict)
    """Data source -> positions of its rows that have a ground truth."""
    num_duplicates: int = 0
    """Rows whose prompt (and images) stood before, in this file or another."""
    first_duplicate: tuple[str, str] | None = None
    """Where a prompt comes up again, and where it stood before."""
    marks: Counter = field(default_factory=Counter)
    """What a chat template writes -> prompts that have it written out."""

    def refuse(self, file: str, row: int, why: str) -> None:
        self.num_bad += 1
        if len(self.bad) < _NAMED:
            self.bad.append(RowProblem(file, row, why))


def open_files(paths: Sequence[str], config: Mapping[str, Any], facts: RowFacts) -> RowTable:
    """All files that can be read, as one table; the others are noted in ``facts``."""
    tables, names = [], []
    for path in map(str, paths):
        try:
            local = copy_to_local(path, cache_dir=config.get("cache_dir"), use_shm=config.get("use_shm", False))
            opened = RowTable.from_files([local])
        except (FileNotFoundError, DataError) as error:
            facts.unreadable[path] = str(error)
            continue
        for table, name in zip(opened.tables, opened.names, strict=True):
            tables.append(table)
            names.append(name)
            facts.files.append(FileFacts(name, table.num_rows, {f.name: str(f.type) for f in table.schema}))
    return RowTable(tables, names)


def walk(table: RowTable, config: Mapping[str, Any], facts: RowFacts, marks: re.Pattern[str]) -> None:
    """Look at every row, filling ``facts``.

    Args:
        config: the ``data`` section.
        marks: finds what a chat template writes.
    """
    prompt_key, source_key, image_key = config["prompt_key"], config["reward_fn_key"], config["image_key"]
    first_seen: dict[int, int] = {}
    start = 0
    for arrow, path in zip(table.tables, table.names, strict=True):
        uneven = _uneven(arrow, path, prompt_key, image_key)
        with_images = image_key in arrow.column_names
        names = [name for name in (prompt_key, source_key, "reward_model", image_key) if name in arrow.column_names]
        for number, row in enumerate(_rows(arrow.select(list(dict.fromkeys(names))))):
            position = start + number
            problems = [*_prompt_problems(row.get(prompt_key), prompt_key), *uneven.get(number, ())]
            if with_images:
                problems += _image_problems(row[image_key])
            source = row.get(source_key)
            facts.sources[str(source)] += 1
            goal = row.get("reward_model")
            if not isinstance(goal, Mapping) or goal.get("ground_truth") is None:
                if "reward_model" in row:
                    problems.append("reward_model has no ground_truth")
            elif source_key in row and (source is None or source == ""):
                problems.append(f"{source_key!r} is empty, so no scorer is chosen (data.reward_fn_key)")
            else:
                facts.rows_of.setdefault(str(source), []).append(position)
            if problems:
                facts.refuse(path, number, "; ".join(problems))
                continue
            text = _text(row[prompt_key])
            facts.good.append(position)
            facts.sizes.append(len(text.encode()))
            facts.marks.update(dict.fromkeys(marks.findall(text)).keys())
            key = hash((text, _image_key(row[image_key]))) if with_images else hash(text)
            before = first_seen.setdefault(key, position)
            if before != position:
                facts.num_duplicates += 1
                facts.first_duplicate = facts.first_duplicate or (table.where(position), table.where(before))
        start += arrow.num_rows


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    size = min(_SLICE, max(1, table.num_rows * _BYTES // max(table.nbytes, 1)))
    for begin in range(0, table.num_rows, size):
        yield from table.slice(begin, size).to_pylist()


def _uneven(table: pa.Table, path: str, prompt_key: str, image_key: str) -> dict[int, list[str]]:
    """Rows whose image placeholders and images differ in number."""
    if prompt_key not in table.column_names or image_key not in table.column_names or not table.num_rows:
        return {}
    if not _holds_text(table.schema.field(prompt_key).type):
        return {}
    found = uneven_image_rows(table[prompt_key], table[image_key])
    return {row: [placeholder_mismatch("", shown, held, image_key).removeprefix(": ")] for row, shown, held in found}


def _holds_text(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = kind.value_type
        return pa.types.is_struct(inner) and inner.get_field_index("content") >= 0
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _prompt_problems(prompt: Any, key: str) -> Iterator[str]:
    if prompt is None or (isinstance(prompt, (str, list)) and not prompt):
        yield f"{key!r} is empty"
    elif isinstance(prompt, list):
        for number, message in enumerate(prompt):
            if not isinstance(message, Mapping):
                yield f"{key!r} is a list whose item {number} is a {type(message).__name__}, not {{role, content}}"
            elif message.get("role") is None or (message.get("content") is None and not message.get("tool_calls")):
                missing = "role" if message.get("role") is None else "content"
                yield f"message {number} of {key!r} has no {missing}"
            else:
                continue
            return
    elif not isinstance(prompt, str):
        yield f"{key!r} is a {type(prompt).__name__}, neither a text nor a list of {{role, content}} messages"


def _text(prompt: str | list[Mapping[str, Any]]) -> str:
    """All that a prompt says, in one text."""
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content") for message in prompt]
    return "\n".join(text if isinstance(text, str) else json.dumps(text, default=str) for text in contents)


def _image_problems(images: Any) -> list[str]:
    """What is wrong with the first image of a row that cannot be opened; its pixels are not read."""
    for number, image in enumerate(_listed(images)):
        try:
            open_image(image)
        except ValueError as error:
            return [f"image {number}: {error}"]
    return []


def _image_key(images: Any) -> tuple:
    """Equal for equal images."""
    return tuple(
        image.get("bytes") or image.get("path") if isinstance(image, Mapping) else str(image)
        for image in _listed(images)
    )


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
