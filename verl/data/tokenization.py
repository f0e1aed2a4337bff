"""Rendering and tokenizing of prompts: one prompt, or all prompts of a dataset in several processes, cached on disk.

The dataset defines what a row's prompt is (``rl_dataset.py``).
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.table import DataError, RowTable
from verl.data.vision import EncodedPrompt, ImagePrompts, with_image_parts
from verl.telemetry.progress import watched
from verl.utils.fs import written_once
from verl.utils.py_functional import unchanged_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = list[dict[str, Any]] | str
Row = dict[str, Any]
ToolSchemas = Callable[[Row], list[dict[str, Any]]]
"""Row -> OpenAI schemas of the tools that its prompt shows. Raises ValueError for a row that cannot have its tools."""

_FORMAT = "1"
"""Version of the cache; changes when its content, or the rendering of prompts, does."""

CACHED_FROM = 5000
"""Fewest rows whose token ids are cached on disk; fewer are tokenized again as quickly."""


class TokenIds:
    """Many lists of token ids in one flat array.

    Args:
        flat: all ids, one list after the other; may be memory-mapped.
        lengths: of each list.
        starts: offset of each list in ``flat``; None: they are contiguous.
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
        """Concatenate several, each made by :meth:`of`."""
        if not parts:
            return cls.of([])
        return cls(np.concatenate([part.flat for part in parts]), np.concatenate([part.lengths for part in parts]))

    @classmethod
    def cached(cls, parts: Iterator[TokenIds], folder: str) -> TokenIds:
        """:meth:`join`, memory-mapped from a folder, which is written first if it does not exist."""

        def write(target: str) -> None:
            os.makedirs(target)
            lengths = []
            with open(os.path.join(target, "ids"), "wb") as file:
                for part in parts:
                    part.flat.astype(np.int32).tofile(file)
                    lengths.append(part.lengths)
            np.save(os.path.join(target, "lengths.npy"), np.concatenate(lengths))

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
        """Return the lists at these positions."""
        return TokenIds(self.flat, self.lengths[index], self.starts[index])


def cache_key(
    files: Sequence[str], rows: np.ndarray, tokenizer: Any, template_kwargs: Mapping[str, Any], column: str
) -> str | None:
    """Return a hash of everything token ids depend on, or None if they must not be cached.

    None for a tokenizer with custom code, a slow tokenizer, and a template that prints the date.

    Args:
        files: local files; their whole content is hashed.
        rows: numbers of the rows among all rows of the files.
        column: of the prompts.
    """
    import xxhash

    backend = getattr(tokenizer, "backend_tokenizer", None)
    template = json.dumps(tokenizer.chat_template, default=str)
    # the backend's JSON says all about a fast tokenizer of transformers alone
    if backend is None or not type(tokenizer).__module__.startswith("transformers.") or "strftime" in template:
        return None
    if not all(os.path.isfile(file) for file in files):
        return None
    parts = [_FORMAT, column, template, json.dumps(dict(template_kwargs), default=str, sort_keys=True)]
    parts += [backend.to_str(), type(tokenizer).__qualname__, str(tokenizer.special_tokens_map)]
    parts.append(xxhash.xxh3_128_hexdigest(np.ascontiguousarray(rows).data))
    for path in files:
        state = xxhash.xxh3_128()
        with open(path, "rb") as file:
            while piece := file.read(1 << 22):
                state.update(piece)
        parts.append(state.hexdigest())
    return hashlib.sha1("\0".join(parts).encode()).hexdigest()


@contextmanager
def no_tokenizer_threads() -> Iterator[None]:
    """Disable the tokenizer's thread pool: loader workers are forked later, and a forked pool would hang."""
    with unchanged_environment("TOKENIZERS_PARALLELISM"):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        yield


_BLOCK = 1000
"""Prompts tokenized at once while a whole file is tokenized."""


