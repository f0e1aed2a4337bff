"""All prompts of a data set at once: tokenized, measured, or searched for those no run can use; in several processes.

Knows rows by number; what a row's prompt is, and how it is rendered, is the data set's to say.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import torch

from verl.data.table import DataError, RowTable
from verl.data.vision import EncodedPrompt, ImagePrompts, with_image_parts
from verl.utils.fs import written_once

# -- Token ids of all prompts of a data set: in one flat array, made in several processes, kept on disk --------------


logger = logging.getLogger(__name__)

_FORMAT = "1"
"""Changes when what is kept on disk, or how prompts are rendered, does."""

CACHED_FROM = 5000
"""Rows from which on token ids are kept on disk; fewer are made again as quickly."""


class TokenIds:
    """Many lists of token ids in one flat array.

    Args:
        flat: all ids, one list after the other; may be memory-mapped.
        lengths: of each list.
        starts: where each begins in ``flat``; None: they follow one another.
    """

    def __init__(self, flat: np.ndarray, lengths: np.ndarray, starts: np.ndarray | None = None):
        self.flat, self.lengths = flat, lengths
        self.starts = np.cumsum(lengths) - lengths if starts is None else starts

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]]) -> TokenIds:
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        flat = np.fromiter(chain.from_iterable(ids), dtype=np.int32, count=int(lengths.sum()))
        return cls(flat, lengths)

    @classmethod
    def join(cls, parts: Sequence[TokenIds]) -> TokenIds:
        """The lists of several, each as it came from :meth:`of`."""
        if not parts:
            return cls.of([])
        return cls(np.concatenate([part.flat for part in parts]), np.concatenate([part.lengths for part in parts]))

    @classmethod
    def kept(cls, parts: Iterator[TokenIds], folder: str) -> TokenIds:
        """:meth:`join`, written to a folder as the parts come, or found there; memory-mapped."""

        def write(place: str) -> None:
            os.makedirs(place)
            lengths = []
            with open(os.path.join(place, "ids"), "wb") as file:
                for part in parts:
                    part.flat.astype(np.int32).tofile(file)
                    lengths.append(part.lengths)
            np.save(os.path.join(place, "lengths.npy"), np.concatenate(lengths))

        written_once(folder, write)
        lengths = np.load(os.path.join(folder, "lengths.npy"))
        total = int(lengths.sum())
        path = os.path.join(folder, "ids")
        flat = np.memmap(path, np.int32, "r", shape=(total,)) if total else np.zeros(0, np.int32)
        return cls(flat, lengths)

    def __getitem__(self, item: int) -> list[int]:
        start = int(self.starts[item])
        return self.flat[start : start + int(self.lengths[item])].tolist()

    def select(self, index: np.ndarray) -> TokenIds:
        """The lists at these places."""
        return TokenIds(self.flat, self.lengths[index], self.starts[index])


def cache_key(
    files: Sequence[str], rows: np.ndarray, tokenizer: Any, template_kwargs: Mapping[str, Any], column: str
) -> str | None:
    """What token ids depend on, as one short name; None: they cannot be known again.

    A tokenizer with code of its own, one that is slow, and a template that writes the date give None.

    Args:
        files: local files, which are read to their end.
        rows: numbers of the rows among all rows of the files.
        column: that of the prompts.
    """
    import xxhash

    backend = getattr(tokenizer, "backend_tokenizer", None)
    template = json.dumps(tokenizer.chat_template, default=str)
    if backend is None or not type(tokenizer).__module__.startswith("transformers.") or "strftime" in template:
        return None
    if not all(os.path.isfile(file) for file in files):
        return None
    parts = [_FORMAT, column, template, json.dumps(dict(template_kwargs), default=str, sort_keys=True)]
    parts += [backend.to_str(), type(tokenizer).__qualname__, str(tokenizer.special_tokens_map)]
    parts += [xxhash.xxh3_128_hexdigest(np.ascontiguousarray(rows).data), *map(_content, files)]
    return hashlib.sha1("\0".join(parts).encode()).hexdigest()


def _content(path: str) -> str:
    import xxhash

    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            state.update(piece)
    return state.hexdigest()


class BlockWorker:
    """The dataset that a forked process works for."""

    dataset: Any

    @classmethod
    def adopt(cls, dataset: Any) -> None:
        cls.dataset = dataset

    @classmethod
    def run(cls, method: str, block: range) -> Any:
        return getattr(cls.dataset, method)(block)


def for_all_blocks(dataset: Any, method: str, blocks: Sequence[range], workers: int) -> Iterator[Any]:
    """What a method of the dataset makes of each block of rows, in order, in some processes."""
    workers = min(workers, len(blocks))
    if workers <= 1:
        yield from (getattr(dataset, method)(block) for block in blocks)
        return
    # With fork the rows reach the children without being copied or pickled.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, fork, BlockWorker.adopt, (dataset,)) as pool:
        yield from pool.map(BlockWorker.run, [method] * len(blocks), blocks)


class one_thread_per_process:
    """Keep the tokenizer's thread pool asleep: loader workers are forked later, and a forked pool would hang."""

    def __enter__(self) -> None:
        self.before = os.environ.get("TOKENIZERS_PARALLELISM")
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def __exit__(self, *error: Any) -> None:
        if self.before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = self.before


