"""Examples for supervised fine-tuning: rows of data files to token ids, with a mask of those to learn.

A row is a conversation (``turns.py`` says which tokens are learned), or a prompt and a response. All rows are read and
tokenized at the start, so that a row that cannot be used is named before training begins.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from verl.batch.ragged import Ragged
from verl.batch.windows import join_windows
from verl.data.example_images import ExampleImages
from verl.data.files import localized, read_files, resolve
from verl.data.loader import _user_class
from verl.data.table import DataError, first_bad_rows, known_roles, leave_out, why_unusable
from verl.data.templates import TemplateRefusal
from verl.data.tokenization import as_messages, encode, for_blocks, no_tokenizer_threads, render, template_error
from verl.data.turns import MaskRefusal, TurnTokens
from verl.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

__all__ = ["MultiTurnSFTDataset", "SFTDataset", "build_examples", "examples_to_batch"]

logger = logging.getLogger(__name__)

_SPEAKS_AFTER_S = 2.0


class _Examples(NamedTuple):
    """Examples of a block of rows, one after the other."""

    ids: np.ndarray
    """int32."""
    learned: np.ndarray
    """bool."""
    lengths: np.ndarray
    bad: dict[int, str]
    """Row -> why it cannot be used; its length is 0."""


class SFTDataset(Dataset):
    """Examples of data files.

    ``dataset[i]`` has ``input_ids``, ``attention_mask``, ``position_ids`` and ``loss_mask``, (n,) int64 each without
    padding; ``loss_mask`` is 1 on the tokens that are learned.

    For subclasses: ``tokens_of(row)`` returns ids and mask of a row and may be overridden.

    Args:
        parquet_files: as for `verl.data.files.open_table`; of any format.
        tokenizer: a Hugging Face tokenizer.
        config: the ``data`` section, or a mapping with some of its keys.
        max_samples: at most that many rows; -1: all.
        processor: of a vision-language model; rows with images need it. Items of such a dataset have also
            ``multi_modal_inputs``, the processor's tensors of a row's images.

    Raises:
        FileNotFoundError: a file is missing.
        DataError: a column is missing, a row cannot be learned from, or one is longer than ``max_length``.
    """

    default_format = "auto"
    sequences = 1
    """Sequences of tokens that a row has."""

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: Mapping[str, Any],
        max_samples: int = -1,
        processor: ProcessorMixin | None = None,
    ):
        self.config, self.tokenizer = config, tokenizer
        self.images = ExampleImages(processor, config.get("image_key") or "images")
        files = [parquet_files] if isinstance(parquet_files, str | os.PathLike) else list(parquet_files)
        self.file_names = [found for path in files for found in resolve(str(path))]
        cache = config.get("cache_dir")
        self.data_files = [localized(path, cache, config.get("use_shm", False)) for path in self.file_names]
        self.bad_rows = config.get("bad_rows", "refuse")
        self.dataframe = read_files(self.file_names, self.data_files, cache, self.bad_rows)
        if not len(self.dataframe):
            raise DataError(f"{', '.join(self.file_names)}: there are no rows. Name files that hold some.")
        self.num_rows = len(self.dataframe)
        """Rows of the files, of which ``max_samples`` may leave some out."""
        if max_samples >= 0:
            seed = abs(config.get("seed") or 1) if config.get("shuffle", True) else None
            self.dataframe = self.dataframe.at_most(max_samples, seed)
        self.images.check_supported(self.dataframe)
        self._turns: dict[Any, TurnTokens] = {}
        self.is_messages = self._reads_messages()
        self._roles = known_roles(tokenizer.chat_template)
        self._tokenize()

    # columns --------------------------------------------------------------------------------------------------------

    def _key(self, name: str, default: str) -> str:
        return self.config.get(name) or default

    def _reads_messages(self) -> bool:
        """Whether rows are conversations, by ``data.format`` or the columns there are."""
        chosen, table = self.config.get("format") or self.default_format, self.dataframe
        if chosen == "auto":
            chosen = self.default_format
        messages, prompt = self._key("messages_key", "messages"), self._key("prompt_key", "question")
        response = self._key("response_key", "answer")
        has_messages = messages in table.column_names
        has_pair = prompt in table.column_names and response in table.column_names
        if chosen == "auto" and has_messages and has_pair:
            raise DataError(
                f"{', '.join(self.file_names)}: there are conversations ({messages!r}, data.messages_key) and also "
                f"prompts with responses ({prompt!r} and {response!r}). Say which with data.format=messages or "
                "prompt_response."
            )
        if chosen == "auto" and not has_messages and not has_pair:
            raise DataError(
                f"{', '.join(self.file_names)}: there is neither a column {messages!r} (data.messages_key) nor columns "
                f"{prompt!r} and {response!r} (data.prompt_key, data.response_key); the columns are "
                f"{', '.join(table.column_names)}. Name the right ones."
            )
        is_messages = chosen == "messages" or chosen == "auto" and has_messages
        for name, key in (
            [("data.messages_key", messages)] if is_messages else [("data.prompt_key", prompt),
                                                                   ("data.response_key", response)]
        ):  # fmt: skip
            table.require(key, name)
        return is_messages

    # one row --------------------------------------------------------------------------------------------------------

    def tokens_of(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        """Return the token ids of a row, and for each whether it is learned.

        Raises:
            ValueError: the row cannot be used; says why.
        """
        return self._conversation(row) if self.is_messages else self._pair(row)

    def sequences_of(self, row: Mapping[str, Any]) -> list[tuple[list[int], list[bool]]]:
        """Return those of each sequence of a row."""
        return [self.tokens_of(row)]

    def _conversation(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        messages, images = self.images.of(row, self._messages(row))
        ids, learned = self._turns_with(self._thinking(row)).encode(messages, self._tools(row))
        return self.images.expand(ids, learned, images)

    def _tools(self, row: Mapping[str, Any]) -> Any:
        tools = row.get(self._key("tools_key", "tools"))
        return _without_nulls((json.loads(tools) if isinstance(tools, str) and tools.strip() else tools) or ())

    def _messages(self, row: Mapping[str, Any]) -> Any:
        """The conversation of a row, or its prompt as messages; a text where there is no chat template."""
        if self.is_messages:
            key = self._key("messages_key", "messages")
            messages = row.get(key)
            if why := why_unusable(messages, self._roles, is_messages=True):
                raise MaskRefusal(f"{key!r} {why}")
            return _without_nulls(json.loads(messages) if isinstance(messages, str) else messages)
        name = self._key("prompt_key", "question")
        prompt = _inner(row, name, self.config.get("prompt_dict_keys"))
        if why := why_unusable(prompt, self._roles):
            raise MaskRefusal(f"the prompt ({name!r}) {why}")
        messages = as_messages(prompt, self.tokenizer, ())
        assert messages is not None
        return messages

    def _thinking(self, row: Mapping[str, Any]) -> bool | None:
        """The template's argument ``enable_thinking`` for a row; None: its own default."""
        key = self._key("enable_thinking_key", "enable_thinking")
        value = row.get(key)
        if value is None:
            value = {"true": True, "false": False}.get(str(self.config.get("enable_thinking_default")).lower())
        if value not in (None, True, False):
            raise MaskRefusal(f"{key!r} is {value!r}, which is no truth value")
        return None if value is None else bool(value)

    def _turns_with(self, thinking: bool | None) -> TurnTokens:
        if thinking not in self._turns:
            arguments = dict(self.config.get("apply_chat_template_kwargs") or {})
            arguments |= {} if thinking is None else {"enable_thinking": thinking}
            tolerates = self.config.get("ignore_input_ids_mismatch", False)
            self._turns[thinking] = TurnTokens(self.tokenizer, arguments, tolerates)
        return self._turns[thinking]

    def _pair(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        name, key = self._key("prompt_key", "question"), self._key("response_key", "answer")
        messages, images = self.images.of(row, self._messages(row))
        response = _inner(row, key, self.config.get("response_dict_keys"))
        if not isinstance(response, str):
            raise MaskRefusal(f"the response ({key!r}) is {response!r}; it must be a text")
        return self.images.expand(*self._answered(messages, name, response), images)

    def _answered(self, messages: Any, name: str, response: str) -> tuple[list[int], list[bool]]:
        """The prompt of the column ``name`` as the policy meets it, and the response, which is learned."""
        arguments = dict(self.config.get("apply_chat_template_kwargs") or {})
        try:
            text = render(messages, self.tokenizer, name, arguments)
        except jinja2.TemplateError as error:
            raise MaskRefusal(template_error(messages, self.tokenizer, error)) from error
        (ids,) = encode([text], self.tokenizer)
        answer = self.tokenizer(response + (self.tokenizer.eos_token or ""), add_special_tokens=False, verbose=False)
        return [*ids, *answer["input_ids"]], [False] * len(ids) + [True] * len(answer["input_ids"])

    # all rows -------------------------------------------------------------------------------------------------------

    def _tokenize(self) -> None:
        """Tokenize all rows, refuse or leave out those that cannot be used, and truncate as ``truncation`` says."""
        table, cores = self.dataframe, len(os.sched_getaffinity(0))
        workers = min(self.config.get("num_workers", 8) or 1, cores)
        parts: list[_Examples] = []
        said = time.monotonic()
        with no_tokenizer_threads():
            for part in for_blocks(self._block, len(table), workers):
                parts.append(part)
                now = time.monotonic()
                if now - said > _SPEAKS_AFTER_S:
                    done = sum(len(one.lengths) for one in parts)
                    print(f"tokenized {done:,} of {len(table):,} examples", flush=True)
                    said = now
        bad = {item: why for part in parts for item, why in part.bad.items()}
        ids, learned = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "learned"))
        lengths = np.concatenate([part.lengths for part in parts])
        starts = np.cumsum(lengths) - lengths
        keep = np.ones(len(table), bool)
        keep[list(bad)] = False
        self.dataframe = leave_out(table, bad, self.bad_rows)
        kept = np.repeat(keep, self.sequences)
        self._ids, self._learned, self._lengths, self._starts = ids, learned, lengths[kept], starts[kept]
        self._has_images = self.images.are_in(ids)
        if bad:
            logger.warning("%d rows are left out: %s", len(bad), first_bad_rows(self.dataframe.skipped))
        self._truncate()
        self._drop_empty()

    def _block(self, block: range) -> _Examples:
        ids, learned, lengths, bad = [], [], [], {}
        for item, row in zip(block, self.dataframe.rows(block), strict=True):
            try:
                found = self.sequences_of(row)
            except (MaskRefusal, TemplateRefusal, DataError) as error:
                bad[item] = str(error)
                found = [([], [])] * self.sequences
            for row_ids, mask in found:
                ids.append(row_ids)
                learned.append(mask)
                lengths.append(len(row_ids))
        total = sum(lengths)
        flat = np.fromiter(chain.from_iterable(ids), np.int32, total)
        return _Examples(flat, np.fromiter(chain.from_iterable(learned), bool, total), np.array(lengths), bad)

    def truncated(self, max_length: int, truncation: str) -> SFTDataset:
        """Return a copy whose sequences are truncated further, without examples that are then of no use.

        Raises:
            DataError: none is left, or one is longer and ``truncation`` is ``error``.
        """
        found = copy.copy(self)
        found.config = {**self.config, "max_length": max_length, "truncation": truncation}
        found._truncate()
        found._drop_empty()
        return found

    def _truncate(self) -> None:
        limit, side = self.config.get("max_length", 1024), self.config.get("truncation", "error")
        overlong = np.flatnonzero(self._lengths > limit)
        if not len(overlong):
            return
        if side == "error":
            shown = "; ".join(f"{self.dataframe.where(int(i))} has {self._lengths[i]} tokens" for i in overlong[:5])
            raise DataError(
                f"{len(overlong)} of {len(self)} examples are longer than data.max_length={limit} ({shown}"
                f"{'; ...' if len(overlong) > 5 else ''}). Raise it, or set data.truncation to left or right to cut "
                "them."
            )
        if side not in ("left", "right"):
            raise ValueError(f"data.truncation={side!r} is not supported; use 'error', 'left' or 'right'.")
        starts = self._starts
        if side == "left":
            self._starts = self._starts + np.maximum(self._lengths - limit, 0)
        for item in overlong.tolist() if self._has_images else ():
            whole, first = self._ids[starts[item] : starts[item] + self._lengths[item]], self._starts[item]
            self.images.check_cut(self._ids[first : first + limit], whole, self.dataframe.where(item), limit)
        self._lengths = np.minimum(self._lengths, limit)

    def _drop_empty(self) -> None:
        """Leave out examples of which nothing learned is left; the first token is predicted from nothing."""
        counts = np.array([self._mask(item).sum() for item in range(len(self._lengths))])
        empty = np.flatnonzero(counts == 0)
        if len(empty) == len(counts):
            raise DataError(
                f"none of {len(counts)} examples has a token to learn within data.max_length="
                f"{self.config.get('max_length', 1024)}. Raise it, or cut on the other side with data.truncation."
            )
        if len(empty):
            logger.warning(
                "%d of %d examples have no token to learn after data.truncation and are left out, %s first",
                *(len(empty), len(counts), self.dataframe.where(int(empty[0]))),
            )
            kept = np.flatnonzero(counts)
            self.dataframe = self.dataframe.select(kept)
            self._lengths, self._starts, counts = self._lengths[kept], self._starts[kept], counts[kept]
        self.num_tokens, self.num_learned = int(self._lengths.sum()), int(counts.sum())

    def _mask(self, item: int) -> np.ndarray:
        first = int(self._starts[item])
        mask = self._learned[first : first + int(self._lengths[item])].copy()
        mask[:1] = False
        return mask

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, item: int) -> dict[str, Any]:
        first, length = int(self._starts[item]), int(self._lengths[item])
        row: dict[str, Any] = {
            "input_ids": torch.from_numpy(self._ids[first : first + length].astype(np.int64)),
            "attention_mask": torch.ones(length, dtype=torch.int64),
            "position_ids": torch.arange(length),
            "loss_mask": torch.from_numpy(self._mask(item).astype(np.int64)),
        }
        if self._has_images:
            source = self.dataframe[item]
            _, images = self.images.of(source, self._messages(source), pixels=True)
            row["multi_modal_inputs"] = self.images.inputs(images)
        return row

    @property
    def summary(self) -> str:
        """Sizes for the plan of a run."""
        longest = int(self._lengths.max())
        share = self.num_learned / self.num_tokens
        return f"{len(self):,} examples, {self.num_tokens:,} tokens, {share:.0%} of them learned, {longest:,} at most"


