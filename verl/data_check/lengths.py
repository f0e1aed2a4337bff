"""How long prompts are, in tokens: of all of them, or of an even spread and of those that may be too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.data_check.prompts import PromptReader
from verl.utils.dataset.table import DataError, RowTable

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
    refused: list[tuple[int, str]]
    """Positions of prompts that the chat template refuses, and why."""


def measure(
    table: RowTable,
    config: Mapping[str, Any],
    reader: PromptReader | None,
    positions: Sequence[int],
    sizes: np.ndarray,
    wanted: int | None,
) -> Lengths:
    """Lengths of the prompts at ``positions``.

    Args:
        config: the ``data`` section.
        reader: None: their ``sizes`` are taken instead.
        sizes: bytes of each prompt's text, in the order of ``positions``.
        wanted: prompts to count, evenly spread, and how many that may be too long beside these; None: all.
    """
    limit = config["max_prompt_length"]
    if reader is None:
        return _summary("bytes", sizes, sizes, 0, True, [])
    count = len(positions)
    chosen = np.arange(count) if wanted is None or count <= wanted else np.arange(wanted) * count // wanted
    lengths, overhead, refused = _encode(
        table, config["prompt_key"], reader, [positions[i] for i in chosen], sizes[chosen]
    )
    is_chosen = np.zeros(count, bool)
    is_chosen[chosen] = True
    # A token is at least one byte of text, so only prompts of more bytes than tokens allowed can be too long.
    doubtful = np.flatnonzero(~is_chosen & (sizes + overhead > limit))
    doubtful = doubtful[np.argsort(-sizes[doubtful], kind="stable")]
    looked_at = doubtful if wanted is None else doubtful[:wanted]
    more, _, refused_more = _encode(
        table, config["prompt_key"], reader, [positions[i] for i in looked_at], sizes[looked_at]
    )
    overlong = int((lengths > limit).sum() + (more > limit).sum())
    is_exact = len(looked_at) == len(doubtful)
    return _summary("tokens", lengths, np.concatenate([lengths, more]), overlong, is_exact, refused + refused_more)


def _encode(
    table: RowTable, key: str, reader: PromptReader, positions: Sequence[int], sizes: np.ndarray
) -> tuple[np.ndarray, int, list[tuple[int, str]]]:
    """Tokens of each prompt, the most bytes a template adds, and the prompts it refuses (counted as empty)."""
    lengths = np.zeros(len(positions), np.int64)
    overhead, refused = 0, []
    for begin in range(0, len(positions), _BLOCK):
        part = positions[begin : begin + _BLOCK]
        texts = []
        for number, (position, prompt) in enumerate(zip(part, table.select(part).column(key), strict=True)):
            try:
                text = reader.text(prompt)
            except DataError as error:
                refused.append((position, str(error)))
                text = ""
            overhead = max(overhead, len(text.encode()) - int(sizes[begin + number]))
            texts.append(text)
        lengths[begin : begin + len(part)] = [len(ids) for ids in reader.encode(texts)]
    return lengths, overhead, refused


def _summary(
    unit: str, lengths: np.ndarray, all_lengths: np.ndarray, overlong: int, is_exact: bool, refused: list
) -> Lengths:
    edges = _edges(int(lengths.min()), int(lengths.max()))
    counts, _ = np.histogram(lengths, edges)
    return Lengths(
        unit,
        len(lengths),
        int(lengths.min()),
        float(np.median(lengths)),
        float(lengths.mean()),
        float(np.percentile(lengths, 95)),
        int(all_lengths.max()),
        [(int(a), int(b), int(n)) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)],
        overlong,
        is_exact,
        refused,
    )


def _edges(low: int, high: int, bins: int = 12) -> np.ndarray:
    """At most about ``bins`` round edges around lengths from ``low`` to ``high``."""
    width = max(1, -(-(high - low + 1) // bins))
    scale = 10 ** (len(str(width)) - 1)
    width = next(step * scale for step in (1, 2, 5, 10) if step * scale >= width)
    return np.arange(low // width * width, high + width + 1, width)
