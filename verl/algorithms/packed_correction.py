"""The corrections of ``correction`` on packed tokens, for a loss that makes them anew in every micro-batch.

r = pi / pi_old of `Tokens`, where pi_old is the sampler. Results are constants.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.correction import DIVERGENCES, LEVELS
from verl.algorithms.objective import Tokens


@torch.no_grad()
def packed_ratio(tokens: Tokens, level: str) -> Tensor:
    """`importance_ratio` of each token, packed."""
    if level == "token":
        return tokens.ratio
    d = tokens.log_prob - tokens.old
    per_row = tokens.cells.row_sum(d) if level == "sequence" else tokens.row_mean(d)
    return tokens.to_tokens(per_row.clamp(-20, 20).exp())


@torch.no_grad()
def packed_divergence(tokens: Tokens, kind: str) -> Tensor:
    """`divergence` of each token, packed."""
    d, over = tokens.log_ratio, kind.rpartition("_")[0]
    value = 0.5 * d.square() if kind.endswith("k2") else torch.expm1(d) - d
    if over == "token":
        return value
    if over == "seq_max":
        return tokens.to_tokens(tokens.cells.row_max(value))
    return tokens.to_tokens(tokens.cells.row_sum(value) if over == "seq_sum" else tokens.row_mean(value))


@torch.no_grad()
def packed_weights(tokens: Tokens, level: str, upper: float, lower: float | None, mode: str) -> Tensor:
    """`importance_weights` of each token, packed; gaps hold anything."""
    ratio = packed_ratio(tokens, level)
    if mode == "mask":
        lower = 1 / upper if lower is None else lower
        return ratio * ((ratio >= lower) & (ratio <= upper))
    return ratio.clamp(min=lower, max=upper)


@torch.no_grad()
def packed_kept(tokens: Tokens, rejections: list[tuple[str, float, float | None]], veto: float | None) -> Tensor:
    """Which tokens all of ``rejections`` (kind, upper, lower) and the veto keep, packed bool; gaps hold anything."""
    keeps = torch.ones_like(tokens.ratio, dtype=torch.bool)
    for kind, upper, lower in rejections:
        if kind in LEVELS:
            ratio = packed_ratio(tokens, kind)
            keeps &= (ratio >= lower) & (ratio <= upper)
        else:
            assert kind in DIVERGENCES, kind
            keeps &= packed_divergence(tokens, kind) <= upper
    if veto is not None:
        is_low = ((tokens.log_prob - tokens.old).exp() < veto).to(tokens.ratio.dtype)  # a gap's ratio is 1
        keeps &= tokens.to_tokens(tokens.cells.row_max(is_low)) == 0
    return keeps