_BLOCK = 1000
"""Prompts handed to the tokenizer at once while a whole file is tokenized."""

Row = dict[str, Any]


class AllPrompts:
    """The prompts of some rows.

    Args:
        rows: has ``len`` and ``[i] -> dict``.
        column: the only one that prompts are made of; None: any.
        text: (row, number) -> the rendered prompt; raises `DataError` where there is none.
        num_tokens: (row, number) -> its tokens, those of images included.
        encode: texts -> token ids.
        workers: processes.
    """

    def __init__(
        self,
        rows: Any,
        column: str | None,
        text: Callable[[Row, int], str],
        num_tokens: Callable[[Row, int], int],
        encode: Callable[[list[str]], list[list[int]]],
        workers: int,
    ):
        self.rows, self.column, self.text, self.num_tokens = rows, column, text, num_tokens
        self.encode, self.workers = encode, workers

    def token_ids(self, folder: str | None = None) -> TokenIds:
        """Token ids of every prompt; with a folder kept there, or found there.

        Raises:
            OSError: the folder cannot be written.
        """
        if folder is not None:
            return TokenIds.kept(self._for_all("_tokenize_block"), folder)
        return TokenIds.join(list(self._for_all("_tokenize_block")))

    def lengths(self) -> np.ndarray:
        """Tokens of every prompt, those of its images included."""
        return np.concatenate([np.zeros(0, np.int64), *self._for_all("_measure_block")])

    def unrenderable(self) -> dict[int, str]:
        """Number -> why, of each prompt that has no text."""
        found: dict[int, str] = {}
        for part in self._for_all("_unrenderable_block"):
            found |= part
        return found

    def longer_than(self, limit: int) -> list[tuple[int, int]]:
        """(number, tokens) of each prompt of text that is longer.

        A token is at least one byte of text, so only prompts with more bytes are tokenized.
        """
        margin = 8  # the few special tokens a tokenizer without a chat template adds
        texts = ((i, text) for block in self._blocks() for i, text in zip(block, self._texts(block), strict=True))
        doubtful = [(i, text) for i, text in texts if len(text.encode()) > limit - margin]
        with one_thread_per_process():
            lengths = [len(ids) for ids in self.encode([text for _, text in doubtful])]
        return [(i, length) for (i, _), length in zip(doubtful, lengths, strict=True) if length > limit]

    def _for_all(self, method: str) -> Iterator[Any]:
        return for_all_blocks(self, method, self._blocks(), self.workers)

    def _blocks(self) -> Sequence[range]:
        return [range(a, min(a + _BLOCK, len(self.rows))) for a in range(0, len(self.rows), _BLOCK)]

    def _tokenize_block(self, block: range) -> TokenIds:
        with one_thread_per_process():
            return TokenIds.of(self.encode(self._texts(block)))

    def _measure_block(self, block: range) -> np.ndarray:
        with one_thread_per_process():
            return np.array([self.num_tokens(dict(self.rows[i]), i) for i in block], dtype=np.int64)

    def _unrenderable_block(self, block: range) -> dict[int, str]:
        found = {}
        for i, row in zip(block, self._prompt_rows(block), strict=True):
            try:
                self.text(row, i)
            except DataError as error:
                found[i] = str(error)
        return found

    def _texts(self, block: range) -> list[str]:
        return [self.text(row, i) for row, i in zip(self._prompt_rows(block), block, strict=True)]

    def _prompt_rows(self, block: range) -> list[Row]:
        """Some rows with what their prompt is made of: only that column is read if it alone is."""
        if self.column is not None and isinstance(self.rows, RowTable):
            return self.rows.rows(block, [self.column])
        return [dict(self.rows[i]) for i in block]


# -- One prompt on its way from the messages of a row to token ids: rendered, tokenized, cut, padded -----------------


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = list[dict[str, Any]] | str


