"""Ends a response at a text: tokens become text as they come, and every new piece is searched for the stop texts.

A token may end inside a character, or change how the one before it reads; so a piece of text is taken only once it
stands, and the text of the response begins where that of the prompt ends. Knows a decoding function, no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verl.workers.rollout.base import Request

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens included."""

_CONTEXT = 6  # tokens before a piece that may change how it reads
_UNFINISHED = "\ufffd"  # what an incomplete character decodes to


class StopText:
    """One response, watched for stop texts.

    Args:
        decode: token ids -> text.
        stop: the texts; the response ends with the token that completes one of them.
        prompt_ids: what the response follows.
        min_tokens: texts completed within so many tokens do not count.
    """

    def __init__(self, decode: Decode, stop: Sequence[str], prompt_ids: Sequence[int], min_tokens: int = 0):
        self.decode = decode
        self.stop = tuple(stop)
        self.min_tokens = min_tokens
        self.num_tokens = 0
        self.tail = ""
        """The last characters, too few to hold a whole stop text."""
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._read = len(self._ids)  # tokens of _ids whose text was taken

    def ends_with(self, token: int) -> bool:
        """Take the next token; whether a stop text is complete now."""
        self._ids.append(token)
        self.num_tokens += 1
        new = self._new_text()
        text = self.tail + new
        # of a stop text at least one character must be new
        found = new and any(stop in text[max(0, len(self.tail) - len(stop) + 1) :] for stop in self.stop)
        longest = max(map(len, self.stop))
        self.tail = text[max(0, len(text) - longest + 1) :]
        return bool(found) and self.num_tokens > self.min_tokens

    def _new_text(self) -> str:
        before = self.decode(self._ids[: self._read]) if self._read else ""
        whole = self.decode(self._ids)
        if len(whole) <= len(before) or whole.endswith(_UNFINISHED):
            return ""
        self._ids = self._ids[-_CONTEXT:]
        self._read = len(self._ids)
        return whole[len(before) :]


def watch(request: Request, decode: Decode) -> StopText:
    """The watcher of a request with stop texts."""
    sampling = request.sampling
    return StopText(decode, sampling.stop, request.prompt_ids, sampling.extra.get("min_tokens") or 0)