def blocks(count: int) -> Sequence[range]:
    """Ranges of at most a thousand numbers below ``count``."""
    return [range(first, min(first + _BLOCK, count)) for first in range(0, count, _BLOCK)]


_forked: Callable[[range], Any] | None = None
"""In a forked process: the function it was forked for."""


def for_blocks(function: Callable[[range], Any], count: int, workers: int) -> Iterator[Any]:
    """Yield ``function`` of each of the ``blocks`` of ``count`` rows, in order, computed in several processes."""
    parts = blocks(count)
    workers = min(workers, len(parts))
    if workers <= 1:
        yield from map(function, parts)
        return
    # fork shares the rows with the children: nothing is copied or pickled
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, fork, _adopt, (function,)) as pool:
        yield from pool.map(_run_block, parts)


def _adopt(function: Callable[[range], Any]) -> None:
    global _forked
    _forked = function


def _run_block(block: range) -> Any:
    assert _forked is not None
    return _forked(block)


class AllPrompts:
    """All prompts of a dataset: tokenized, measured, or checked.

    Args:
        rows: has ``len`` and ``[i] -> dict``.
        column: the only column that prompts are built from; None: any.
        text: (row, number) -> the rendered prompt; raises `DataError` where there is none.
        num_tokens: (row, number) -> number of its tokens, including those of images.
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
        """Return the token ids of every prompt; with a folder, cached there.

        Raises:
            OSError: the folder cannot be written.
        """
        if folder is not None:
            return TokenIds.cached(self._for_all("_tokenize_block"), folder)
        return TokenIds.join(list(self._for_all("_tokenize_block")))

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of every prompt, including those of images."""
        return np.concatenate([np.zeros(0, np.int64), *self._for_all("_measure_block")])

    def unrenderable(self) -> dict[int, str]:
        """Return number -> reason of each prompt that cannot be rendered."""
        found: dict[int, str] = {}
        for part in self._for_all("_unrenderable_block"):
            found |= part
        return found

    def longer_than(self, limit: int) -> list[tuple[int, int]]:
        """Return (number, tokens) of each text prompt that is longer than ``limit``.

        A token is at least one byte of text, so only prompts with more bytes are tokenized.
        """
        margin = 8  # the few special tokens a tokenizer without a chat template adds
        texts = ((i, text) for block in self._blocks() for i, text in zip(block, self._texts(block), strict=True))
        doubtful = [(i, text) for i, text in texts if len(text.encode()) > limit - margin]
        with no_tokenizer_threads():
            lengths = [len(ids) for ids in self.encode([text for _, text in doubtful])]
        return [(i, length) for (i, _), length in zip(doubtful, lengths, strict=True) if length > limit]

    def _for_all(self, method: str) -> Iterator[Any]:
        """Yield the result of a method for each block of rows, in order, computed in several processes."""
        results = for_blocks(getattr(self, method), len(self.rows), self.workers)
        pairs = zip(self._blocks(), results, strict=True)
        return (result for _, result in watched(pairs, "prompts read", len(self.rows), lambda pair: len(pair[0])))

    def _blocks(self) -> Sequence[range]:
        return blocks(len(self.rows))

    def _tokenize_block(self, block: range) -> TokenIds:
        with no_tokenizer_threads():
            return TokenIds.of(self.encode(self._texts(block)))

    def _measure_block(self, block: range) -> np.ndarray:
        with no_tokenizer_threads():
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
        """Return rows for rendering; only the prompt column is read if prompts depend on it alone."""
        if self.column is not None and isinstance(self.rows, RowTable):
            return self.rows.rows(block, [self.column])
        return [dict(self.rows[i]) for i in block]


# -- One prompt: rendered, tokenized, truncated, padded ----------------------------------------------------------------


