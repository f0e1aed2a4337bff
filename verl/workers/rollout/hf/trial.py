"""Cache check before the first request: tokens generated one by one must get the probabilities of a forward pass over
the whole row.

A model may keep its state elsewhere than in the cache it is handed, or leave the padding of shorter prompts in it; no
list of families says which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PROMPTS = (3, 8)
"""Tokens of a short prompt and of a longer one."""
STEPS = 2
OWNER = (0, 0, 1)
"""The prompt of each row: two of them share one, and the response too."""
TOLERANCE = {torch.float32: 1e-2}
"""Median difference of logits over their spread; a model that forgets its prompt is far beyond."""
COARSE = 0.1
"""The same for half precision."""

Forward = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def make_rows(config: Any, excluded: Sequence[int]) -> list[Tensor]:
    """Random rows, prompt and response: (PROMPTS[OWNER[i]] + STEPS,) each."""
    vocab = config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    usable = torch.tensor([token for token in range(vocab // 4, vocab)[:4096] if token not in set(excluded)])
    prompts = [usable[torch.randint(len(usable), (length,), generator=generator)] for length in PROMPTS]
    responses = [usable[torch.randint(len(usable), (STEPS,), generator=generator)] for _ in prompts]
    return [torch.cat([prompts[o], responses[o]]) for o in OWNER]


def whole_row_logits(model: Any, row: Tensor) -> Tensor:
    """Logits of a row alone after its prompt and each later token, (STEPS + 1, V)."""
    return model(input_ids=row[None], use_cache=False).logits[0, -STEPS - 1 :].float()


def decode_logits(rows: Sequence[Tensor], logits: Tensor, cache: Any, forward: Forward) -> list[Tensor]:
    """The same for rows generated together, one of which ends early: its last logits are missing.

    Args:
        logits: (rows, V) after the prompts, which are in ``cache``, right-aligned.
    """
    device, width = logits.device, max(PROMPTS)
    lengths = torch.tensor([PROMPTS[o] for o in OWNER], device=device)
    tokens = torch.stack([row[-STEPS:] for row in rows]).to(device)
    live, decoded = list(range(len(rows))), [[logits[i]] for i in range(len(rows))]
    for step in range(STEPS):
        if step == 1:
            live.pop(1)
            cache.reorder_cache(torch.tensor(live, device=device))
        mask = torch.arange(width + step + 1, device=device) >= (width - lengths[live])[:, None]
        logits = forward(tokens[live, step][:, None], mask, (lengths[live] + step)[:, None], cache)
        for i, row in zip(live, logits, strict=True):
            decoded[i].append(row)
    return [torch.stack(row).float() for row in decoded]


def logit_difference(expected: Sequence[Tensor], decoded: Sequence[Tensor]) -> float:
    """The largest difference of a row: the median over its tokens of the mean difference, over the logits' spread."""
    differences = []
    for one, other in zip(expected, decoded, strict=True):
        one = one[: len(other)]
        off = (one - other).abs().mean(-1) / one.std(-1).clamp_min(1e-6)
        differences.append(float(off.nan_to_num(torch.inf).median()))
    return max(differences)


def tolerance(dtype: torch.dtype) -> float:
    """The largest difference that rounding explains."""
    return TOLERANCE.get(dtype, COARSE)
