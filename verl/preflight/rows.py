"""The rows of some files: those no run can use and why, their data sources, the size of their prompts, duplicates.

Every row is looked at with Arrow, by the data set's own rules; the first rows of each file once more as Python objects.
Knows columns and values; no tokenizer, no rewards.
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
"""Bytes of columns turned into Python objects at a time: rows with images are heavy."""

_NAMED = 1000
"""Bad rows that are kept with their reasons; the others are counted."""


@dataclass(frozen=True)
class FileFacts:
    """One data file."""

    path: str
    rows: int
    """Lines that are no record included."""
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
    """What was found in the rows of all files."""

    files: list[FileFacts] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Path -> why it cannot be read."""
    keys: dict[str, list[str]] = field(default_factory=dict)
    """Path as it was given -> names of the files it stands for."""
    bad: list[RowProblem] = field(default_factory=list)
    num_bad: int = 0
    bad_of: Counter = field(default_factory=Counter)
    """File -> bad rows."""
    good: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Positions, over all files, of rows whose prompt can be rendered."""
    sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Bytes of text in each prompt of ``good``."""
    kinds: dict[tuple[str, ...], int] = field(default_factory=dict)
    """Roles of a prompt's messages -> the first position with them, among the rows looked at closely."""
    sources: Counter = field(default_factory=Counter)
    """Data source -> rows."""
    rows_of: dict[str, np.ndarray] = field(default_factory=dict)
    """Data source -> positions of its rows that have a ground truth."""
    num_duplicates: int = 0
    """Rows whose prompt (and images) stood before, in this file or another."""
    first_duplicate: tuple[str, str] | None = None
    """Where a prompt comes up again, and where it stood before."""
    without_user: list[str] = field(default_factory=list)
    """Rows none of whose messages is of a user."""
    marks: Counter = field(default_factory=Counter)
    """What a chat template writes -> prompts that have it written out."""
    agents: Counter = field(default_factory=Counter)
    """``agent_name`` -> rows."""
    odd: dict[int, str] = field(default_factory=dict)
    """Position -> why the row cannot be used, of those not noted yet."""
    seen: dict[Any, int] = field(default_factory=dict, repr=False)
    """Prompt and images -> where they stood first."""

    def refuse(self, where: str, why: str) -> None:
        """Note a row that cannot be used; ``where`` is as ``RowTable.where`` says it."""
        path, row = where.rsplit(", row ", 1)
        self.num_bad += 1
        self.bad_of[path] += 1
        if len(self.bad) < _NAMED:
            self.bad.append(RowProblem(path, int(row), why))


def open_files(paths: Sequence[str], config: Mapping[str, Any], facts: RowFacts) -> RowTable:
    """All files that can be read, as one table; the others, and lines that are no record, are noted in ``facts``."""
    table = RowTable([], [])
    for path in dict.fromkeys(map(str, paths)):
        try:
            opened = open_table(
                path, cache_dir=config.get("cache_dir"), use_shm=config.get("use_shm", False), bad_rows="skip"
            )
            if domains := config.get("domains"):
                opened = in_domains(opened, domains, config["reward_fn_key"])
        except (OSError, ImportError, DataError) as error:
            facts.unreadable[path] = str(error)
            continue
        facts.keys[path] = list(opened.names)
        known = {file.path for file in facts.files}  # two globs may share files
        opened = _only(opened, [i for i, name in enumerate(opened.names) if name not in known])
        held = [i for i, part in enumerate(opened.tables) if part.num_rows]
        table = table.followed_by(opened if len(held) == len(opened.tables) else _only(opened, held))
        lost = Counter(row.where.rsplit(", row ", 1)[0] for row in opened.skipped)
        for part, name in zip(opened.tables, opened.names, strict=True):
            kinds = {field.name: str(field.type) for field in part.schema}
            facts.files.append(FileFacts(name, part.num_rows + lost[name], kinds))
        for row in opened.skipped:
            facts.refuse(row.where, row.why)
    return table


def _only(table: RowTable, files: Sequence[int]) -> RowTable:
    """Some files of a table that is as it was read."""
    names = [table.names[i] for i in files]
    skipped = [row for row in table.skipped if row.where.rsplit(", row ", 1)[0] in names]
    return RowTable([table.tables[i] for i in files], names, [table._row_numbers[i] for i in files], skipped)


def prompt_column(config: Mapping[str, Any]) -> str:
    """The column of prompts."""
    return config.get("messages_key", None) or config["prompt_key"]


def prompt_option(config: Mapping[str, Any]) -> str:
    """The option that names it."""
    return "data.messages_key" if config.get("messages_key", None) else "data.prompt_key"


def read_prompt(prompt: Any, config: Mapping[str, Any]) -> Any:
    """A cell of :func:`prompt_column` as a prompt: of ``data.messages_key``, JSON is read.

    Raises:
        ValueError: it is no JSON.
    """
    return parse_messages(prompt) if config.get("messages_key", None) else prompt


