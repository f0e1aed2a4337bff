"""Which packed rows share a forward pass: as few passes as the limits allow, of about equal numbers of tokens.

Works on lengths, plain integers. Rows that begin with one prompt stay together where the limits let them, because
the prompt's tokens then run once.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from verl.utils.micro_batching import MicroBatching


class Prompts(NamedTuple):
    """Which rows begin with the same tokens."""

    numbers: Sequence[int]
    """Of each row, the number of its prompt; equal numbers mean equal prompts."""
    lengths: Sequence[int]
    """Tokens of each row's prompt."""

    def tokens_of(self, rows: Sequence[int], lengths: Sequence[int]) -> int:
        """Tokens that run if ``rows`` share a forward pass: each prompt's once, and everything behind the prompts."""
        prompts = {self.numbers[row]: self.lengths[row] for row in rows}
        return sum(prompts.values()) + sum(lengths[row] - self.lengths[row] for row in rows)


class _Piece(NamedTuple):
    """Rows that stay together, and the tokens that run for them."""

    tokens: int
    rows: list[int]


class _Limits(NamedTuple):
    tokens: float
    rows: float

    def allow(self, tokens: float, rows: int) -> bool:
        return tokens <= self.tokens and rows <= self.rows


def plan_packed(
    lengths: Sequence[int],
    split: MicroBatching,
    at_least: int = 1,
    best_tokens: int | None = None,
    prompts: Prompts | None = None,
) -> list[list[int]]:
    """Group packed rows into micro-batches, that of the most tokens first.

    As many micro-batches as best-fit decreasing needs (at most 11/9 of the fewest there can be), then evened out, so
    that memory is used equally and runs out at the start or not at all.

    Args:
        lengths: tokens of each row.
        split: ``max_tokens`` counts the tokens that run, ``size`` rows.
        at_least: split further until there are so many, as far as rows suffice.
        best_tokens: tokens beyond which a larger micro-batch is no faster; a row, or rows of one prompt, may have more.
        prompts: rows of one prompt run its tokens once per micro-batch; None: every row is on its own.

    Returns:
        Row numbers of each micro-batch; every row once.

    Raises:
        ValueError: if a single row is longer than ``split.max_tokens``.
    """
    if not lengths:
        return []
    check_row_fits(max(lengths), split)
    rows_at_most = split.size or math.inf
    pieces = list(_pieces(lengths, _Limits(split.max_tokens or math.inf, rows_at_most), prompts))
    _halve_until(pieces, at_least, lengths, prompts)
    limits = _Limits(min(split.max_tokens or math.inf, best_tokens or math.inf), rows_at_most)
    bins = _best_fit(pieces, limits)
    bins = _even(pieces, max(len(bins), at_least), limits) or _with_more_bins(bins, at_least)
    bins.sort(key=lambda held: -sum(piece.tokens for piece in held))
    return [[row for piece in held for row in piece.rows] for held in bins]


def check_row_fits(longest: int, split: MicroBatching) -> None:
    """Refuse a row that no micro-batch can hold."""
    if split.max_tokens is not None and longest > split.max_tokens:
        raise ValueError(
            f"a row of {longest} tokens does not fit a micro-batch of max_tokens={split.max_tokens}: "
            "raise the *_max_token_len_per_gpu of this pass to at least prompt plus response length"
        )


def _pieces(lengths: Sequence[int], limits: _Limits, prompts: Prompts | None) -> Iterator[_Piece]:
    """What stays together: the rows of a prompt, or as many of them as the limits take; else single rows."""
    if prompts is None:
        yield from (_Piece(length, [row]) for row, length in enumerate(lengths))
        return
    families: dict[int, list[int]] = {}
    for row, number in enumerate(prompts.numbers):
        families.setdefault(number, []).append(row)
    for rows in families.values():
        prompt = prompts.lengths[rows[0]]
        behind = [_Piece(lengths[row] - prompt, [row]) for row in rows]
        room = _Limits(limits.tokens - prompt, limits.rows)
        held_together = _best_fit(behind, room)
        for held in _even(behind, len(held_together), room) or held_together:
            yield _Piece(prompt + sum(piece.tokens for piece in held), [piece.rows[0] for piece in held])


def _halve_until(pieces: list[_Piece], count: int, lengths: Sequence[int], prompts: Prompts | None) -> None:
    """Split the largest piece of several rows until there are ``count`` pieces; changes its argument."""
    while len(pieces) < count:
        largest = max(range(len(pieces)), key=lambda i: (len(pieces[i].rows) > 1, pieces[i].tokens))
        rows = pieces[largest].rows
        if len(rows) == 1:
            return
        halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        pieces[largest : largest + 1] = [_Piece(prompts.tokens_of(half, lengths), half) for half in halves]


def _best_fit(pieces: Sequence[_Piece], limits: _Limits) -> list[list[_Piece]]:
    """Longest first, each to the fullest bin with room for it (Johnson 1973); one over the limit stands alone."""
    bins: list[list[_Piece]] = []
    rows: list[int] = []
    rooms: list[tuple[float, int]] = []  # of the bins that may take more, ascending
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        at = bisect_left(rooms, (piece.tokens, -1))
        while at < len(rooms) and rows[rooms[at][1]] + len(piece.rows) > limits.rows:
            at += 1
        if at < len(rooms):
            room, number = rooms.pop(at)
        else:
            room, number = limits.tokens, len(bins)
            bins.append([])
            rows.append(0)
        bins[number].append(piece)
        rows[number] += len(piece.rows)
        if room >= piece.tokens and rows[number] < limits.rows:
            insort(rooms, (room - piece.tokens, number))
    return bins


def _even(pieces: Sequence[_Piece], count: int, limits: _Limits) -> list[list[_Piece]] | None:
    """``count`` bins of about equal tokens: longest first, each to the lightest bin; None where a limit is in the way.

    With fewer pieces than ``count``, each has a bin.
    """
    bins: list[list[_Piece]] = [[] for _ in range(min(count, len(pieces)))]
    heap = [(0, 0, number) for number in range(len(bins))]
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        aside = []
        while heap and heap[0][1] and not limits.allow(heap[0][0] + piece.tokens, heap[0][1] + len(piece.rows)):
            aside.append(heapq.heappop(heap))
        if not heap:
            return None
        tokens, rows, number = heapq.heappop(heap)
        bins[number].append(piece)
        for entry in (*aside, (tokens + piece.tokens, rows + len(piece.rows), number)):
            if entry[1] < limits.rows:
                heapq.heappush(heap, entry)
    return bins


def _with_more_bins(bins: list[list[_Piece]], count: int) -> list[list[_Piece]]:
    """The bins, those of the most pieces halved until there are ``count``."""
    bins = list(bins)
    while len(bins) < count:
        fullest = max(range(len(bins)), key=lambda number: len(bins[number]))
        held = bins[fullest]
        if len(held) == 1:
            break
        bins[fullest : fullest + 1] = [held[::2], held[1::2]]
    return bins