class MultiTurnSFTDataset(SFTDataset):
    """The same where rows are conversations."""

    default_format = "messages"


def build_examples(
    config: Mapping[str, Any],
    files: str | Sequence[str],
    tokenizer: Any,
    is_train: bool = True,
    processor: ProcessorMixin | None = None,
) -> Dataset:
    """The dataset of the ``data`` section of supervised fine-tuning over ``files``: `SFTDataset`, or the user's class.

    Raises:
        TypeError: the user's class is not a torch Dataset.
    """
    custom = config.get("custom_cls") or {}
    if custom.get("path"):
        inherit = "torch.utils.data.Dataset; let it inherit from that or from verl.data.sft_dataset.SFTDataset"
        cls = _user_class(custom, "data.custom_cls", "path", "name", Dataset, inherit)
        return cls(parquet_files=files, tokenizer=tokenizer, config=config)
    most = config.get("train_max_samples" if is_train else "val_max_samples", -1)
    return SFTDataset(files, tokenizer, config, most, processor)


def examples_to_batch(items: Sequence[Mapping[str, Any]]) -> DataProto:
    """Join examples into a batch in the columns of the training engines.

    What an example's first learned token follows is its prompt, everything up to its last learned token its response,
    of which ``response_mask`` marks what is learned. Tokens after it decide nothing and are left out.
    """
    prompts, responses, masks = [], [], []
    for item in items:
        ids, mask = (torch.as_tensor(item[name]) for name in ("input_ids", "loss_mask"))
        if (attended := item.get("attention_mask")) is not None:
            is_own = torch.as_tensor(attended) != 0
            ids, mask = ids[is_own], mask[is_own]
        mask = mask.clone()
        mask[:1] = 0
        places = mask.nonzero().flatten()
        first, last = (int(places[0]), int(places[-1]) + 1) if len(places) else (len(ids), len(ids))
        prompts.append(ids[:first])
        responses.append(ids[first:last])
        masks.append(mask[first:last])
    batch = rows_to_batch(prompts, responses, masks)
    if any(item.get("multi_modal_inputs") for item in items):
        inputs = np.empty(len(items), dtype=object)
        inputs[:] = [dict(item.get("multi_modal_inputs") or {}) for item in items]
        batch.non_tensor_batch["multi_modal_inputs"] = inputs
    return batch


def rows_to_batch(prompts: Sequence[Tensor], responses: Sequence[Tensor], masks: Sequence[Tensor]) -> DataProto:
    """A packed batch of prompts and responses, and the mask of the responses' tokens that count."""
    before, after = (max(map(len, rows)) for rows in (prompts, responses))
    prompt = Ragged.from_rows(prompts, before, side="left")
    response = Ragged.from_rows(responses, max(after, 1), side="right")
    columns = {
        **join_windows(prompt, response),
        "responses": response,
        "response_mask": response.like(torch.cat(list(masks)).to(torch.int64)),
    }
    return DataProto.from_ragged(columns, meta_info={"global_token_num": columns["input_ids"].layout.lengths.tolist()})


def _inner(row: Mapping[str, Any], key: str, path: Sequence[str] | None) -> Any:
    """The value of a column; with ``path``, what stands in it under these keys."""
    value = row.get(key)
    for name in path or ():
        if not isinstance(value, Mapping) or name not in value:
            raise MaskRefusal(f"{key!r} has no {name!r}: it is {value!r}")
        value = value[name]
    return value


def _without_nulls(value: Any) -> Any:
    """Lists and mappings without the nulls that Parquet puts where other rows have a field."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple | np.ndarray) else value
