"""How long prompts are, in tokens: of all of them, or of an even spread and of those that may be too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl.data_check.rendering import Prompts
from verl.utils.dataset.table import DataError

_BLOCK = 1000
"""Prompts read and encoded at a time."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts, in tokens, or in bytes where there is no tokenizer."""

    unit: str
    counted: int
    """Prompts the statistics are of."""
    shortest: int
    median: float
    mean: float
    p95: float
    longest: int
    """Of all that were looked at, those that may be too long included."""
    histogram: list[tuple[int, int, int]]
    """(from, to, prompts): a length lies in ``[from, to)``."""
    overlong: int
    """Prompts over ``data.max_prompt_length``."""
    is_overlong_exact: bool
    """Whether every prompt that may be too long was counted."""


def measure(
    prompts: Prompts, limit: int, positions: Sequence[int], sizes: np.ndarray, wanted: int | None
) -> tuple[Lengths | None, list[tuple[int, str]]]:
    """Lengths of the prompts at ``positions``; then positions of those that the chat template refuses, and why.

    Args:
        limit: ``data.max_prompt_length``.
        sizes: bytes of each prompt's text, in the order of ``positions``.
        wanted: prompts to count, evenly spread, and how many that may be too long beside these; None: all.
    """
    count = len(positions)
    chosen = np.arange(count) if wanted is None or count <= wanted else np.arange(wanted) * count // wanted
    lengths, overhead, refused = _count(prompts, [positions[i] for i in chosen], sizes[chosen])
    is_doubtful = np.ones(count, bool)
    is_doubtful[chosen] = False
    if not prompts.keys:
        # A token is at least one byte of text, so only prompts of more bytes than tokens allowed can be too long.
        is_doubtful &= sizes + overhead > limit
    doubtful = np.flatnonzero(is_doubtful)
    doubtful = doubtful[np.argsort(-sizes[doubtful], kind="stable")]
    looked_at = doubtful if wanted is None else doubtful[:wanted]
    more, _, refused_more = _count(prompts, [positions[i] for i in looked_at], sizes[looked_at])
    refused += refused_more
    if not len(lengths):
        return None, refused
    overlong = int((lengths > limit).sum() + (more > limit).sum())
    is_exact = len(looked_at) == len(doubtful)
    return _summary("tokens", lengths, int(max(lengths.max(), more.max(initial=0))), overlong, is_exact), refused


def in_bytes(sizes: np.ndarray) -> Lengths:
    """Lengths where there is no tokenizer."""
    return _summary("bytes", sizes, int(sizes.max()), 0, True)


def _count(
    prompts: Prompts, positions: Sequence[int], sizes: np.ndarray
) -> tuple[np.ndarray, int, list[tuple[int, str]]]:
    """Tokens of the prompts that can be rendered, the most bytes a template adds to one, and the others with why."""
    lengths: list[int] = []
    overhead, refused = 0, []
    for begin in range(0, len(positions), _BLOCK):
        part = positions[begin : begin + _BLOCK]
        texts = prompts.texts(part)
        refused += [(place, str(text)) for place, text in zip(part, texts, strict=True) if isinstance(text, DataError)]
        good = [i for i, text in enumerate(texts) if isinstance(text, str)]
        overhead = max([overhead, *(len(texts[i].encode()) - int(sizes[begin + i]) for i in good)])
        lengths += prompts.lengths([part[i] for i in good], [texts[i] for i in good])
    return np.array(lengths, np.int64), overhead, refused


def _summary(unit: str, lengths: np.ndarray, longest: int, overlong: int, is_exact: bool) -> Lengths:
    edges = _edges(int(lengths.min()), int(lengths.max()))
    counts, _ = np.histogram(lengths, edges)
    return Lengths(
        unit,
        len(lengths),
        int(lengths.min()),
        float(np.median(lengths)),
        float(lengths.mean()),
        float(np.percentile(lengths, 95)),
        longest,
        [(int(a), int(b), int(n)) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)],
        overlong,
        is_exact,
    )


def _edges(low: int, high: int, bins: int = 12) -> np.ndarray:
    """At most about ``bins`` round edges around lengths from ``low`` to ``high``."""
    width = max(1, -(-(high - low + 1) // bins))
    scale = 10 ** (len(str(width)) - 1)
    width = next(step * scale for step in (1, 2, 5, 10) if step * scale >= width)
    return np.arange(low // width * width, high + width + 1, width)
