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

from verl.utils.dataset.domains import in_domains
from verl.utils.dataset.files import open_table
from verl.utils.dataset.prompt_rows import parse_messages
from verl.utils.dataset.table import DataError, RowTable
from verl.utils.dataset.vision_utils import PLACEHOLDER, open_image, placeholder_mismatch

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

    def refuse(self, where: str, why: str) -> None:
        """Note a row that cannot be used; ``where`` is as ``RowTable.where`` says it."""
        self.num_bad += 1
        if len(self.bad) < _NAMED:
            path, row = where.rsplit(", row ", 1)
            self.bad.append(RowProblem(path, int(row), why))


def open_files(paths: Sequence[str], config: Mapping[str, Any], facts: RowFacts, rows: int | None = None) -> RowTable:
    """All files that can be read, as one table; the others, and lines that are no record, are noted in ``facts``.

    Args:
        rows: of each file the first of them only; None: all.
    """
    table = RowTable([], [])
    for path in map(str, paths):
        try:
            opened = open_table(
                path,
                cache_dir=config.get("cache_dir"),
                use_shm=config.get("use_shm", False),
                bad_rows="skip",
                rows=rows,
            )
            if domains := config.get("domains"):
                opened = in_domains(opened, domains, config["reward_fn_key"])
        except (FileNotFoundError, DataError) as error:
            facts.unreadable[path] = str(error)
            continue
        table = table.followed_by(opened)
        for part, name in zip(opened.tables, opened.names, strict=True):
            facts.files.append(FileFacts(name, part.num_rows, {field.name: str(field.type) for field in part.schema}))
        for row in opened.skipped:
            facts.refuse(row.where, row.why)
    return table


def prompt_column(config: Mapping[str, Any]) -> str:
    """The column of prompts."""
    return config.get("messages_key", None) or config["prompt_key"]


def read_prompt(prompt: Any, config: Mapping[str, Any]) -> Any:
    """A cell of :func:`prompt_column` as a prompt: of ``data.messages_key``, JSON is read.

    Raises:
        ValueError: it is no JSON.
    """
    return parse_messages(prompt) if config.get("messages_key", None) else prompt


def walk(table: RowTable, config: Mapping[str, Any], facts: RowFacts, marks: re.Pattern[str]) -> None:
    """Look at every row, filling ``facts``.

    Args:
        config: the ``data`` section.
        marks: finds what a chat template writes.
    """
    keys = [prompt_column(config), "reward_model", *(config[f"{name}_key"] for name in ("reward_fn", "image", "video"))]
    first_seen: dict[int, int] = {}
    for position, row in _rows(table, [name for name in dict.fromkeys(keys) if name in table.column_names]):
        problems = _problems(row, config)
        source, goal = row.get(config["reward_fn_key"]), row.get("reward_model")
        facts.sources[str(source)] += 1
        if isinstance(goal, Mapping) and goal.get("ground_truth") is not None and source != "":
            facts.rows_of.setdefault(str(source), []).append(position)
        if problems:
            facts.refuse(table.where(position), "; ".join(problems))
            continue
        text = prompt_text(read_prompt(row[prompt_column(config)], config))
        facts.good.append(position)
        facts.sizes.append(len(text.encode()))
        facts.marks.update(dict.fromkeys(marks.findall(text)).keys())
        before = first_seen.setdefault(hash((text, _image_key(row.get(config["image_key"])))), position)
        if before != position:
            facts.num_duplicates += 1
            facts.first_duplicate = facts.first_duplicate or (table.where(position), table.where(before))


def _rows(table: RowTable, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Position and columns of every row, few rows at a time; a row of a file without a column has no such key."""
    weight = sum(part.select([name for name in names if name in part.column_names]).nbytes for part in table.tables)
    size = min(_SLICE, max(1, len(table) * _BYTES // max(weight, 1)))
    start = 0
    for part in table.tables:
        there = [name for name in names if name in part.column_names]
        for begin in range(start, start + part.num_rows, size):
            block = range(begin, min(begin + size, start + part.num_rows))
            chosen = table.select(block)
            columns = [chosen.column(name) for name in there]
            for position, values in zip(block, zip(*columns, strict=True), strict=bool(there)):
                yield position, dict(zip(there, values, strict=True))
        start += part.num_rows


def _problems(row: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Why a run could not use a row; nothing of columns that its file does not have."""
    found = []
    prompt_key, source_key, image_key = prompt_column(config), config["reward_fn_key"], config["image_key"]
    if prompt_key not in row:
        return [f"no column {prompt_key!r}"]
    try:
        prompt = read_prompt(row[prompt_key], config)
    except ValueError as error:
        return [f"{prompt_key!r} is not the JSON of messages (data.messages_key): {error}"]
    found += _prompt_problems(prompt, prompt_key)
    goal = row.get("reward_model")
    has_goal = isinstance(goal, Mapping) and (goal.get("ground_truth") is not None or goal.get("style") == "model")
    if "reward_model" in row and not has_goal:
        found.append("reward_model has no ground_truth")
    if source_key in row and row[source_key] in (None, ""):
        found.append(f"{source_key!r} is empty, so no scorer is chosen (data.reward_fn_key)")
    if image_key in row and not found:
        found += _image_problems(prompt, row[image_key], image_key)
    return found


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


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """All that a prompt says, in one text."""
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content") for message in prompt]
    return "\n".join(text if isinstance(text, str) else json.dumps(text, default=str) for text in contents)


def _image_problems(prompt: Any, images: Any, key: str) -> Iterator[str]:
    """Placeholders that differ in number from the images, or the first image that cannot be opened."""
    held, shown = _listed(images), prompt_text(prompt).count(PLACEHOLDER)
    if shown != len(held) and not _has_parts(prompt):
        yield placeholder_mismatch("", shown, len(held), key).removeprefix(": ")
    for number, image in enumerate(held):
        try:
            open_image(image)
        except ValueError as error:
            yield f"image {number}: {error}"
            return


def _has_parts(prompt: Any) -> bool:
    """Whether some message shows its images as parts instead of placeholders."""
    return not isinstance(prompt, str) and any(not isinstance(message.get("content"), str) for message in prompt)


def _image_key(images: Any) -> tuple:
    """Equal for equal images."""
    held = (image if isinstance(image, Mapping) else {"path": image} for image in _listed(images))
    return tuple(image.get("bytes") or str(image.get("path")) for image in held)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