def look(
    table: RowTable, config: Mapping[str, Any], facts: RowFacts, template: str | None, marks: re.Pattern, limit: int
) -> None:
    """Look at the prompt of every row.

    Args:
        config: the ``data`` section.
        template: the chat template, whose roles are known beside the usual ones.
        marks: finds what a chat template writes.
        limit: rows of each file that are looked at closely.

    Raises:
        DataError: the column of prompts of a file holds something else.
    """
    key, odd = prompt_column(config), facts.odd
    odd |= bad_prompts(table, key, known_roles(template), prompt_option(config), bool(config.get("messages_key", None)))
    odd |= {i: why for i, why in bad_ground_truths(table).items() if i not in odd}
    if config.get("prompt_id_key", None) in table.column_names:
        odd |= {i: why for i, why in bad_ids(table, config["prompt_id_key"]).items() if i not in odd}
    for position, row in _first_rows(table, config, limit):
        if position not in odd and (why := _closely(table, position, row, config, facts, marks)):
            odd[position] = why


def _closely(
    table: RowTable, position: int, row: dict[str, Any], config: Mapping[str, Any], facts: RowFacts, marks: re.Pattern
) -> str | None:
    """What is wrong with a row that has passed the rules of columns; notes what is doubtful."""
    prompt, image_key = read_prompt(row[prompt_column(config)], config), config["image_key"]
    if image_key in row and (why := _bad_image(row[image_key])):
        return why
    text = prompt_text(prompt)
    if not isinstance(prompt, str):
        roles = tuple(message["role"] for message in prompt)
        facts.kinds.setdefault(roles, position)
        if "user" not in roles:
            facts.without_user.append(table.where(position))
    facts.marks.update(dict.fromkeys(marks.findall(text)).keys())
    before = facts.seen.setdefault((text, _image_key(row.get(image_key))), position)
    if before != position:
        facts.num_duplicates += 1
        facts.first_duplicate = facts.first_duplicate or (table.where(position), table.where(before))
    return None


def look_at_goals(table: RowTable, config: Mapping[str, Any], facts: RowFacts, needs_goal: bool, is_ours: bool) -> None:
    """Look at what the reward of every row is made from.

    Args:
        config: the ``data`` section.
        needs_goal: whether a function is called with the ground truth.
        is_ours: whether the built-in rules score, which want one that is not null.
    """
    start, key, found = 0, config["reward_fn_key"], {}
    for part in table.tables:
        sources, (goals, is_model) = _texts(part, key), _goals(part)
        facts.sources.update(map(str, sources))
        facts.agents.update(name for name in _texts(part, "agent_name") if name is not None)
        for row, source in enumerate(sources):
            if goals[row] == 2 and source != "":
                found.setdefault(str(source), []).append(start + row)
        if needs_goal and "reward_model" in part.column_names:
            lacking = (goals == 0) | ((goals == 1) & ~is_model if is_ours else False)
            _add(facts.odd, start + np.flatnonzero(lacking), "reward_model has no ground_truth")
        if needs_goal and is_ours and key in part.column_names:
            empty = np.array([start + row for row, source in enumerate(sources) if source in (None, "")], np.int64)
            _add(facts.odd, empty, f"{key!r} is empty, so no scorer is chosen (data.reward_fn_key)")
        start += part.num_rows
    facts.rows_of = {source: np.array(rows, np.int64) for source, rows in found.items()}


def _add(odd: dict[int, str], positions: np.ndarray, why: str) -> None:
    for position in positions.tolist():
        odd[position] = f"{odd[position]}; {why}" if position in odd else why


def settle(table: RowTable, config: Mapping[str, Any], facts: RowFacts) -> None:
    """Note the bad rows, and the size of the others' prompts."""
    for position, why in sorted(facts.odd.items()):
        facts.refuse(table.where(position), why)
    is_good = np.ones(len(table), bool)
    is_good[list(facts.odd)] = False
    sizes = [_sizes(part, prompt_column(config)) for part in table.tables]
    facts.good = np.flatnonzero(is_good)
    facts.sizes = np.concatenate([np.zeros(0, np.int64), *sizes])[facts.good]


def _texts(part: pa.Table, key: str) -> list[Any]:
    """Values of a column; Nones where the file has none."""
    return part[key].to_pylist() if key in part.column_names else [None] * part.num_rows


def _goals(part: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Of each row: 2 it has a ground truth, 1 that is null, 0 it has no such field; and whether a model is to judge."""
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
    """Position and columns of the first rows of each file, few at a time."""
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
    """Bytes of text of each prompt, exactly where they are texts or messages of text, else at most."""
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
    """All that a prompt says, in one text."""
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content") for message in prompt]
    return "\n".join(text if isinstance(text, str) else str(text) for text in contents)


def _bad_image(images: Any) -> str | None:
    """Why the first image of a row that cannot be opened cannot."""
    for number, image in enumerate(_listed(images)):
        try:
            open_image(image)
        except ValueError as error:
            return f"image {number}: {error}"
    return None


def _image_key(images: Any) -> tuple:
    """Equal for equal images."""
    held = (image if isinstance(image, Mapping) else {"path": image} for image in _listed(images))
    return tuple(image.get("bytes") or str(image.get("path")) for image in held)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
