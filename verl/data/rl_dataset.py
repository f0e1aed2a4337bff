"""Datasets of prompts for reinforcement learning: rows of data files to left-padded token ids.

No rewards here. Images and videos are read in ``vision.py``.
"""

import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import torch
from torch.utils.data import Dataset

from verl.data.files import CACHE_DIR, in_domains, localized, read_files, resolve
from verl.data.table import (
    BadRow,
    DataError,
    RowTable,
    bad_ground_truths,
    bad_ids,
    bad_prompts,
    first_bad_rows,
    known_roles,
    leave_out,
    long_ids,
    parse_messages,
)
from verl.data.tokenization import (
    CACHED_FROM,
    AllPrompts,
    TokenIds,
    ToolSchemas,
    as_messages,
    cache_key,
    encode,
    encode_many,
    message_texts,
    render,
    template_error,
    truncate,
    truncate_prompt,
)
from verl.data.vision import EncodedPrompt, ImagePrompts, MediaColumns, mismatched_rows, pixels_of, with_image_parts

__all__ = ["DataError", "RLHFDataset", "collate_fn", "truncate"]


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor | np.ndarray]:
    """Collate rows to one batch: tensors are stacked, everything else becomes a one-dimensional object array.

    A non-tensor missing in some rows is ``None`` there (files of one dataset need not agree on their columns).
    """
    names = dict.fromkeys(name for row in data_list for name in row)
    batch: dict[str, torch.Tensor | np.ndarray] = {}
    for name in names:
        values = [row.get(name) for row in data_list]
        if isinstance(values[0], torch.Tensor):
            batch[name] = torch.stack(values)
        else:
            batch[name] = np.fromiter(values, dtype=object, count=len(values))  # np.array would stack equal lengths
    return batch


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)


def left_padded(ids: list[int], width: int, tokenizer: "PreTrainedTokenizerBase") -> dict[str, torch.Tensor]:
    """Return ``input_ids``, ``attention_mask`` and ``position_ids`` of one prompt, (width,) int64 each."""
    start = width - len(ids)
    pad = tokenizer.pad_token_id
    columns = torch.zeros(3, width, dtype=torch.int64)
    columns[0, :start] = tokenizer.eos_token_id if pad is None else pad
    columns[0, start:] = torch.tensor(ids, dtype=torch.int64)
    columns[1, start:] = 1
    columns[2, start:] = torch.arange(len(ids))
    return dict(zip(("input_ids", "attention_mask", "position_ids"), columns, strict=True))


class RLHFDataset(Dataset):
    """Prompts of data files, one row each, with the columns that a reward function needs.

    ``dataset[i]`` is a dict with, P = ``config.max_prompt_length``:

    - ``input_ids``, ``attention_mask``, ``position_ids``: (P,) int64, LEFT padded; positions are 0 on the padding;
    - ``raw_prompt_ids``: the same ids as a list without padding;
    - ``index`` (``extra_info.index``, else 0), ``tools_kwargs``, ``interaction_kwargs``: from ``extra_info``;
    - ``raw_prompt`` (the messages) with ``return_raw_chat``, ``full_prompts`` (the text) with ``return_full_prompt``;
    - ``raw_input_ids`` with ``return_raw_input_ids``: token ids of the contents of the messages, line by line, without
      template;
    - ``prompt_id`` with ``prompt_id_key``, and with ``max_prompt_id_length`` its token ids, ``prompt_id_ids``;
    - every other column of the row. The prompt, image and video columns are consumed.

    The images of a row's ``image_key`` column take the places of ``<image>`` in its messages, in order. Rows of files
    with that column have in addition:

    - ``input_ids``, ``attention_mask``, ``position_ids`` with one placeholder token per feature of an image;
      positions count tokens (a model's own 2D or 3D positions are computed by the model worker);
      ``raw_prompt_ids`` with one placeholder token per image, as rollout engines expect;
    - ``multi_modal_data``: ``{"image": [PIL images]}``, empty for a row without;
    - ``multi_modal_inputs``, with ``return_multi_modal_inputs``: the processor's tensors (``pixel_values``,
      ``image_grid_thw``, ...), empty for a row without.

    Videos of ``video_key`` take the places of ``<video>``: ``{"video": [Video]}`` of ``multi_modal_data``.

    A prompt is a list of ``{role, content}`` messages, or a plain string: then it is one user message, or, if the
    tokenizer has no chat template, the text itself. In the column of ``messages_key`` it is messages or their JSON.

    Rows that training cannot use are refused when the files are read, or with ``bad_rows=skip`` left out and listed in
    ``skipped_rows``.

    For subclasses: ``_build_messages(row)`` returns the messages of a row and may be overridden; ``dataframe`` holds
    the rows and may be replaced by anything with ``len`` and ``[i] -> dict`` in ``_read_files_and_tokenize``.

    Args:
        data_files: as for :func:`verl.data.files.open_table`.
        tokenizer: a Hugging Face tokenizer.
        config: the ``data`` section, or any mapping with some of its keys.
        processor: of a vision-language model; rows with images need it.
        max_samples: keep at most that many rows, a random sample with ``config.seed`` if ``config.shuffle``, else the
            first; -1: all.

    Raises:
        FileNotFoundError: a data file is missing.
        DataError: a column is missing or a row cannot be used; names file and row.
        NotImplementedError: a row has videos, and the model's processor does not support them.
    """

    tool_schemas: ToolSchemas | None = None
    """Tools that the prompts show, with which they are rendered and measured; set before ``__init__`` runs."""

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        config: Mapping[str, Any],
        processor: "ProcessorMixin | None" = None,
        max_samples: int = -1,
    ):
        self.data_files = [data_files] if isinstance(data_files, (str, os.PathLike)) else list(data_files)
        self.original_data_files = list(self.data_files)
        self.tokenizer = tokenizer
        self.processor = processor
        self.config = config

        self.messages_key = config.get("messages_key", None)
        self.prompt_key = self.messages_key or config.get("prompt_key", "prompt")
        self.prompt_id_key = config.get("prompt_id_key", None)
        self.max_prompt_id_length = config.get("max_prompt_id_length", None)
        self.bad_rows = config.get("bad_rows", "refuse")
        self.max_samples = max_samples
        self.cache_dir = config.get("cache_dir", None) or CACHE_DIR
        self.image_key = config.get("image_key", "images")
        self.video_key = config.get("video_key", "videos")
        self.max_prompt_length = config.get("max_prompt_length", 1024)
        self.truncation = config.get("truncation", "error")
        self.return_raw_chat = config.get("return_raw_chat", False)
        self.return_full_prompt = config.get("return_full_prompt", False)
        self.return_raw_input_ids = config.get("return_raw_input_ids", False)
        self.return_multi_modal_inputs = config.get("return_multi_modal_inputs", True)
        self.image_prompts = ImagePrompts(processor) if hasattr(processor, "image_processor") else None
        self.filter_overlong_prompts = config.get("filter_overlong_prompts", False)
        self.num_workers = max(1, config.get("filter_overlong_prompts_workers", 1) or 1)
        self.need_tools_kwargs = config.get("need_tools_kwargs", False)
        self.chat_template_kwargs = dict(config.get("apply_chat_template_kwargs", None) or {})
        if self.truncation not in ("error", "left", "right", "middle"):
            truncate([0], 0, self.truncation)

        self._token_ids: TokenIds | None = None
        self._download()
        self._read_files_and_tokenize()

    # reading ---------------------------------------------------------------------------------------------------

    def resume_dataset_state(self) -> None:
        """Read the files again, as after a checkpoint was loaded."""
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Copy remote files to this machine: ``data_files`` are local paths, ``file_names`` the original ones.

        Args:
            use_origin_parquet: ignored; accepted for subclasses that pass it.
        """
        use_shm = self.config.get("use_shm", False)
        self.file_names = [found for path in self.original_data_files for found in resolve(str(path))]
        self.data_files = [localized(path, self.cache_dir, use_shm) for path in self.file_names]

    def _read_files_and_tokenize(self) -> None:
        table = read_files(self.file_names, self.data_files, self.cache_dir, self.bad_rows)
        if len(table) + len(table.skipped) == 0:
            raise DataError(f"{', '.join(self.file_names)}: there are no rows. Name files that hold some.")
        if domains := self.config.get("domains", None):
            table = in_domains(table, domains, self.config.get("reward_fn_key", "data_source"))
        if self._reads_prompt_column():
            table.require(self.prompt_key, self._prompt_option())
        table = leave_out(table, self._unusable_rows(table), self.bad_rows)
        if self.max_samples >= 0:
            seed = self.config.get("seed", None)
            # numpy takes no negative seeds
            sample_seed = abs(1 if seed is None else seed) if self.config.get("shuffle", True) else None
            table = table.at_most(self.max_samples, sample_seed)
        self.dataframe = table
        if self.bad_rows == "skip":
            self.dataframe = leave_out(table, self.find_unrenderable(), self.bad_rows)
        if self.skipped_rows:
            logger.warning("%d rows are left out: %s", len(self.skipped_rows), first_bad_rows(self.skipped_rows))
        self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    @property
    def skipped_rows(self) -> list[BadRow]:
        """Rows of the files left out by ``bad_rows=skip``, with reasons."""
        return getattr(self.dataframe, "skipped", [])

    def _unusable_rows(self, table: RowTable) -> dict[int, str]:
        """Return position -> reason of rows that cannot be used, so that training does not stop at one later."""
        bad = bad_ground_truths(table)
        self._media.check_supported(table)
        if self._reads_prompt_column():
            bad |= dict(mismatched_rows(table, self.prompt_key, dict(self._media.kinds(table.column_names))))
            roles = known_roles(getattr(self.tokenizer, "chat_template", None))
            bad |= bad_prompts(table, self.prompt_key, roles, self._prompt_option(), self.messages_key is not None)
        if self.prompt_id_key:
            table.require(self.prompt_id_key, "data.prompt_id_key")
            bad |= bad_ids(table, self.prompt_id_key)
            if self.max_prompt_id_length is not None:
                bad |= long_ids(table, self.prompt_id_key, self.max_prompt_id_length, self._encode)
        return bad

    def _prompt_option(self) -> str:
        return "data.messages_key" if self.messages_key else "data.prompt_key"

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """With ``filter_overlong_prompts`` return the rows of at most ``max_prompt_length`` tokens, else all rows.

        The token ids are stored, so that no prompt is tokenized twice; prompts with images are encoded again together
        with their images.
        """
        dataframe = self.dataframe if dataframe is None else dataframe
        if not self.filter_overlong_prompts:
            return dataframe
        self.dataframe = dataframe
        tokens = None if self._has_media() else self._tokenize_all()
        lengths = self._all_prompts().lengths() if tokens is None else tokens.lengths
        keep = np.flatnonzero(lengths <= self.max_prompt_length)
        logger.info("%d of %d prompts have at most %d tokens", len(keep), len(dataframe), self.max_prompt_length)
        if len(keep) == 0 and len(dataframe):
            raise DataError(
                f"data.filter_overlong_prompts=True leaves none of {len(dataframe)} prompts: the shortest has "
                f"{lengths.min()} tokens and data.max_prompt_length={self.max_prompt_length}. Raise the latter."
            )
        # kept in the order of the rows
        self._token_ids = None if tokens is None else tokens.select(keep)
        return dataframe if len(keep) == len(dataframe) else dataframe.select(keep)

    def lengths_of(self, dataframe: Any) -> np.ndarray:
        """Return the number of tokens of the prompt of every row."""
        # methods of subclasses read self.dataframe
        whole, self.dataframe = getattr(self, "dataframe", None), dataframe
        try:
            return self._all_prompts().lengths()
        finally:
            self.dataframe = whole

    def find_unrenderable(self) -> dict[int, str]:
        """Return position -> reason of each prompt that the chat template refuses."""
        found = self._all_prompts().unrenderable()
        return {item: why.removeprefix(f"{self._where(item)}: ") for item, why in found.items()}

    def find_overlong(self) -> list[tuple[str, int]]:
        """Return (``file, row k``, tokens) of each prompt that ``truncation=error`` would refuse."""
        if self._token_ids is not None:
            return []
        if self._has_media():
            found = [] if self.filter_overlong_prompts else enumerate(self._all_prompts().lengths().tolist())
        else:
            found = self._all_prompts().longer_than(self.max_prompt_length)
        return [(self._where(item), length) for item, length in found if length > self.max_prompt_length]

    # one row ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.dataframe[item])
        where = partial(self._where, item)
        prompt, media = self._messages(row, item), self._media.read(row, where)
        self._media.check(prompt, media, where)
        # not sent on: images are in multi_modal_data
        for key in (self.prompt_key, self.image_key, self.video_key):
            row.pop(key, None)

        text = None
        if self._token_ids is None or self.return_full_prompt:
            text = self._prompt_text(prompt, item, **self._shown_tools(row, item))
        if any(media.values()):
            encoded = self._media.encode(text, media, where)
        else:
            ids = self._encode([text])[0] if self._token_ids is None else self._token_ids[item]
            encoded = EncodedPrompt(ids, ids, {})
        encoded = truncate_prompt(encoded, self.max_prompt_length, self.truncation, self.image_prompts, where)

        row.update(left_padded(encoded.ids, self.max_prompt_length, self.tokenizer))
        row["raw_prompt_ids"] = encoded.engine_ids
        if media:
            row["multi_modal_data"] = {kind: items for kind, items in media.items() if items}
            if self.return_multi_modal_inputs:
                row["multi_modal_inputs"] = encoded.inputs
        if self.return_raw_chat:
            row["raw_prompt"] = prompt
        if self.return_full_prompt:
            row["full_prompts"] = text
        if self.return_raw_input_ids:
            row["raw_input_ids"] = self.tokenizer(message_texts(prompt), add_special_tokens=False, verbose=False)[
                "input_ids"
            ]
        if self.prompt_id_key:
            row["prompt_id"] = str(row[self.prompt_id_key])
            if self.max_prompt_id_length is not None:
                row["prompt_id_ids"] = self._encode([row["prompt_id"]])[0]
        extra_info = row.get("extra_info")
        extra_info = extra_info if isinstance(extra_info, Mapping) else {}
        # Parquet fills in nulls where rows have no such field
        row["index"] = extra_info.get("index") or 0
        row["tools_kwargs"] = extra_info.get("tools_kwargs") or {}
        row["interaction_kwargs"] = extra_info.get("interaction_kwargs") or {}
        if extra_info.get("need_tools_kwargs", self.need_tools_kwargs) and not row["tools_kwargs"]:
            logger.warning("%s needs tools_kwargs and has none", self._where(item))
        return row

    # images and videos -----------------------------------------------------------------------------------------

    @property
    def _media(self) -> MediaColumns:
        return MediaColumns(self.image_prompts, {"image": self.image_key, "video": self.video_key})

    def _has_media(self) -> bool:
        """Whether some file has a column of images or videos that the model supports."""
        return bool(self._media.kinds(getattr(self.dataframe, "column_names", ())))

    def image_bytes(self) -> int:
        """Bytes of the images of a prompt, as they are and as the model reads them: the mean of the first rows."""
        if not len(self) or not self._has_media():
            return 0
        rows, total = [self[item] for item in range(min(8, len(self)))], 0
        for row in rows:
            tensors = [*(pixels_of(row.get("multi_modal_data") or {}) or {}).values()]
            tensors += [value for value in row.get("multi_modal_inputs", {}).values() if hasattr(value, "nbytes")]
            total += sum(tensor.nbytes for tensor in tensors)
        return total // len(rows)

    # texts -----------------------------------------------------------------------------------------------------

    def _build_messages(self, example: dict[str, Any], key: str | None = None) -> list[dict[str, Any]] | str:
        """Return the prompt of a row: messages, or a plain text.

        In messages of a row with images or videos every placeholder becomes a separate part, as processors expect.

        Args:
            key: the column; None: the prompt column.
        """
        prompt = example[key or self.prompt_key]
        kinds = [kind for kind, _ in self._media.kinds(example)]
        return with_image_parts(prompt, kinds) if kinds and isinstance(prompt, list) else prompt

    def _messages(self, row: dict[str, Any], item: int) -> list[dict[str, Any]] | str:
        """Return the prompt of a row, ready for the chat template; a plain string becomes a user message."""
        try:
            prompt = self._build_messages(row, **self._own_key)
        except KeyError as error:
            raise DataError(f"{self._where(item)} has no {error}; its columns are {', '.join(row)}.") from error
        if self.messages_key:
            prompt = parse_messages(prompt)
        messages = as_messages(prompt, self.tokenizer, [kind for kind, _ in self._media.kinds(row)])
        if messages is not None:
            return messages
        raise DataError(
            f"{self._where(item)}: {self.prompt_key!r} is {prompt!r}; a prompt is a text or a non-empty list of "
            "{role, content} messages."
        )

    @cached_property
    def _own_key(self) -> dict[str, str]:
        """Keyword arguments of a subclass's `_build_messages`: some releases of verl pass it the column."""
        return {"key": self.prompt_key} if "key" in inspect.signature(self._build_messages).parameters else {}

    def _shown_tools(self, row: Mapping[str, Any], item: int) -> dict[str, Any]:
        """Return the template's argument ``tools`` for this row; nothing where it has none."""
        if self.tool_schemas is None:
            return {}
        try:
            tools = self.tool_schemas(dict(row))
        except ValueError as error:
            raise DataError(f"{self._where(item)}: {error}") from error
        return {"tools": tools} if tools else {}

    def _prompt_text(self, prompt: list[dict[str, Any]] | str, item: int, **arguments: Any) -> str:
        try:
            return render(prompt, self.tokenizer, self.prompt_key, {**self.chat_template_kwargs, **arguments})
        except jinja2.TemplateError as error:
            raise DataError(f"{self._where(item)}: {template_error(prompt, self.tokenizer, error)}") from error

    def _text(self, row: dict[str, Any], item: int) -> str:
        return self._prompt_text(self._messages(row, item), item, **self._shown_tools(row, item))

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return encode(texts, self.tokenizer)

    def _where(self, item: int) -> str:
        return self.dataframe.where(item) if hasattr(self.dataframe, "where") else f"row {item}"

    # all rows --------------------------------------------------------------------------------------------------

    def _all_prompts(self) -> AllPrompts:
        column = self.prompt_key if self._reads_prompt_column() and self.tool_schemas is None else None
        encode_texts = partial(encode_many, tokenizer=self.tokenizer)
        return AllPrompts(self.dataframe, column, self._text, self._num_tokens, encode_texts, self.num_workers)

    def _num_tokens(self, row: dict[str, Any], item: int) -> int:
        where = partial(self._where, item)
        prompt, media = self._messages(row, item), self._media.read(row, where, pixels=False)
        self._media.check(prompt, media, where)
        text = self._prompt_text(prompt, item, **self._shown_tools(row, item))
        return self._media.num_tokens(text, media) if any(media.values()) else len(self._encode([text])[0])

    def _tokenize_all(self) -> TokenIds:
        """Return token ids of every prompt: from the cache, or from ``filter_overlong_prompts_workers`` processes."""
        try:
            return self._all_prompts().token_ids(self._cache_folder())
        except OSError as error:
            logger.warning("Token ids are not cached in data.cache_dir=%s: %s", self.cache_dir, error)
            return self._all_prompts().token_ids()

    def _cache_folder(self) -> str | None:
        """Return the folder of the cached token ids, or None for few rows and prompts that must not be cached."""
        # the cache does not know what a subclass does to a prompt, nor the tools of a row
        is_overridden = type(self)._build_messages is not RLHFDataset._build_messages
        is_overridden |= type(self)._prompt_text is not RLHFDataset._prompt_text or self.tool_schemas is not None
        if is_overridden or not isinstance(self.dataframe, RowTable) or len(self.dataframe) < CACHED_FROM:
            return None
        rows = self.dataframe.positions()
        column = f"{self._prompt_option()}={self.prompt_key}"
        if domains := self.config.get("domains", None):  # decides which rows there are
            column += f" {self.config.get('reward_fn_key', 'data_source')} {dict(domains)}"
        key = cache_key(self.data_files, rows, self.tokenizer, self.chat_template_kwargs, column)
        return key and os.path.join(os.path.expanduser(self.cache_dir), "tokens", key)

    def _reads_prompt_column(self) -> bool:
        return type(self)._build_messages is RLHFDataset._build_messages
