"""A trial at the start: rows packed together must score as each of them alone.

A model could mix positions anywhere, and no list of families knows all of them. Two short rows cost little.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from verl.models.packing import Packing
from verl.models.varlen_kernels import Scoring
from verl.workers.engine.micro_batch import MicroBatch

LENGTHS = (13, 20)
PROMPT = 6
"""Tokens that both rows begin with."""
TOLERANCE = {torch.float32: 1e-3}
"""Median difference over the spread of the scores; a model whose rows see each other is far beyond."""
COARSE = 0.1
"""The same for half precision."""


def alone(config: Any, never: tuple[int, ...]) -> MicroBatch:
    """Random rows side by side."""
    rows = _rows(config, never)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    cells = torch.cat([number * ids.shape[1] + torch.arange(len(row) - 1) for number, row in enumerate(rows)])
    return _micro_batch(rows, ids, None, cells, None)


def packed(config: Any, never: tuple[int, ...], share_prompts: bool) -> MicroBatch:
    """The same rows one behind another; with ``share_prompts`` the second leaves its prompt to the first."""
    rows, length = _rows(config, never), LENGTHS[0]
    ids, positions = torch.cat(rows), torch.cat([torch.arange(len(row)) for row in rows])
    cells = torch.cat([torch.arange(length - 1), torch.arange(length, len(ids) - 1)])
    if not share_prompts:
        return _micro_batch(rows, ids[None], positions[None], cells, Packing.of_lengths(LENGTHS))
    runs = torch.cat([torch.arange(length), torch.arange(length + PROMPT, len(ids))])
    place = torch.cat([torch.arange(length), torch.arange(PROMPT), torch.arange(length, len(runs))])
    packing = Packing.sharing((length, LENGTHS[1] - PROMPT), place.split(LENGTHS))
    return _micro_batch(rows, ids[runs][None], positions[runs][None], place[cells], packing)


def _rows(config: Any, never: tuple[int, ...]) -> list[Tensor]:
    vocab = config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(0)
    usable = torch.tensor([token for token in range(vocab // 4, vocab)[:4096] if token not in never])
    first, second = (usable[torch.randint(len(usable), (length,), generator=draw)] for length in LENGTHS)
    return [first, torch.cat([first[:PROMPT], second[PROMPT:]])]


def _micro_batch(
    rows: list[Tensor], ids: Tensor, positions: Tensor | None, cells: Tensor, packing: Packing | None
) -> MicroBatch:
    targets = torch.cat([row[1:] for row in rows])
    shape = len(rows), max(LENGTHS) - 1
    return MicroBatch(ids, positions, cells, targets, torch.arange(len(targets)), shape, {}, packing=packing)


def check_same(expected: Tensor, found: Tensor, dtype: torch.dtype, name: str) -> None:
    """Compare scores of rows alone and packed, (t,) each.

    Raises:
        ValueError: they differ by more than rounding in some row.
    """
    spread = expected.float().std().clamp_min(1e-6)
    rows = ((found - expected).abs().float() / spread).split([length - 1 for length in LENGTHS])
    worst = max(float(row.median()) for row in rows)
    if not worst <= TOLERANCE.get(dtype, COARSE):
        raise ValueError(
            f"model.use_remove_padding=true: {name} does not score rows packed together as it scores each alone (they "
            f"differ by {worst:.1e} of the scores' spread): some layer mixes tokens of different rows. Set "
            "model.use_remove_padding=false."
        )


def check_asked(config: Any, asked: list[Scoring], name: str) -> None:
    """Layers must ask for the windows and caps that the config speaks of: short rows would not show a missing one.

    Raises:
        ValueError: they do not.
    """
    text = config.get_text_config()
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    cuts = bool(window) and window < (getattr(text, "max_position_embeddings", None) or math.inf)
    has_windows = cuts and getattr(text, "use_sliding_window", True) and (not kinds or "sliding_attention" in kinds)
    has_caps = bool(getattr(text, "attn_logit_softcapping", None))
    lost = "sliding_window" if has_windows and not any(a.window for a in asked) else None
    lost = "attn_logit_softcapping" if has_caps and not any(a.softcap for a in asked) else lost
    if lost or not asked:
        what = f"its {lost}={getattr(text, lost)}" if lost else "its rows' lengths"
        raise ValueError(
            f"model.use_remove_padding=true: {name} does not hand {what} to its attention function, so that packed "
            "rows would see what they must not. Set model.use_remove_padding=false."
        )