def as_messages(prompt: Any, tokenizer: PreTrainedTokenizerBase, kinds: Sequence[str]) -> Prompt | None:
    """A prompt ready for the chat template: a text becomes a user message, unless there is no template.

    Args:
        kinds: ``image``, ``video``: of what placeholders become parts of their own.

    Returns:
        None where it is neither a text nor a non-empty list.
    """
    if isinstance(prompt, str):
        if not tokenizer.chat_template:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, (list, tuple, np.ndarray)) or not len(prompt):
        return None
    # Parquet gives every message of a column the same fields: those a message does not use are null.
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    return with_image_parts(messages, kinds) if kinds else messages


def render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, prompt_key: str, arguments: Mapping[str, Any]) -> str:
    """The text that the chat template makes of messages; a text is one already.

    Args:
        prompt_key: the column of the prompts, for a message.
        arguments: of the template.

    Raises:
        DataError: the tokenizer has no template.
        jinja2.TemplateError: the template refuses the messages.
    """
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise DataError(
            f"data.prompt_key={prompt_key!r} holds chat messages but the tokenizer "
            f"{tokenizer.name_or_path!r} has no chat template. Use an instruct model, set "
            "actor_rollout_ref.model.custom_chat_template, or write plain text into the column."
        )
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **arguments)


def refusal(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, error: jinja2.TemplateError) -> str:
    """What to say of messages that the chat template refuses."""
    return (
        f"the chat template of {tokenizer.name_or_path!r} refuses the messages with the roles "
        f"{', '.join(str(message.get('role')) for message in prompt)}: {error}"
    )


def encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids. A chat template writes its own special tokens; for plain text the tokenizer adds them."""
    special = not tokenizer.chat_template
    return tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]


def encode_many(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """:func:`encode` for many texts, past the wrapper's bookkeeping where that provably gives the same ids."""
    if not texts:
        return []
    first = encode(texts[:1], tokenizer)  # also resets truncation and padding left behind by earlier calls
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast"):
        return first + (encode(texts[1:], tokenizer) if len(texts) > 1 else [])
    special = not tokenizer.chat_template
    ids = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)]
    return ids if ids[0] == first[0] else encode(texts, tokenizer)


def said(prompt: Prompt) -> str:
    """What the messages of a prompt say, without who says it."""
    if isinstance(prompt, str):
        return prompt
    contents = (message.get("content") or "" for message in prompt)
    texts = (c if isinstance(c, str) else "".join(part.get("text") or "" for part in c) for c in contents)
    return "\n".join(texts)


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


def fitted(
    prompt: EncodedPrompt, limit: int, truncation: str, shown: ImagePrompts | None, where: Callable[[], str]
) -> EncodedPrompt:
    """The prompt, cut to ``limit`` tokens as ``data.truncation`` says; an image is never cut.

    Args:
        where: names the row, for a message.

    Raises:
        DataError: it is longer, and may or can not be cut.
    """
    length = len(prompt.ids)
    if length <= limit:
        return prompt
    if truncation == "error":
        raise DataError(
            f"{where()}: the prompt has {length} tokens, more than data.max_prompt_length={limit}. Raise it, or set "
            "data.filter_overlong_prompts=True to leave such rows out, or data.truncation to left, right or middle to "
            "cut them."
        )
    if not prompt.inputs:
        ids = truncate(prompt.ids, limit, truncation)
        return EncodedPrompt(ids, ids, {})
    try:
        return shown.truncate(prompt, truncate(list(range(length)), limit, truncation))
    except ValueError as error:
        raise DataError(
            f"{where()}: data.truncation={truncation} cannot cut this prompt of {length} tokens to "
            f"data.max_prompt_length={limit}: {error}. Raise the length, set data.filter_overlong_prompts=True, or "
            "give smaller images."
        ) from error


def left_padded(ids: list[int], width: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, torch.Tensor]:
    """``input_ids``, ``attention_mask`` and ``position_ids`` of one prompt, (width,) int64 each."""
    start = width - len(ids)
    pad = tokenizer.pad_token_id
    columns = torch.zeros(3, width, dtype=torch.int64)
    columns[0, :start] = tokenizer.eos_token_id if pad is None else pad
    columns[0, start:] = torch.tensor(ids, dtype=torch.int64)
    columns[1, start:] = 1
    columns[2, start:] = torch.arange(len(ids))
    return dict(zip(("input_ids", "attention_mask", "position_ids"), columns, strict=True))
