"""Rows of data files as a run would use them: unusable rows with reasons, statistics, prompts rendered and counted.

Every row is checked with Arrow, by the functions of the dataset; the first rows of each file also as Python objects.
Prompts are rendered and tokenized by the dataset's functions, without torch where the model folder has
``tokenizer.json``. No rewards here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.config.data import DataConfig
from verl.config.model_info import TOKENIZERS, find_folder
from verl.data.files import in_domains, open_table
from verl.data.table import (
    DataError,
    RowTable,
    bad_ground_truths,
    bad_ids,
    bad_prompts,
    bools,
    is_list,
    is_text,
    known_roles,
    parse_messages,
    text_lengths,
    whole_numbers,
)
from verl.data.tokenization import ToolSchemas, as_messages, encode_many, render, template_error
from verl.data.vision import ImagePrompts, MediaColumns, open_image
from verl.utils.tokenizer import hf_processor, hf_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SLICE = 10_000
"""Rows turned into Python objects at a time."""
_BYTES = 64 << 20
"""Bytes of columns turned into Python objects at a time: rows with images are large."""
_NAMED = 1000
"""Most bad rows listed with their reasons; further ones are only counted."""
_BLOCK = 1000
"""Prompts rendered and tokenized at a time."""
_CHAT_MARKS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<｜User｜>", "<|user|>")
"""Beginnings of turns in the templates of common models."""


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
    users: Counter = field(default_factory=Counter)
    """``extra_info.interaction_kwargs.name`` -> rows."""
    bad_positions: dict[int, str] = field(default_factory=dict)
    """Position -> why the row cannot be used; `finish_checks` adds these to ``bad``."""

    def refuse(self, where: str, why: str) -> None:
        """Add a row that cannot be used; ``where`` is in the format of ``RowTable.where``."""
        path, row = where.rsplit(", row ", 1)
        self.num_bad += 1
        self.bad_of[path] += 1
        if len(self.bad) < _NAMED:
            self.bad.append(RowProblem(path, int(row), why))


def open_files(paths: Sequence[str], data: DataConfig, stats: RowStatistics) -> RowTable:
    """Open all readable files as one table; unreadable files and bad lines are added to ``stats``."""
    tables = []
    for path in paths:
        try:
            opened = open_table(path, cache_dir=data.cache_dir, use_shm=data.use_shm, bad_rows="skip")
            if data.domains:
                opened = in_domains(opened, data.domains, data.reward_fn_key)
        except (OSError, ImportError, DataError) as error:
            stats.unreadable[path] = str(error)
            continue
        stats.keys[path] = list(opened.names)
        known = {file.path for file in stats.files}  # two globs may share files
        skipped = [(row.where.rsplit(", row ", 1)[0], row) for row in opened.skipped]
        for number, (part, name) in enumerate(zip(opened.tables, opened.names, strict=True)):
            if name in known:
                continue
            own = [row for file, row in skipped if file == name]
            columns = {column.name: str(column.type) for column in part.schema}
            stats.files.append(FileInfo(name, part.num_rows + len(own), columns))
            for row in own:
                stats.refuse(row.where, row.why)
            if part.num_rows:  # an empty file has no column types to check
                tables.append(RowTable([part], [name], [opened.row_numbers[number]], own))
    return RowTable.joined(tables)


def prompt_column(data: DataConfig) -> str:
    """Return the column of prompts."""
    return data.messages_key or data.prompt_key


def prompt_option(data: DataConfig) -> str:
    """Return the option that names the column of prompts."""
    return "data.messages_key" if data.messages_key else "data.prompt_key"


def read_prompt(prompt: Any, data: DataConfig) -> Any:
    """Return a value of :func:`prompt_column` as a prompt; the JSON of ``data.messages_key`` is parsed.

    Raises:
        ValueError: it is not JSON.
    """
    return parse_messages(prompt) if data.messages_key else prompt


def check_prompts(
    table: RowTable, data: DataConfig, stats: RowStatistics, tokenizer: PreTrainedTokenizerBase | None, limit: int
) -> None:
    """Check the prompt of every row.

    Args:
        tokenizer: its chat template's own roles are allowed in addition to the usual ones; None: not known.
        limit: rows of each file that are checked closely.

    Raises:
        DataError: the prompt column of a file has another type.
    """
    key, bad = prompt_column(data), stats.bad_positions
    # a template may compare roles of its own, such as ipython
    roles = known_roles(tokenizer and tokenizer.chat_template)
    found = [bad_prompts(table, key, roles, prompt_option(data), data.messages_key is not None)]
    found.append(bad_ground_truths(table))
    if data.prompt_id_key in table.column_names:
        found.append(bad_ids(table, data.prompt_id_key))
    for reasons in reversed(found):  # of a row's reasons the first is named
        bad |= reasons
    marks, first, start = template_marks(tokenizer), dict[Any, int](), 0
    for part in table.tables:
        names = [name for name in (key, data.image_key) if name in part.column_names]
        end = start + min(limit, part.num_rows)
        size = min(_SLICE, max(1, part.num_rows * _BYTES // max(part.select(names).nbytes, 1)))
        for begin in range(start, end, size):
            block = range(begin, min(begin + size, end))
            for position, row in zip(block, table.rows(block, names), strict=True):
                if position not in bad and (why := _check_closely(table, position, row, data, stats, marks, first)):
                    bad[position] = why
        start += part.num_rows


def _check_closely(
    table: RowTable,
    position: int,
    row: Mapping[str, Any],
    data: DataConfig,
    stats: RowStatistics,
    marks: re.Pattern[str],
    first: dict[Any, int],
) -> str | None:
    """Return what is wrong with a row that passed the column checks; updates the statistics.

    Args:
        first: prompt and images -> position of their first row.
    """
    # equal questions about different images are no duplicates
    prompt, images = read_prompt(row[prompt_column(data)], data), row.get(data.image_key)
    images = [] if images is None else images if isinstance(images, list) else [images]
    for number, image in enumerate(images):
        try:
            open_image(image)
        except ValueError as error:
            return f"image {number}: {error}"
    if not isinstance(prompt, str):
        roles = tuple(message["role"] for message in prompt)
        stats.kinds.setdefault(roles, position)
        if "user" not in roles:
            stats.without_user.append(table.where(position))
    text = prompt_text(prompt)
    stats.marks.update(dict.fromkeys(marks.findall(text)).keys())  # the first in a text comes first
    images = [image if isinstance(image, Mapping) else {"path": image} for image in images]
    key = text, *(image.get("bytes") or str(image.get("path")) for image in images)
    if (earlier := first.setdefault(key, position)) != position:
        stats.num_duplicates += 1
        stats.first_duplicate = stats.first_duplicate or (table.where(position), table.where(earlier))
    return None


def check_ground_truths(
    table: RowTable, data: DataConfig, stats: RowStatistics, needs_truth: bool, is_built_in: bool
) -> None:
    """Check the data source and ground truth of every row.

    Args:
        needs_truth: whether a function is called with the ground truth.
        is_built_in: whether the built-in rules score, which need a ground truth that is not null.
    """
    start, key, bad = 0, data.reward_fn_key, stats.bad_positions
    rows_of: dict[str, list[int]] = {}
    for part in table.tables:
        nothing = [None] * part.num_rows
        sources = part[key].to_pylist() if key in part.column_names else nothing
        agents = part["agent_name"].to_pylist() if "agent_name" in part.column_names else nothing
        stats.sources.update(map(str, sources))
        stats.agents.update(name for name in agents if name is not None)
        stats.users.update(_user_names(part))
        has_field, has_truth, is_model = _ground_truth_states(part)
        lacking = ~has_field | (~has_truth & ~is_model & is_built_in)
        for row, source in enumerate(sources):
            position, reasons = start + row, []
            if has_truth[row] and source != "":
                rows_of.setdefault(str(source), []).append(position)
            if needs_truth and "reward_model" in part.column_names and lacking[row]:
                reasons.append("reward_model has no ground_truth")
            if needs_truth and is_built_in and key in part.column_names and source in (None, ""):
                reasons.append(f"{key!r} is empty, so no scorer is chosen (data.reward_fn_key)")
            if reasons:
                bad[position] = "; ".join([*([bad[position]] if position in bad else []), *reasons])
        start += part.num_rows
    stats.rows_of = {source: np.array(rows, np.int64) for source, rows in rows_of.items()}


def _user_names(part: pa.Table) -> list[str]:
    """Return the interactions that rows name, in ``extra_info.interaction_kwargs.name``."""
    column = part["extra_info"].combine_chunks() if "extra_info" in part.column_names else None
    for name in ("interaction_kwargs", "name"):
        if column is None or not pa.types.is_struct(column.type) or column.type.get_field_index(name) < 0:
            return []
        column = pc.struct_field(column, name)
    return [str(name) for name in column.to_pylist() if name is not None]


def _ground_truth_states(part: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return masks of rows with a field ``ground_truth``, with one that is not null, and of the style ``model``."""
    if "reward_model" not in part.column_names:
        nowhere = np.zeros(part.num_rows, bool)
        return nowhere, nowhere, nowhere
    column = part["reward_model"].combine_chunks()
    names = [one.name for one in column.type] if pa.types.is_struct(column.type) else []
    if names:  # a column of its own for each field: no row becomes a Python object
        has_field = bools(column.is_valid()) & ("ground_truth" in names)
        truths = pc.struct_field(column, "ground_truth").is_valid() if "ground_truth" in names else None
        has_truth = has_field if truths is None else has_field & bools(truths)
        styles = pc.struct_field(column, "style").to_pylist() if "style" in names else [None] * len(column)
        return has_field, has_truth, np.array([style == "model" for style in styles], bool)
    values = RowTable([part.select(["reward_model"])], [""]).column("reward_model")
    values = [value if isinstance(value, Mapping) else {} for value in values]
    has_field = np.array(["ground_truth" in value for value in values], bool)
    has_truth = np.array([value.get("ground_truth") is not None for value in values], bool)
    return has_field, has_truth, np.array([value.get("style") == "model" for value in values], bool)


