"""Split rows of unequal length into parts of equal load: over ranks, and into micro-batches.

Works on lengths, plain integers; the driver balances 64 thousand rows over 512 ranks in a fraction of a second.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl.batch import MicroBatching

# -- Which packed rows share a forward pass: as few passes as the limits allow, of about equal numbers of tokens -----


class Prompts(NamedTuple):
    """Groups of rows that begin with the same prompt."""

    numbers: Sequence[int]
    """Of each row, the number of its prompt; equal numbers mean equal prompts."""
    lengths: Sequence[int]
    """Tokens of each row's prompt."""

    def tokens_of(self, rows: Sequence[int], lengths: Sequence[int]) -> int:
        """Tokens that run if ``rows`` share a forward pass: each prompt's once, and all tokens after the prompts."""
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
    if split.together > 1:
        pieces = [_unit(rows, lengths, prompts) for rows in _units(len(lengths), split.together)]
        check_row_fits(max(piece.tokens for piece in pieces), split, f" ({split.together} that stay together)")
    else:
        pieces = list(_pieces(lengths, _Limits(split.max_tokens or math.inf, rows_at_most), prompts))
        _halve_until(pieces, at_least, lengths, prompts)
    limits = _Limits(min(split.max_tokens or math.inf, best_tokens or math.inf), rows_at_most)
    bins = _best_fit(pieces, limits)
    bins = _even(pieces, max(len(bins), at_least), limits) or _with_more_bins(bins, at_least)
    bins.sort(key=lambda held: -sum(piece.tokens for piece in held))
    return [[row for piece in held for row in piece.rows] for held in bins]


def check_row_fits(longest: int, split: MicroBatching, rows: str = "") -> None:
    """Refuse a row, or ``rows`` that stay together, that no micro-batch can hold."""
    if split.max_tokens is not None and longest > split.max_tokens:
        raise ValueError(
            f"a row of {longest} tokens{rows} does not fit a micro-batch of max_tokens={split.max_tokens}: "
            "raise the *_max_token_len_per_gpu of this pass to at least prompt plus response length"
        )


def _pieces(lengths: Sequence[int], limits: _Limits, prompts: Prompts | None) -> Iterator[_Piece]:
    """Yield units that stay together: the rows of a prompt, or as many as the limits allow; else single rows."""
    if prompts is None:
        yield from (_Piece(length, [row]) for row, length in enumerate(lengths))
        return
    groups: dict[int, list[int]] = {}
    for row, number in enumerate(prompts.numbers):
        groups.setdefault(number, []).append(row)
    for rows in groups.values():
        prompt = prompts.lengths[rows[0]]
        behind = [_Piece(lengths[row] - prompt, [row]) for row in rows]
        room = _Limits(limits.tokens - prompt, limits.rows)
        held_together = _best_fit(behind, room)
        for held in _even(behind, len(held_together), room) or held_together:
            yield _Piece(prompt + sum(piece.tokens for piece in held), [piece.rows[0] for piece in held])


def _units(count: int, together: int) -> list[list[int]]:
    """Row numbers of ``count`` rows that stay ``together``."""
    return [list(range(first, min(first + together, count))) for first in range(0, count, together)]


def _unit(rows: list[int], lengths: Sequence[int], prompts: Prompts | None) -> _Piece:
    tokens = sum(lengths[row] for row in rows) if prompts is None else prompts.tokens_of(rows, lengths)
    return _Piece(tokens, rows)


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


def ceildiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(a // -b)


def roundup_divisible(a: int, b: int) -> int:
    """The smallest multiple of ``b`` that is not less than ``a``."""
    return ceildiv(a, b) * b


# -- over ranks ---------------------------------------------------------------------------------------------------
def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Divide rows into ``k_partitions`` sets whose sums of lengths differ little.

    Longest first, each row to the set with the least so far (Graham 1969). With ``equal_size`` rows are dealt in
    rounds of ``k_partitions``, the longest of a round to the least loaded set, and the heaviest and lightest sets then
    trade rows.

    Args:
        seqlen_list: length of each row.
        k_partitions: number of sets, at most the number of rows.
        equal_size: every set gets the same number of rows.

    Returns:
        The row numbers of each set, ascending.

    Raises:
        ValueError: if the rows do not suffice, or do not divide when ``equal_size``.
    """
    lengths = np.asarray(seqlen_list, dtype=np.int64)
    rows = len(lengths)
    if k_partitions < 1 or rows < k_partitions:
        raise ValueError(f"{rows} rows cannot fill {k_partitions} partitions: each needs at least one row")
    if equal_size and rows % k_partitions:
        raise ValueError(f"{rows} rows do not divide into {k_partitions} partitions of equal size: pad them first")
    return [sorted(part) for part in balanced_parts(lengths, k_partitions, equal_size)]


def balanced_parts(costs: np.ndarray, parts: int, equal_size: bool) -> list[list[int]]:
    """As `get_seqlen_balanced_partitions`, for any number of rows. In O(N log N).

    With fewer rows than parts some stay empty; ``equal_size`` where rows do not divide means as near as can be.

    Args:
        costs: (N,) int64, what each row adds to the load of its part.
    """
    if not equal_size:
        return _fill_lightest(costs, parts)
    missing = -len(costs) % parts
    dealt = _deal_rounds(np.append(costs, np.zeros(missing, dtype=np.int64)), parts)
    return [[row for row in part if row < len(costs)] for part in dealt]


def _fill_lightest(lengths: np.ndarray, parts: int) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in range(parts)]
    # the count breaks ties, so that rows of length zero spread too and no set stays empty
    heap = [(0, 0, part) for part in range(parts)]
    for row in np.argsort(-lengths, kind="stable").tolist():
        load, count, part = heap[0]
        result[part].append(row)
        heapq.heapreplace(heap, (load + int(lengths[row]), count + 1, part))
    return result


def _deal_rounds(lengths: np.ndarray, parts: int) -> list[list[int]]:
    order = np.argsort(-lengths, kind="stable").reshape(-1, parts)
    loads = np.zeros(parts, dtype=np.int64)
    dealt = np.empty_like(order)
    for number, rows in enumerate(order):
        to = np.argsort(loads, kind="stable")
        dealt[number, to] = rows
        loads[to] += lengths[rows]
    _trade_rows(lengths, dealt, loads)
    return [column.tolist() for column in dealt.T]


def _trade_rows(lengths: np.ndarray, dealt: np.ndarray, loads: np.ndarray) -> None:
    """Swap rows between the heaviest and the lightest set while that brings them nearer; changes its arguments."""
    for _ in range(4 * len(loads)):
        heavy, light = int(loads.argmax()), int(loads.argmin())
        gap = loads[heavy] - loads[light]
        if gap <= 1:
            return
        one, other = _best_trade(lengths[dealt[:, heavy]], lengths[dealt[:, light]], gap)
        gain = lengths[dealt[one, heavy]] - lengths[dealt[other, light]]
        if abs(2 * gain - gap) >= gap:
            return
        dealt[one, heavy], dealt[other, light] = dealt[other, light], dealt[one, heavy]
        loads[heavy] -= gain
        loads[light] += gain


def _best_trade(heavy: np.ndarray, light: np.ndarray, gap: int) -> tuple[int, int]:
    """Places of a row of each set whose difference is nearest to half the gap."""
    order = np.argsort(light, kind="stable")
    target = heavy - gap // 2
    above = np.searchsorted(light[order], target).clip(max=len(light) - 1)
    partners = np.stack([above, (above - 1).clip(min=0)])
    badness = np.abs(2 * (heavy - light[order[partners]]) - gap)
    side, one = divmod(int(badness.argmin()), len(heavy))
    return one, int(order[partners[side, one]])


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Tokens of a rank before and after balancing: ``{prefix}/{min,max,minmax_diff,balanced_min,balanced_max,mean}``.

    Before means split in the order given, as many rows a rank as ``partitions`` has on average.
    """
    lengths = np.asarray(seqlen_list, dtype=np.int64)
    before = [int(part.sum()) for part in np.array_split(lengths, len(partitions))]
    after = [int(lengths[list(part)].sum()) for part in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": float(lengths.sum() / len(partitions)),
    }


# -- into micro-batches -------------------------------------------------------------------------------------------
def plan_micro_batches(
    lengths: Sequence[int],
    split: MicroBatching,
    at_least: int = 1,
    best_tokens: int | None = None,
    packed: bool = False,
    prompts: Prompts | None = None,
) -> list[list[int]]:
    """Group rows into micro-batches, the longest first, so that memory runs out at the start or not at all.

    Padded rows of a micro-batch are as wide as the longest, so similar lengths waste least. Packed rows are
    concatenated, and ``plan_packed`` groups them.

    Args:
        lengths: valid tokens of each row.
        at_least: split further until there are so many, as far as rows suffice.
        best_tokens: tokens beyond which a larger micro-batch is no faster; a single row may be longer.
        packed: count real tokens; else rows times the longest of them.
        prompts: with ``packed``, which rows run their prompt once.

    Returns:
        Row numbers of each micro-batch; every row once.

    Raises:
        ValueError: if a single row is longer than ``split.max_tokens``.
    """
    if packed:
        return plan_packed(lengths, split, at_least, best_tokens, prompts)
    together = split.together
    units = _units(len(lengths), together)
    widths = [max(lengths[row] for row in unit) for unit in units]
    order = np.argsort(-np.asarray(widths, dtype=np.int64), kind="stable").tolist()
    groups: list[list[int]] = []
    start = 0
    while start < len(order):
        longest, left = widths[order[start]] * together, len(order) - start
        if split.max_tokens is None:
            count = max(1, split.size // together) if split.size else left
        else:
            check_row_fits(longest, split, "" if together == 1 else f" ({together} that stay together)")
            count = min(left, split.max_tokens // max(longest, 1))
        if best_tokens is not None:
            count = max(1, min(count, best_tokens // max(longest, 1)))
        groups.append(order[start : start + count])
        start += count
    while len(groups) < at_least:
        widest = max(range(len(groups)), key=lambda g: (len(groups[g]) > 1, len(groups[g]) * widths[groups[g][0]]))
        group = groups[widest]
        if len(group) == 1:
            break
        half = ceildiv(len(group), 2)
        groups[widest : widest + 1] = [group[:half], group[half:]]
    return [[row for unit in group for row in units[unit]] for group in groups]


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[Any], list[list[int]]]:
    """Split a padded batch into micro-batches of about equal numbers of valid tokens, each under ``max_token_len``.

    Args:
        batch: a TensorDict (or anything indexed by rows) with ``attention_mask`` (B, L).
        max_token_len: valid tokens in a micro-batch.
        dp_group: with ``same_micro_num_in_dp``, every rank of it makes the same number of micro-batches.
        num_batches_divided_by: make the number a multiple of this.
        min_num_micro_batch: make at least so many.
        use_dynamic_bsz_balance: those with most work first, counted as the square of lengths.

    Returns:
        The micro-batches, and the row numbers of each.
    """
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    if max(lengths) > max_token_len:
        raise ValueError(f"max_token_len={max_token_len} is less than the longest row, {max(lengths)} tokens: raise it")
    number = max(ceildiv(sum(lengths), max_token_len), min_num_micro_batch or 1)
    number = min(number, len(lengths))
    while True:
        parts = get_seqlen_balanced_partitions(lengths, number, equal_size=False)
        if max(sum(lengths[row] for row in part) for part in parts) <= max_token_len:
            break
        number += 1
    if dist.is_initialized() and same_micro_num_in_dp:
        agreed = torch.tensor([number], device="cpu" if dist.get_backend(dp_group) != "nccl" else "cuda")
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=dp_group)
        number = int(agreed)
    if num_batches_divided_by:
        number = roundup_divisible(number, num_batches_divided_by)
    if number > len(lengths):
        raise ValueError(f"{len(lengths)} rows cannot make {number} micro-batches: lower num_batches_divided_by")
    parts = get_seqlen_balanced_partitions(lengths, number, equal_size=False)
    if use_dynamic_bsz_balance:
        parts.sort(key=lambda part: -sum(lengths[row] ** 2 for row in part))
    return [batch[torch.tensor(part)] for part in parts], parts


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The inverse of a permutation: ``reverse[idx_map[i]] = i``."""
    reverse = [0] * len(idx_map)
    for place, row in enumerate(idx_map):
        reverse[row] = place
    return reverse


def inverse_permutation(order: Tensor) -> Tensor:
    """The inverse of a permutation as a tensor: what puts results back in their first order."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse
