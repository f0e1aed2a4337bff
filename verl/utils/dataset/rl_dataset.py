"""Prompts for reinforcement learning: rows of a data file to left-padded token ids (row 0 of a step's data flow).

Knows tokenizers and rows; nothing of rewards or batches. Images are ``vision_utils``' matter, videos ``video_utils``'.
"""

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.utils.data import Dataset

from verl.utils.dataset.files import CACHE_DIR, localized, read_files, resolve
from verl.utils.dataset.prompt_rows import (
    bad_golds,
    bad_ids,
    bad_prompts,
    known_roles,
    leave_out,
    parse_messages,
    refuse,
    told,
)
from verl.utils.dataset.table import BadRow, DataError, RowTable
from verl.utils.dataset.token_ids import CACHED_FROM, TokenIds, cache_key, for_all_blocks, one_thread_per_process
from verl.utils.dataset.video_utils import process_video
from verl.utils.dataset.vision_utils import (
    EncodedPrompt,
    ImagePrompts,
    count_image_parts,
    open_image,
    placeholder_mismatch,
    process_image,
    uneven_image_rows,
    with_image_parts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)

__all__ = ["DataError", "RLHFDataset", "collate_fn", "truncate"]

_TOKENIZE_BATCH = 1000
"""Prompts handed to the tokenizer at once while a whole file is tokenized."""


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor | np.ndarray]:
    """Rows to one batch: tensors are stacked, everything else becomes a one-dimensional object array.

    A non-tensor that some rows lack is ``None`` there (files of one dataset need not agree on their columns).
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


def truncate(ids: list[int], max_length: int, side: str) -> list[int]:
    """Cut token ids to ``max_length``: ``left`` keeps the end, ``right`` the start, ``middle`` half of each."""
    if len(ids) <= max_length:
        return ids
    if side == "left":
        return ids[-max_length:]
    if side == "right":
        return ids[:max_length]
    if side == "middle":
        head = max_length // 2
        return ids[:head] + ids[len(ids) - (max_length - head) :]
    raise ValueError(f"data.truncation={side!r} is not a way to truncate: use 'error', 'left', 'right' or 'middle'.")


class RLHFDataset(Dataset):
    """Prompts of data files, one row each, with all that a reward function needs of the row.

    ``dataset[i]`` is a dict with, P = ``config.max_prompt_length``:

    - ``input_ids``, ``attention_mask``, ``position_ids``: (P,) int64, LEFT padded; positions are 0 on the padding;
    - ``raw_prompt_ids``: the same ids as a list without padding;
    - ``index`` (``extra_info.index``, else 0), ``tools_kwargs``, ``interaction_kwargs``: from ``extra_info``;
    - ``raw_prompt`` (the messages) with ``return_raw_chat``, ``full_prompts`` (the text) with ``return_full_prompt``;
    - ``raw_input_ids`` with ``return_raw_input_ids``: token ids of what the messages say, line by line, no template;
    - ``prompt_id`` with ``prompt_id_key``, and with ``max_prompt_id_length`` its token ids, ``prompt_id_ids``;
    - every other column of the row. The prompt, image and video columns are consumed.

    A row whose ``image_key`` column holds images shows them where its messages say ``<image>``, in order. For the rows
    of files with that column there are, beside the above:

    - ``input_ids``, ``attention_mask``, ``position_ids`` with as many placeholder tokens an image as it has features;
      positions count tokens (a model's own positions in two or three dimensions are made where it runs);
      ``raw_prompt_ids`` with one placeholder token an image, as rollout engines want it;
    - ``multi_modal_data``: ``{"image": [PIL images]}``, empty for a row without;
    - ``multi_modal_inputs``, with ``return_multi_modal_inputs``: the processor's tensors (``pixel_values``,
      ``image_grid_thw``, ...), empty for a row without.

    Videos of ``video_key`` are shown where messages say ``<video>``: ``{"video": [Video]}`` of ``multi_modal_data``.

    A prompt is a list of ``{role, content}`` messages, or a plain string: then it is one user message, or, if the
    tokenizer has no chat template, the text itself. In the column of ``messages_key`` it is messages or their JSON.

    Rows that no run can use are refused when the files are read, or with ``bad_rows=skip`` left out and named in
    ``skipped_rows``.

    For subclasses: ``_build_messages(row)`` makes the messages of a row and may be overridden; ``dataframe`` holds the
    rows and may be replaced by anything with ``len`` and ``[i] -> dict`` in ``_read_files_and_tokenize``.

    Args:
        data_files: what :func:`verl.utils.dataset.files.open_table` takes.
        tokenizer: a Hugging Face tokenizer.
        config: the ``data`` section, or any mapping with some of its keys.
        processor: of a vision-language model; rows with images need it.
        max_samples: keep at most that many rows, drawn with ``config.seed`` if ``config.shuffle``, else the first;
            -1: all.

    Raises:
        FileNotFoundError: a data file is missing.
        DataError: a column is missing or a row cannot be used; names file and row.
        NotImplementedError: a row has videos, and the model's processor takes none.
    """

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

    def _download(self) -> None:
        """Bring the files to this machine: ``data_files`` are local paths, ``file_names`` what the user calls them."""
        use_shm = self.config.get("use_shm", False)
        self.file_names = [found for path in self.original_data_files for found in resolve(str(path))]
        self.data_files = [localized(path, self.cache_dir, use_shm) for path in self.file_names]

    def _read_files_and_tokenize(self) -> None:
        table = read_files(self.file_names, self.data_files, self.cache_dir, self.bad_rows)
        if len(table) + len(table.skipped) == 0:
            raise DataError(f"{', '.join(self.file_names)}: there are no rows. Name files that hold some.")
        if self._reads_prompt_column():
            table.require(self.prompt_key, self._prompt_option())
        table = self._capped(self._leave_out(table, self._unusable_rows(table)))
        self.dataframe = table
        if self.bad_rows == "skip":
            self.dataframe = self._leave_out(table, self.find_unrenderable())
        if self.skipped_rows:
            logger.warning("%d rows are left out: %s", len(self.skipped_rows), told(self.skipped_rows))
        self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    @property
    def skipped_rows(self) -> list[BadRow]:
        """Rows of the files that are left out with ``bad_rows=skip``, and why."""
        return getattr(self.dataframe, "skipped", [])

    def _unusable_rows(self, table: RowTable) -> dict[int, str]:
        """Find the rows that cannot be used now, column by column, and not in the middle of a training."""
        bad = bad_golds(table)
        start = 0
        for file, path in zip(table.tables, table.names, strict=True):
            if not self.takes_videos and len(rows := _rows_with_items(file, self.video_key)):
                raise NotImplementedError(
                    f"{path}, row {rows[0]} has {self.video_key!r} (data.video_key), and the model's processor takes "
                    f"no videos. Use a model of the Qwen2-VL or Qwen2.5-VL families, leave out the {len(rows)} rows "
                    "that have them, or name another column with data.video_key."
                )
            if self.image_prompts is None and len(rows := _rows_with_items(file, self.image_key)):
                raise DataError(
                    f"{path}, row {rows[0]} has {self.image_key!r} (data.image_key), and the model has no image "
                    f"processor. Use a vision-language model, leave out the {len(rows)} rows that have images, or name "
                    "another column with data.image_key."
                )
            for kind, key in self._shown_kinds(file.column_names) if self._reads_prompt_column() else ():
                for row, shown, held in uneven_image_rows(file[self.prompt_key], file[key], kind):
                    bad[start + row] = placeholder_mismatch("", shown, held, key, kind).removeprefix(": ")
            start += file.num_rows
        if self._reads_prompt_column():
            roles = known_roles(getattr(self.tokenizer, "chat_template", None))
            bad |= bad_prompts(table, self.prompt_key, roles, self._prompt_option(), self.messages_key is not None)
        if self.prompt_id_key:
            table.require(self.prompt_id_key, "data.prompt_id_key")
            bad |= bad_ids(table, self.prompt_id_key) | self._long_ids(table)
        return bad

    def _long_ids(self, table: RowTable) -> dict[int, str]:
        limit = self.max_prompt_id_length
        if limit is None:
            return {}
        lengths = (len(self._encode([str(value)])[0]) for value in table.column(self.prompt_id_key))
        rule = f"tokens, more than data.max_prompt_id_length={limit}"
        return {
            item: f"{self.prompt_id_key!r} has {length} {rule}" for item, length in enumerate(lengths) if length > limit
        }

    def _leave_out(self, table: RowTable, bad: Mapping[int, str]) -> RowTable:
        """The rows but for the bad ones, which ``bad_rows`` may also refuse."""
        return leave_out(table, bad) if self.bad_rows == "skip" else refuse(table, bad)

    def _capped(self, table: RowTable) -> RowTable:
        if not 0 <= self.max_samples < len(table):
            return table
        if not self.config.get("shuffle", True):
            return table.select(np.arange(self.max_samples))
        seed = self.config.get("seed", None)
        draw = np.random.default_rng(abs(1 if seed is None else seed))
        return table.select(np.sort(draw.choice(len(table), self.max_samples, replace=False)))

    def _prompt_option(self) -> str:
        return "data.messages_key" if self.messages_key else "data.prompt_key"

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Without ``filter_overlong_prompts`` the rows as they are, else those of at most ``max_prompt_length`` tokens.

        The token ids are kept, so that no prompt is tokenized twice; those of prompts with images are made anew with
        their images.
        """
        dataframe = self.dataframe if dataframe is None else dataframe
        if not self.filter_overlong_prompts:
            return dataframe
        self.dataframe = dataframe
        tokens = None if self._has_images() else self._tokenize_all(dataframe)
        lengths = self._measure_all(dataframe) if tokens is None else tokens.lengths
        keep = np.flatnonzero(lengths <= self.max_prompt_length)
        logger.info("%d of %d prompts have at most %d tokens", len(keep), len(dataframe), self.max_prompt_length)
        if len(keep) == 0 and len(dataframe):
            raise DataError(
                f"data.filter_overlong_prompts=True leaves none of {len(dataframe)} prompts: the shortest has "
                f"{lengths.min()} tokens and data.max_prompt_length={self.max_prompt_length}. Raise the latter."
            )
        self._token_ids = None if tokens is None else tokens.select(keep)
        return dataframe if len(keep) == len(dataframe) else dataframe.select(keep)

    def lengths_of(self, dataframe: Any) -> np.ndarray:
        """Tokens of the prompt of every row."""
        whole, self.dataframe = getattr(self, "dataframe", None), dataframe
        try:
            return self._measure_all(dataframe)
        finally:
            self.dataframe = whole

    def find_unrenderable(self) -> dict[int, str]:
        """Position -> why, of each prompt that the chat template refuses."""
        found: dict[int, str] = {}
        for part in self._for_all_blocks("_unrenderable_block"):
            found |= part
        return found

    def _unrenderable_block(self, block: range) -> dict[int, str]:
        found = {}
        for item, row in zip(block, self._prompt_rows(block), strict=True):
            try:
                self._prompt_text(self._messages(row, item), item)
            except DataError as error:
                found[item] = str(error).removeprefix(f"{self._where(item)}: ")
        return found

    def find_overlong(self) -> list[tuple[str, int]]:
        """(``file, row k``, tokens) of each prompt that ``truncation=error`` would refuse.

        A token is at least one byte of text, so only prompts with more bytes than ``max_prompt_length`` are tokenized.
        """
        if self._token_ids is not None:
            return []
        if self._has_images():
            found = [] if self.filter_overlong_prompts else enumerate(self._measure_all(self.dataframe).tolist())
            return [(self._where(item), length) for item, length in found if length > self.max_prompt_length]
        margin = 8  # the few special tokens a tokenizer without a chat template adds
        texts = ((item, text) for block in self._blocks() for item, text in zip(block, self._texts(block), strict=True))
        doubtful = [(item, text) for item, text in texts if len(text.encode()) > self.max_prompt_length - margin]
        with one_thread_per_process():
            lengths = [len(ids) for ids in self._encode_many([text for _, text in doubtful])]
        pairs = zip(doubtful, lengths, strict=True)
        return [(self._where(item), length) for (item, _), length in pairs if length > self.max_prompt_length]

    # one row ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.dataframe[item])
        prompt, images = self._messages(row, item), self._images(row, item, process_image)
        videos = self._videos(row, item)
        self._check_placeholders(prompt, images, videos, item)
        for key in (self.prompt_key, self.image_key, self.video_key):
            row.pop(key, None)

        text = None
        if self._token_ids is None or self.return_full_prompt:
            text = self._prompt_text(prompt, item)
        if images or videos:
            encoded = self._encode_with_images(text, images or [], videos or [], item)
        else:
            ids = self._encode([text])[0] if self._token_ids is None else self._token_ids[item]
            encoded = EncodedPrompt(ids, ids, {})
        encoded = self._fitted(encoded, item)

        row.update(self._left_padded(encoded.ids))
        row["raw_prompt_ids"] = encoded.engine_ids
        if images is not None or videos is not None:
            shown = {"image": images, "video": videos}
            row["multi_modal_data"] = {kind: held for kind, held in shown.items() if held}
            if self.return_multi_modal_inputs:
                row["multi_modal_inputs"] = encoded.inputs
        if self.return_raw_chat:
            row["raw_prompt"] = prompt
        if self.return_full_prompt:
            row["full_prompts"] = text
        if self.return_raw_input_ids:
            row["raw_input_ids"] = self._encode_plain(_said(prompt))
        if self.prompt_id_key:
            row["prompt_id"] = str(row[self.prompt_id_key])
            if self.max_prompt_id_length is not None:
                row["prompt_id_ids"] = self._encode([row["prompt_id"]])[0]
        extra_info = row.get("extra_info")
        extra_info = extra_info if isinstance(extra_info, Mapping) else {}
        row["index"] = extra_info.get("index") or 0
        row["tools_kwargs"] = extra_info.get("tools_kwargs") or {}
        row["interaction_kwargs"] = extra_info.get("interaction_kwargs") or {}
        if extra_info.get("need_tools_kwargs", self.need_tools_kwargs) and not row["tools_kwargs"]:
            logger.warning("%s needs tools_kwargs and has none", self._where(item))
        return row

    def _fitted(self, prompt: EncodedPrompt, item: int) -> EncodedPrompt:
        """The prompt, cut to ``max_prompt_length`` as ``data.truncation`` says; an image is never cut."""
        length = len(prompt.ids)
        if length <= self.max_prompt_length:
            return prompt
        if self.truncation == "error":
            raise DataError(
                f"{self._where(item)}: the prompt has {length} tokens, more than "
                f"data.max_prompt_length={self.max_prompt_length}. Raise it, or set data.filter_overlong_prompts=True "
                "to leave such rows out, or data.truncation to left, right or middle to cut them."
            )
        if not prompt.inputs:
            ids = truncate(prompt.ids, self.max_prompt_length, self.truncation)
            return EncodedPrompt(ids, ids, {})
        try:
            return self.image_prompts.truncate(
                prompt, truncate(list(range(length)), self.max_prompt_length, self.truncation)
            )
        except ValueError as error:
            raise DataError(
                f"{self._where(item)}: data.truncation={self.truncation} cannot cut this prompt of {length} tokens to "
                f"data.max_prompt_length={self.max_prompt_length}: {error}. Raise the length, set "
                "data.filter_overlong_prompts=True, or give smaller images."
            ) from error

    # images ----------------------------------------------------------------------------------------------------

    def _has_images(self) -> bool:
        """Whether some file has a column of images or videos, and the model takes such."""
        return bool(self._shown_kinds(getattr(self.dataframe, "column_names", ())))

    @property
    def takes_videos(self) -> bool:
        """Whether the model's processor takes videos."""
        return self.image_prompts is not None and self.image_prompts.takes_videos

    def _shown_kinds(self, columns: Collection[str]) -> list[tuple[str, str]]:
        """(kind, column) of what rows with these columns may show the model."""
        kinds = {
            "image": (self.image_prompts is not None, self.image_key),
            "video": (self.takes_videos, self.video_key),
        }
        return [(kind, key) for kind, (takes, key) in kinds.items() if takes and key in columns]

    def _images(self, row: Mapping[str, Any], item: int, read: Any) -> list[Any] | None:
        """The images of a row, each through ``read``; None for a row of a file without the image column."""
        return self._read_shown("image", row, item, read)

    def _videos(self, row: Mapping[str, Any], item: int) -> list[Any] | None:
        """The videos of a row; None for a row of a file without the video column."""
        return self._read_shown("video", row, item, process_video)

    def _read_shown(self, kind: str, row: Mapping[str, Any], item: int, read: Any) -> list[Any] | None:
        key = dict(self._shown_kinds(row)).get(kind)
        if key is None:
            return None
        held = row[key]
        held = [] if held is None else list(held) if isinstance(held, (list, tuple, np.ndarray)) else [held]
        try:
            return [read(one) for one in held]
        except ValueError as error:
            raise DataError(f"{self._where(item)}: {error} ({key!r}, data.{kind}_key).") from error

    def _check_placeholders(
        self, prompt: Any, images: Sequence[Any] | None, videos: Sequence[Any] | None, item: int
    ) -> None:
        kinds = {"image": (images, self.image_key), "video": (videos, self.video_key)}
        for kind, (held, key) in kinds.items():
            shown = 0 if held is None or isinstance(prompt, str) else count_image_parts(prompt, kind)
            if held is not None and shown != len(held):
                raise DataError(placeholder_mismatch(self._where(item), shown, len(held), key, kind))

    def _encode_with_images(self, text: str, images: list[Any], videos: list[Any], item: int) -> EncodedPrompt:
        try:
            return self.image_prompts.encode(text, images, videos)
        except ValueError as error:
            raise DataError(f"{self._where(item)}: {error}.") from error

    def _measure_all(self, dataframe: Any) -> np.ndarray:
        """Tokens of every prompt, those of its images included."""
        self.dataframe = dataframe
        return np.concatenate([np.zeros(0, np.int64), *self._for_all_blocks("_measure_block")])

    def _measure_block(self, block: range) -> np.ndarray:
        with one_thread_per_process():
            return np.array([self._measure(dict(self.dataframe[item]), item) for item in block], dtype=np.int64)

    def _measure(self, row: dict[str, Any], item: int) -> int:
        prompt, images = self._messages(row, item), self._images(row, item, open_image)
        videos = self._videos(row, item)
        self._check_placeholders(prompt, images, videos, item)
        text = self._prompt_text(prompt, item)
        if images or videos:
            return self.image_prompts.num_tokens(text, images or [], videos or [])
        return len(self._encode([text])[0])

    # texts -----------------------------------------------------------------------------------------------------

    def _build_messages(self, example: dict[str, Any]) -> list[dict[str, Any]] | str:
        """The prompt of a row: messages, or a plain text."""
        return example[self.prompt_key]

    def _messages(self, row: dict[str, Any], item: int) -> list[dict[str, Any]] | str:
        """The prompt of a row, ready for the chat template; a plain string is turned into a user message."""
        try:
            prompt = self._build_messages(row)
        except KeyError as error:
            raise DataError(f"{self._where(item)} has no {error}; its columns are {', '.join(row)}.") from error
        if self.messages_key:
            prompt = parse_messages(prompt)
        if isinstance(prompt, str):
            if not self.tokenizer.chat_template:
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, (list, tuple, np.ndarray)) and len(prompt):
            # Parquet gives every message of a column the same fields: those a message does not use are null.
            messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
            kinds = [kind for kind, _ in self._shown_kinds(row)]
            return with_image_parts(messages, kinds) if kinds else messages
        raise DataError(
            f"{self._where(item)}: {self.prompt_key!r} is {prompt!r}; a prompt is a text or a non-empty list of "
            "{role, content} messages."
        )

    def _prompt_text(self, prompt: list[dict[str, Any]] | str, item: int) -> str:
        if isinstance(prompt, str):
            return prompt
        if not self.tokenizer.chat_template:
            raise DataError(
                f"data.prompt_key={self.prompt_key!r} holds chat messages but the tokenizer "
                f"{self.tokenizer.name_or_path!r} has no chat template. Use an instruct model, set "
                "actor_rollout_ref.model.custom_chat_template, or write plain text into the column."
            )
        try:
            return self.tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=False, **self.chat_template_kwargs
            )
        except jinja2.TemplateError as error:
            raise DataError(
                f"{self._where(item)}: the chat template of {self.tokenizer.name_or_path!r} refuses the messages with "
                f"the roles {', '.join(str(message.get('role')) for message in prompt)}: {error}"
            ) from error

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids. A chat template writes its own special tokens; for plain text the tokenizer adds them."""
        special = not self.tokenizer.chat_template
        return self.tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]

    def _encode_plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _left_padded(self, ids: list[int]) -> dict[str, torch.Tensor]:
        start = self.max_prompt_length - len(ids)
        pad = self.tokenizer.pad_token_id
        columns = torch.zeros(3, self.max_prompt_length, dtype=torch.int64)
        columns[0, :start] = self.tokenizer.eos_token_id if pad is None else pad
        columns[0, start:] = torch.tensor(ids, dtype=torch.int64)
        columns[1, start:] = 1
        columns[2, start:] = torch.arange(len(ids))
        return dict(zip(("input_ids", "attention_mask", "position_ids"), columns, strict=True))

    def _where(self, item: int) -> str:
        return self.dataframe.where(item) if hasattr(self.dataframe, "where") else f"row {item}"

    # all rows --------------------------------------------------------------------------------------------------

    def _tokenize_all(self, dataframe: Any) -> TokenIds:
        """Token ids of every prompt, made in ``filter_overlong_prompts_workers`` processes or found in the cache."""
        self.dataframe = dataframe
        folder = self._cache_folder()
        if folder is not None:
            try:
                return TokenIds.kept(self._for_all_blocks("_tokenize_block"), folder)
            except OSError as error:
                logger.warning("Token ids are not kept in data.cache_dir=%s: %s", self.cache_dir, error)
        return TokenIds.join(list(self._for_all_blocks("_tokenize_block")))

    def _cache_folder(self) -> str | None:
        """Where the token ids of all prompts are kept; None: nowhere, as they are few or could not be known again."""
        is_own = type(self)._build_messages is not RLHFDataset._build_messages
        is_own |= type(self)._prompt_text is not RLHFDataset._prompt_text
        if is_own or not isinstance(self.dataframe, RowTable) or len(self.dataframe) < CACHED_FROM:
            return None
        rows = self.dataframe.positions()
        column = f"{self._prompt_option()}={self.prompt_key}"
        key = cache_key(self.data_files, rows, self.tokenizer, self.chat_template_kwargs, column)
        return key and os.path.join(os.path.expanduser(self.cache_dir), "tokens", key)

    def _for_all_blocks(self, method: str) -> Iterator[Any]:
        """What ``method`` makes of each block of rows, in ``filter_overlong_prompts_workers`` processes."""
        return for_all_blocks(self, method, self._blocks(), self.num_workers)

    def _tokenize_block(self, block: range) -> TokenIds:
        with one_thread_per_process():
            return TokenIds.of(self._encode_many(self._texts(block)))

    def _blocks(self) -> list[range]:
        return [range(a, min(a + _TOKENIZE_BATCH, len(self))) for a in range(0, len(self), _TOKENIZE_BATCH)]

    def _texts(self, block: range) -> list[str]:
        """The rendered prompts of some rows."""
        rows = self._prompt_rows(block)
        return [self._prompt_text(self._messages(row, item), item) for row, item in zip(rows, block, strict=True)]

    def _prompt_rows(self, block: range) -> list[dict[str, Any]]:
        """Some rows with what their prompt is made of: only that column is read unless a subclass wants the others."""
        if self._reads_prompt_column() and isinstance(self.dataframe, RowTable):
            return self.dataframe.rows(block, [self.prompt_key])
        return [dict(self.dataframe[item]) for item in block]

    def _reads_prompt_column(self) -> bool:
        return type(self)._build_messages is RLHFDataset._build_messages

    def _encode_many(self, texts: list[str]) -> list[list[int]]:
        """:meth:`_encode` for many texts, past the wrapper's bookkeeping where that provably gives the same ids."""
        if not texts:
            return []
        first = self._encode(texts[:1])  # also resets truncation and padding left behind by earlier calls
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if not hasattr(backend, "encode_batch_fast"):
            return first + (self._encode(texts[1:]) if len(texts) > 1 else [])
        special = not self.tokenizer.chat_template
        ids = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)]
        return ids if ids[0] == first[0] else self._encode(texts)


def _said(prompt: list[dict[str, Any]] | str) -> str:
    """What the messages of a prompt say, without who says it."""
    if isinstance(prompt, str):
        return prompt
    contents = (message.get("content") or "" for message in prompt)
    texts = (c if isinstance(c, str) else "".join(part.get("text") or "" for part in c) for c in contents)
    return "\n".join(texts)


def _flat(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _rows_with_items(table: pa.Table, name: str) -> np.ndarray:
    """Rows of a list column that hold at least one item; of any other column: that are not null."""
    if name not in table.column_names:
        return np.zeros(0, np.int64)
    column = _flat(table[name])
    filled = pc.is_valid(column)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        filled = pc.fill_null(pc.greater(pc.list_value_length(column), 0), False)
    return np.flatnonzero(filled.to_numpy(zero_copy_only=False))
