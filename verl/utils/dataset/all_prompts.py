"""All prompts of a data set at once: tokenized, measured, or searched for those no run can use; in several processes.

Knows rows by number; what a row's prompt is, and how it is rendered, is the data set's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from verl.utils.dataset.table import DataError, RowTable
from verl.utils.dataset.token_ids import TokenIds, for_all_blocks, one_thread_per_process

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
