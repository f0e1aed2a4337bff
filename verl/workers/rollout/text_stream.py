"""Text of a response as its tokens come, cut at stop texts. Knows a decoding function, no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"  # what an incomplete character decodes to


class TextStream:
    """One response.

    Args:
        decode: token ids -> text.
        stop: texts at which the response ends; they are not part of it.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()):
        self.is_stopped = False
        self._decode, self._stop = decode, tuple(stop)
        self._ids: list[int] = []
        self._context = self._read = 0  # text of ids[:read] is taken; ids[context:read] tell how the next one reads
        self._pending = ""  # may be the begin of a stop text

    def add(self, token_ids: Sequence[int], is_last: bool = False) -> str:
        """Take further tokens; returns the text that is sure to stand. Nothing comes after a stop text."""
        if self.is_stopped:
            return ""
        self._ids += token_ids
        text = self._pending + self._new_text(is_last)
        ends = [found for stop in self._stop if (found := text.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            return text[: min(ends)]
        kept = 0 if is_last else self._begun(text)
        self._pending = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _new_text(self, is_last: bool) -> str:
        before = self._decode(self._ids[self._context : self._read])
        whole = self._decode(self._ids[self._context :])
        if whole.endswith(_UNFINISHED) and not is_last:
            return ""
        self._context, self._read = self._read, len(self._ids)
        return whole[len(before) :]

    def _begun(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop text."""
        return max(
            (size for stop in self._stop for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0
        )
