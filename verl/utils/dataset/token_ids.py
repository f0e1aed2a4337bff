"""Token ids of all prompts of a data set: in one flat array, made in several processes, kept on disk.

A tokenizer's work on a large file is done once: what it gave is found again by the content of the files, the
tokenizer, the chat template and its arguments. Limits have no part in it.
"""

import hashlib
import json
import logging
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from typing import Any

import numpy as np

from verl.utils.fs import written_once

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
    def of(cls, ids: Sequence[Sequence[int]]) -> "TokenIds":
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        flat = np.fromiter(chain.from_iterable(ids), dtype=np.int32, count=int(lengths.sum()))
        return cls(flat, lengths)

    @classmethod
    def join(cls, parts: Sequence["TokenIds"]) -> "TokenIds":
        """The lists of several, each as it came from :meth:`of`."""
        if not parts:
            return cls.of([])
        return cls(np.concatenate([part.flat for part in parts]), np.concatenate([part.lengths for part in parts]))

    @classmethod
    def kept(cls, parts: Iterator["TokenIds"], folder: str) -> "TokenIds":
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

    def select(self, index: np.ndarray) -> "TokenIds":
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
