"""Rendering and token counts of prompts without transformers, if the model folder has ``tokenizer.json``.

``import transformers`` would take a second of every check. Rows with images or videos need the model's processor and
with it transformers. Agrees with ``hf_tokenizer`` and ``apply_chat_template`` (tests/preflight/test_prompts.py).
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from verl.config.model_info import TOKENIZERS, find_folder
from verl.data.table import DataError, RowTable
from verl.data.vision import open_image, with_image_parts
from verl.preflight.rows import evenly_spaced, prompt_column, read_prompt

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
