"""Row checks of data files: unusable rows with reasons, data sources, prompt sizes, duplicates.

Every row is checked with Arrow, by the same functions as in the dataset; the first rows of each file also as Python
objects. No tokenizer or rewards here.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.config.model_info import TOKENIZERS, find_folder
from verl.data.files import in_domains, open_table
from verl.data.table import (
    DataError,
    RowTable,
    bad_ground_truths,
    bad_ids,
    bad_prompts,
    is_json,
    known_roles,
    parse_messages,
)
from verl.data.vision import open_image, with_image_parts

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


# -- Rendering and token counts of prompts without transformers, if the model folder has ``tokenizer.json`` ----------


if TYPE_CHECKING:
    from verl.data.vision import ImagePrompts


_CHAT_MARKS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<｜User｜>", "<|user|>")


"""Beginnings of turns in the templates of common models."""


_CONFIG, _TOKENIZER, _TEMPLATE = "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"


class PromptReader(NamedTuple):
    """Tokenizer and chat template of a model."""

    encode: Callable[[list[str]], list[list[int]]]
    """Rendered texts -> token ids."""
    template: str | None
    """The chat template; None: prompts must be plain text."""
    variables: Mapping[str, Any]
    """Further variables of the template: special tokens and ``data.apply_chat_template_kwargs``."""
    special_tokens: tuple[str, ...]
    """Texts of the special tokens."""

    def text(self, prompt: str | Sequence[Mapping[str, Any]]) -> str:
        """Render a prompt: the template is applied to messages; a plain string is one user message.

        Raises:
            DataError: there is no template for messages, or it refuses them.
        """
        if isinstance(prompt, str):
            if self.template is None:
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        if self.template is None:
            raise DataError(
                "the prompt is a chat and the tokenizer has no chat template: use an instruct model, give "
                "actor_rollout_ref.model.custom_chat_template, or write plain text into the column"
            )
        import jinja2

        messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
        try:
            return compiled(self.template).render(messages=messages, add_generation_prompt=True, **self.variables)
        except (jinja2.TemplateError, TypeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise DataError(f"the chat template refuses messages with the roles {roles}: {error}") from error


def template_marks(reader: PromptReader | None) -> re.Pattern[str]:
    """Return a pattern of what chat templates write: special tokens, and markers of common templates."""
    special = reader.special_tokens if reader else ()
    names = {*_CHAT_MARKS, *(name for name in special if len(name) > 2 and not name.isalnum())}
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def read_folder(
    name_or_path: str,
    custom_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> PromptReader:
    """Load tokenizer and template of a model folder, or of a hub id that was downloaded or can be reached.

    Raises:
        ValueError: there is no tokenizer.
    """
    folder = find_folder(name_or_path)
    path = os.path.expanduser(name_or_path) if folder is None else str(folder)
    file = _find(path, _TOKENIZER)
    kwargs = dict(template_kwargs or {})
    if file is None and os.path.isdir(path) and not any(os.path.isfile(os.path.join(path, one)) for one in TOKENIZERS):
        raise ValueError(f"{path} holds no tokenizer")
    if file is None:
        return _through_transformers(path, custom_template, kwargs, trust_remote_code)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _json(_find(path, _CONFIG))
    settings |= {key: value for key, value in _json(_find(path, "special_tokens_map.json")).items() if value}
    named = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
    template = _custom(custom_template) or _template(path, settings)
    added = tokenizer.get_added_tokens_decoder().values()

    def encode(texts: list[str]) -> list[list[int]]:
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=template is None)
        return [encoding.ids for encoding in found]

    special = [token.content for token in added if token.special]
    special += [text for text in named.values() if isinstance(text, str)]
    variables = {key: text for key, text in named.items() if isinstance(text, str)}
    return PromptReader(encode, template, variables | kwargs, tuple(dict.fromkeys(special)))


def is_light_folder(name_or_path: str) -> bool:
    """Whether :func:`read_folder` needs neither transformers nor the hub."""
    folder = find_folder(name_or_path)
    return folder is not None and (folder / _TOKENIZER).is_file()


def has_processor(name_or_path: str) -> bool:
    """Whether a model folder or hub id has a processor of images."""
    path = os.path.expanduser(name_or_path)
    return any(_find(path, name) for name in ("processor_config.json", "preprocessor_config.json"))


def _through_transformers(
    path: str, custom_template: str | None, kwargs: dict[str, Any], trust_remote_code: bool
) -> PromptReader:
    """Load any kind of tokenizer, for folders without ``tokenizer.json``; slower."""
    from verl.utils.tokenizer import hf_tokenizer

    tokenizer = hf_tokenizer(path, chat_template=custom_template, trust_remote_code=trust_remote_code)
    template = tokenizer.chat_template

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=not template, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]

    variables = {key: text for key, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return PromptReader(encode, template, variables | kwargs, tuple(tokenizer.all_special_tokens))


def _find(path: str, name: str) -> str | None:
    """Return the path of a file of a model folder or hub id, or None if there is none."""
    if os.path.isdir(path):
        file = os.path.join(path, name)
        return file if os.path.isfile(file) else None
    if path.startswith(("/", ".")):
        raise ValueError(f"the model folder {path} does not exist (looked from {os.getcwd()})")
    from huggingface_hub import hf_hub_download

    try:
        return hf_hub_download(path, name)
    except (OSError, ValueError):  # raised for a missing file, and without network
        return None


def _json(file: str | None) -> dict[str, Any]:
    return json.loads(Path(file).read_text(encoding="utf-8")) if file else {}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token


def _custom(template: str | None) -> str | None:
    """``actor_rollout_ref.model.custom_chat_template``: Jinja, or without braces the file that holds it."""
    if template and "{" not in template:
        file = Path(template).expanduser()
        if not file.is_file():
            raise ValueError(f"actor_rollout_ref.model.custom_chat_template={template!r} is neither Jinja nor a file")
        return file.read_text(encoding="utf-8")
    return template or None


def _template(path: str, settings: Mapping[str, Any]) -> str | None:
    if file := _find(path, _TEMPLATE):
        return Path(file).read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found


@functools.lru_cache(maxsize=8)
def compiled(template: str) -> Any:
    """Compile a chat template as transformers does: sandboxed, with its filters, globals and ``{% generation %}``."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block around assistant messages, which is rendered without its marks."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