def as_messages(prompt: Any, tokenizer: PreTrainedTokenizerBase, kinds: Sequence[str]) -> Prompt | None:
    """Return a prompt ready for the chat template: a text becomes a user message, unless there is no template.

    Args:
        kinds: ``image``, ``video``: kinds whose placeholders become separate parts.

    Returns:
        None if it is neither a text nor a non-empty list.
    """
    if isinstance(prompt, str):
        if not tokenizer.chat_template:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, (list, tuple, np.ndarray)) or not len(prompt):
        return None
    # Parquet gives every message of a column the same fields; unused ones are null.
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    return with_image_parts(messages, kinds) if kinds else messages


def render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, prompt_key: str, arguments: Mapping[str, Any]) -> str:
    """Apply the chat template to messages; a text is returned as it is.

    Args:
        prompt_key: the column of the prompts, for a message.
        arguments: further arguments of the template.

    Raises:
        DataError: the tokenizer has no template.
        jinja2.TemplateError: the template refuses the messages.
    """
    if isinstance(prompt, str):
        return prompt
    if not tokenizer.chat_template:
        raise DataError(
            f"data.prompt_key={prompt_key!r} holds chat messages and the tokenizer has no chat template "
            f"({tokenizer.name_or_path!r}). Use an instruct model, set "
            "actor_rollout_ref.model.custom_chat_template, or write plain text into the column."
        )
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **arguments)


def template_error(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, error: Exception) -> str:
    """Return the error text for messages that the chat template refuses."""
    roles = [str(message.get("role")) for message in prompt if isinstance(message, Mapping)]
    template = f"the chat template of {tokenizer.name_or_path!r}"
    return f"{template} refuses the messages with the roles {', '.join(roles)}: {error}"


def encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokenize texts. A chat template writes its own special tokens; for plain text the tokenizer adds them."""
    special = not tokenizer.chat_template
    return tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]


def encode_many(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """:func:`encode` for many texts, with the fast tokenizer backend directly if it gives the same ids."""
    if not texts:
        return []
    first = encode(texts[:1], tokenizer)  # also resets truncation and padding set by earlier calls
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast"):
        return first + (encode(texts[1:], tokenizer) if len(texts) > 1 else [])
    special = not tokenizer.chat_template
    # computes no offsets, which nothing reads
    ids = [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)]
    return ids if ids[0] == first[0] else encode(texts, tokenizer)


def message_texts(prompt: Prompt) -> str:
    """Join the contents of the messages of a prompt, without roles."""
    if isinstance(prompt, str):
        return prompt
    contents = (message.get("content") or "" for message in prompt)
    texts = (c if isinstance(c, str) else "".join(part.get("text") or "" for part in c) for c in contents)
    return "\n".join(texts)


def truncate(ids: list[int], max_length: int, side: str) -> list[int]:
    """Truncate token ids to ``max_length``: ``left`` keeps the end, ``right`` the start, ``middle`` half of each."""
    if len(ids) <= max_length:
        return ids
    if side == "left":
        return ids[-max_length:]
    if side == "right":
        return ids[:max_length]
    if side == "middle":
        # the end gets the odd token
        head = max_length // 2
        return ids[:head] + ids[len(ids) - (max_length - head) :]
    raise ValueError(f"data.truncation={side!r} is not supported; use 'error', 'left', 'right' or 'middle'.")


def truncate_prompt(
    prompt: EncodedPrompt, limit: int, truncation: str, shown: ImagePrompts | None, where: Callable[[], str]
) -> EncodedPrompt:
    """Truncate a prompt to ``limit`` tokens as ``data.truncation`` says; an image is never cut.

    Args:
        where: returns the location of the row, for a message.

    Raises:
        DataError: it is longer, and must not or cannot be truncated.
    """
    length = len(prompt.ids)
    if length <= limit:
        return prompt
    if truncation == "error":
        raise DataError(
            f"{where()}: the prompt has {length} tokens, more than data.max_prompt_length={limit}. Raise it, or set "
            "data.filter_overlong_prompts=True to leave such rows out, or data.truncation to left, right or middle to "
            "truncate them."
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