def finish_checks(table: RowTable, data: DataConfig, stats: RowStatistics) -> None:
    """Record the bad rows, and the prompt sizes of the good ones."""
    for position, why in sorted(stats.bad_positions.items()):
        stats.refuse(table.where(position), why)
    sizes = [_sizes(part[prompt_column(data)].combine_chunks()) for part in table.tables]
    # positions of rows, not of files: those of all tables count on
    stats.good = np.delete(np.arange(len(table)), list(stats.bad_positions))
    stats.sizes = np.concatenate([np.zeros(0, np.int64), *sizes])[stats.good]


def _sizes(column: pa.Array) -> np.ndarray:
    """Return the bytes of text of each prompt: exact for texts and messages of text, else an upper bound."""
    if is_text(column.type):
        return text_lengths(column)
    message = column.type.value_type if is_list(column.type) else None
    if message is not None and pa.types.is_struct(message) and message.get_field_index("content") >= 0:
        contents = pc.struct_field(pc.list_flatten(column), "content")
        if is_text(contents.type):
            # contents are joined by line breaks: one byte more for each but the first
            parents = whole_numbers(pc.list_parent_indices(column))
            lengths = np.bincount(parents, text_lengths(contents) + 1, len(column))
            return np.maximum(lengths.astype(np.int64) - 1, 0)
    return np.array([len(prompt_text(prompt or "").encode()) for prompt in column.to_pylist()], np.int64)


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the contents of a prompt as one text."""
    return prompt if isinstance(prompt, str) else "\n".join(str(message.get("content")) for message in prompt)


def evenly_spaced(count: int, limit: int | None) -> Sequence[int]:
    """Return at most ``limit`` of ``count`` positions, evenly spaced, including the first."""
    return range(count) if limit is None or count <= limit else [i * count // limit for i in range(limit)]


# -- Prompts: rendered and counted by the dataset's functions ----------------------------------------------------------


def load_tokenizer(
    name_or_path: str, chat_template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub id.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    folder = find_folder(name_or_path)
    # hf_tokenizer would import torch and ask the hub before it says so
    if folder is None and name_or_path.startswith(("/", ".", "~")):
        raise ValueError(f"the model folder {name_or_path} does not exist")
    if folder is not None and not any((folder / name).is_file() for name in TOKENIZERS):
        raise ValueError(f"{folder} holds no tokenizer")
    if folder is None or not (folder / "tokenizer.json").is_file():
        return hf_tokenizer(name_or_path, chat_template=chat_template, trust_remote_code=trust_remote_code)
    reading: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        return hf_tokenizer(str(folder), correct_pad_token=False, chat_template=chat_template, **reading)
    except TypeError as error:  # a special token of the wrong type in tokenizer_config.json
        raise ValueError(f"{folder} holds a tokenizer that cannot be read ({error})") from error


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the texts of the special tokens."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(dict.fromkeys([*added, *tokenizer.all_special_tokens]))


def template_marks(tokenizer: PreTrainedTokenizerBase | None) -> re.Pattern[str]:
    """Return a pattern of what chat templates write: special tokens, and markers of common templates."""
    special = special_tokens(tokenizer) if tokenizer else ()
    names = {*_CHAT_MARKS, *(name for name in special if len(name) > 2 and not name.isalnum())}
    # the longest first: a pattern takes the first alternative that fits
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def processor_of(folder: str, trust_remote_code: bool = False) -> ImagePrompts | None:
    """Return the processor of a vision-language model, or None for a text model."""
    processor = hf_processor(folder, trust_remote_code=trust_remote_code)
    return ImagePrompts(processor) if hasattr(processor, "image_processor") else None


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts, in tokens, or in bytes where there is no tokenizer."""

    unit: str
    counted: int
    """Number of prompts in the statistics."""
    shortest: int
    median: float
    mean: float
    p95: float
    longest: int
    """Longest of all counted prompts, including those counted because they may be too long."""
    histogram: list[tuple[int, int, int]]
    """(from, to, prompts): a length lies in ``[from, to)``."""
    overlong: int
    """Prompts over ``data.max_prompt_length``."""
    is_overlong_exact: bool
    """Whether all prompts that may be too long were counted."""

    @classmethod
    def of(
        cls, unit: str, lengths: np.ndarray, longest: int, overlong: int = 0, is_overlong_exact: bool = True
    ) -> Lengths:
        """Return the statistics of ``lengths``, with about twelve round bins."""
        low, high = int(lengths.min()), int(lengths.max())
        width = max(1, -(-(high - low + 1) // 12))
        scale = 10 ** (len(str(width)) - 1)
        width = next(step * scale for step in (1, 2, 5, 10) if step * scale >= width)
        # np.histogram's last bin includes its end, so the last edge lies beyond the longest
        counts, edges = np.histogram(lengths, np.arange(low // width * width, high + width + 1, width))
        bins = list(zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True))
        median, mean, p95 = (float(value) for value in (np.median(lengths), lengths.mean(), np.percentile(lengths, 95)))
        return cls(unit, len(lengths), low, median, mean, p95, longest, bins, overlong, is_overlong_exact)


class Prompts:
    """Prompts of a table by position, rendered and counted.

    Args:
        processor: of the model; None: images and videos are not counted.
        tool_schemas: of the tools that prompts show; None: they show none.

    Attributes:
        tokens: position -> tokens, of the prompts counted so far.
        refused: position -> why the chat template cannot render the prompt.
        overhead: the most bytes that the template added to a prompt.
    """

    def __init__(
        self,
        table: RowTable,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        processor: ImagePrompts | None = None,
        tool_schemas: ToolSchemas | None = None,
    ):
        self.table, self.data, self.tokenizer, self.tool_schemas = table, data, tokenizer, tool_schemas
        self.media = MediaColumns(processor, {"image": data.image_key, "video": data.video_key})
        self.kinds = [kind for kind, _ in self.media.kinds(table.column_names)]
        self.tokens: dict[int, int] = {}
        self.refused: dict[int, str] = {}
        self.overhead = 0

    def texts(self, positions: Sequence[int]) -> dict[int, str]:
        """Return the rendered prompts by position; those that the template refuses go to ``refused``."""
        texts = {}
        part = self.table.select(positions)
        prompts = part.column(prompt_column(self.data))
        rows: Iterable[Any] = [{}] * len(positions) if self.tool_schemas is None else part
        for position, prompt, row in zip(positions, prompts, rows, strict=True):
            messages = as_messages(read_prompt(prompt, self.data), self.tokenizer, self.kinds) or []
            arguments = dict(self.data.apply_chat_template_kwargs or {})
            try:
                if self.tool_schemas is not None and (tools := self.tool_schemas(row)):
                    arguments["tools"] = tools
                texts[position] = render(messages, self.tokenizer, prompt_column(self.data), arguments)
            except (jinja2.TemplateError, TypeError) as error:  # TypeError: a null content is added to a text
                self.refused[position] = template_error(messages, self.tokenizer, error)
            except ValueError as error:  # DataError, or a tool that there is not
                self.refused[position] = str(error).rstrip(".")
        return texts

    def count(self, positions: np.ndarray, sizes: np.ndarray) -> None:
        """Count the tokens of the prompts at ``positions``, images included.

        Args:
            sizes: bytes of each prompt's text.

        Raises:
            DataError: an image or video cannot be counted; names the row.
        """
        for begin in range(0, len(positions), _BLOCK):
            part = positions[begin : begin + _BLOCK].tolist()
            # a refused prompt has no text
            texts, size_of = self.texts(part), dict(zip(part, sizes[begin : begin + _BLOCK].tolist(), strict=True))
            added = (len(text.encode()) - size_of[position] for position, text in texts.items())
            self.overhead = max([self.overhead, *added])
            if not self.kinds:
                counts = map(len, encode_many(list(texts.values()), self.tokenizer))
                self.tokens |= dict(zip(texts, counts, strict=True))
                continue
            # of images the size is enough, in most processors
            for position, row in zip(texts, self.table.select(list(texts)), strict=True):
                where = partial(self.table.where, position)
                media = self.media.read(row, where, pixels=False)
                try:
                    self.tokens[position] = self.media.num_tokens(texts[position], media)
                except ValueError as error:
                    raise DataError(f"{where()}: {error}") from error

    def measure(
        self, positions: np.ndarray, sizes: np.ndarray, num_counted: int | None, also: Sequence[int] = ()
    ) -> Lengths | None:
        """Return lengths of the prompts at ``positions``; None if the template refuses all.

        Args:
            sizes: bytes of each prompt's text, in the order of ``positions``.
            num_counted: prompts to count, evenly spaced, and most further ones that may be too long; None: all.
            also: positions to count in any case.
        """
        limit, is_chosen = self.data.max_prompt_length, np.isin(positions, list(also))
        is_chosen[list(evenly_spaced(len(positions), num_counted))] = True
        self.count(positions[is_chosen], sizes[is_chosen])
        lengths = np.array([self.tokens[i] for i in positions[is_chosen].tolist() if i in self.tokens], np.int64)
        may_be_overlong = ~is_chosen
        if not self.kinds:
            # A token is at least one byte of text, so only prompts of more bytes than tokens allowed can be too long.
            may_be_overlong &= sizes + self.overhead > limit
        candidates = np.flatnonzero(may_be_overlong)
        candidates = candidates[np.argsort(-sizes[candidates], kind="stable")]
        # the largest first: they decide whether a run stops
        counted = candidates[:num_counted]
        self.count(positions[counted], sizes[counted])
        if not len(lengths):
            return None
        overlong = sum(length > limit for length in self.tokens.values())
        return Lengths.of("tokens", lengths, max(self.tokens.values()), overlong, len(counted) == len(candidates))

    def none_fits(self, positions: np.ndarray, sizes: np.ndarray, num_counted: int) -> bool:
        """Whether all of some prompts are too long, judged by those counted and the ``num_counted`` smallest others."""
        limit = self.data.max_prompt_length
        if any(self.tokens.get(position, limit + 1) <= limit for position in positions.tolist()):
            return False
        order = np.argsort(sizes, kind="stable")
        # if the smallest do not fit, hardly any other will
        smallest = [i for i in order.tolist() if int(positions[i]) not in self.tokens][:num_counted]
        self.count(positions[smallest], sizes[smallest])
        return len(positions) > 0 and all(
            self.tokens.get(position, limit + 1) > limit for position in positions[smallest].tolist()
        )