# -- the prompts of a table --------------------------------------------------------------------------------------------
class Prompts:
    """Prompts of a table by position.

    Args:
        config: the ``data`` section.
        reader: tokenizer and template.
        processor: of the model; None: images and videos are not counted.
    """

    def __init__(
        self, table: RowTable, config: Mapping[str, Any], reader: PromptReader, processor: ImagePrompts | None = None
    ):
        self.table, self.reader, self.processor = table, reader, processor
        self.config = config
        keys = {"image": config["image_key"], "video": config["video_key"]}
        kinds = ["image", *(["video"] if processor is not None and processor.takes_videos else [])]
        self.keys = {kind: keys[kind] for kind in kinds if keys[kind] in table.column_names} if processor else {}

    def texts(self, positions: Sequence[int]) -> list[str | DataError]:
        """Render prompts; one that the template refuses is returned as an error."""
        prompts = self.table.select(positions).column(prompt_column(self.config))
        return [self._text(read_prompt(prompt, self.config)) for prompt in prompts]

    def lengths(self, positions: Sequence[int], texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of rendered prompts.

        Raises:
            DataError: an image or video cannot be counted; names the row.
        """
        if not self.keys:
            return [len(ids) for ids in self.reader.encode(list(texts))]
        rows = self.table.select(positions)
        media = {kind: rows.column(key) for kind, key in self.keys.items()}
        lengths = []
        for number, (position, text) in enumerate(zip(positions, texts, strict=True)):
            try:
                lengths.append(self._length(text, {kind: column[number] or [] for kind, column in media.items()}))
            except ValueError as error:
                raise DataError(f"{self.table.where(position)}: {error}") from error
        return lengths

    def _length(self, text: str, media: Mapping[str, Sequence[Any]]) -> int:
        from verl.data.vision import process_video

        images = [open_image(image) for image in media.get("image", ())]
        return self.processor.num_tokens(text, images, [process_video(video) for video in media.get("video", ())])

    def _text(self, prompt: Any) -> str | DataError:
        if self.keys and isinstance(prompt, str) and self.reader.template is not None:
            prompt = [{"role": "user", "content": prompt}]
        if self.keys and not isinstance(prompt, str):
            prompt = with_image_parts(prompt, list(self.keys))
        try:
            return self.reader.text(prompt)
        except DataError as error:
            return error


def processor_of(folder: str, trust_remote_code: bool = False) -> ImagePrompts | None:
    """Return the processor of a vision-language model, or None for a text model."""
    if not has_processor(folder):
        return None
    from verl.data.vision import ImagePrompts
    from verl.utils.tokenizer import hf_processor

    processor = hf_processor(folder, trust_remote_code=trust_remote_code)
    return ImagePrompts(processor) if hasattr(processor, "image_processor") else None


# -- how long they are -------------------------------------------------------------------------------------------------
_BLOCK = 1000


"""Prompts read and encoded at a time."""


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


def measure(
    prompts: Prompts,
    limit: int,
    positions: np.ndarray,
    sizes: np.ndarray,
    num_counted: int | None,
    also: Sequence[int] = (),
) -> tuple[Lengths | None, dict[int, int], list[tuple[int, str]]]:
    """Return lengths of the prompts at ``positions``, tokens by position, and (position, reason) of refused prompts.

    Args:
        limit: ``data.max_prompt_length``.
        sizes: bytes of each prompt's text, in the order of ``positions``.
        num_counted: prompts to count, evenly spaced, and most further ones that may be too long; None: all.
        also: positions to count in any case.
    """
    count = len(positions)
    is_chosen = np.zeros(count, bool)
    is_chosen[list(evenly_spaced(count, num_counted))] = True
    is_chosen[np.flatnonzero(np.isin(positions, list(also)))] = True
    known, overhead, refused = _count(prompts, positions[is_chosen], sizes[is_chosen])
    lengths = np.array(list(known.values()), np.int64)
    may_be_overlong = ~is_chosen
    if not prompts.keys:
        # A token is at least one byte of text, so only prompts of more bytes than tokens allowed can be too long.
        may_be_overlong &= sizes + overhead > limit
    candidates = np.flatnonzero(may_be_overlong)
    candidates = candidates[np.argsort(-sizes[candidates], kind="stable")]
    counted = candidates if num_counted is None else candidates[:num_counted]
    more, _, refused_more = _count(prompts, positions[counted], sizes[counted])
    known |= more
    refused += refused_more
    if not len(lengths):
        return None, known, refused
    overlong = sum(length > limit for length in known.values())
    is_exact = len(counted) == len(candidates)
    return _summary("tokens", lengths, max(known.values()), overlong, is_exact), known, refused


def none_fits(
    prompts: Prompts, limit: int, positions: np.ndarray, sizes: np.ndarray, known: Mapping[int, int], num_counted: int
) -> bool:
    """Whether all of some prompts are too long, judged by the ``num_counted`` smallest."""
    if any(known.get(position, limit + 1) <= limit for position in positions.tolist()):
        return False
    smallest = [i for i in np.argsort(sizes, kind="stable").tolist() if int(positions[i]) not in known][:num_counted]
    more, _, _ = _count(prompts, positions[smallest], sizes[smallest])
    return all(length > limit for length in more.values()) and bool(len(positions))


def in_bytes(sizes: np.ndarray) -> Lengths:
    """Return lengths in bytes, for want of a tokenizer."""
    return _summary("bytes", sizes, int(sizes.max()), 0, True)


def _count(
    prompts: Prompts, positions: np.ndarray, sizes: np.ndarray
) -> tuple[dict[int, int], int, list[tuple[int, str]]]:
    """Return token counts of the prompts that can be rendered, the most bytes a template adds, and refused prompts."""
    lengths: dict[int, int] = {}
    overhead, refused = 0, []
    for begin in range(0, len(positions), _BLOCK):
        part = positions[begin : begin + _BLOCK].tolist()
        texts = prompts.texts(part)
        refused += [
            (position, str(text)) for position, text in zip(part, texts, strict=True) if isinstance(text, DataError)
        ]
        good = [i for i, text in enumerate(texts) if isinstance(text, str)]
        overhead = max([overhead, *(len(texts[i].encode()) - int(sizes[begin + i]) for i in good)])
        counted = prompts.lengths([part[i] for i in good], [texts[i] for i in good])
        lengths |= {part[i]: length for i, length in zip(good, counted, strict=True)}
    return lengths, overhead, refused


def _summary(unit: str, lengths: np.ndarray, longest: int, overlong: int, is_exact: bool) -> Lengths:
    edges = _edges(int(lengths.min()), int(lengths.max()))
    counts, _ = np.histogram(lengths, edges)
    return Lengths(
        unit,
        len(lengths),
        int(lengths.min()),
        float(np.median(lengths)),
        float(lengths.mean()),
        float(np.percentile(lengths, 95)),
        longest,
        [(int(a), int(b), int(n)) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)],
        overlong,
        is_exact,
    )


def _edges(low: int, high: int, bins: int = 12) -> np.ndarray:
    """Return about ``bins`` round bin edges for lengths from ``low`` to ``high``."""
    width = max(1, -(-(high - low + 1) // bins))
    scale = 10 ** (len(str(width)) - 1)
    width = next(step * scale for step in (1, 2, 5, 10) if step * scale >= width)
    return np.arange(low // width * width, high + width + 1, width)
