"""Causal attention for short rows on CPU, where torch's fused kernel is slow: registered with transformers by name.

At 74 tokens a row, forward and backward of one layer take a fifth of the fused kernel's time in bf16. Longer rows,
masks and other devices go to torch's kernel. Knows tensors of one layer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

NAME = "verl_short"
"""What the model's ``attn_implementation`` is set to."""

LONGEST = 160
"""Longest row whose score matrix is materialised; beyond, its size costs more than it saves."""


class ShortSequenceAttention(torch.autograd.Function):
    """q (b, H, l, D), k (b, Hkv, m, D), v (b, Hkv, m, Dv), mask (l, m) -> (b, H, l, Dv); scores and softmax in fp32.

    ``mask`` is added to the scores: -inf where a query must not attend. Queries that share a key head are stacked, so
    that keys are not repeated.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale, mask):
        batch, heads, length, size = q.shape
        groups, keys = batch * k.shape[1], k.shape[2]
        q_wide = _contiguous_fp32(q).view(groups, -1, size)
        k_wide = _contiguous_fp32(k).view(groups, keys, size)
        v = v.contiguous().view(groups, keys, -1)
        scores = torch.bmm(q_wide, k_wide.transpose(1, 2)).mul_(scale)
        scores.view(groups, -1, length, keys).add_(mask)
        p = torch.softmax(scores, -1).to(v.dtype)
        ctx.save_for_backward(q_wide, k_wide, v, p)
        ctx.scale = scale
        ctx.shapes = q.shape, k.shape
        ctx.dtype = q.dtype
        return torch.bmm(p, v).view(batch, heads, length, -1)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, p = ctx.saved_tensors
        q_shape, k_shape = ctx.shapes
        grad = grad.contiguous().view(p.shape[0], p.shape[1], -1)
        grad_v = torch.bmm(p.transpose(1, 2), grad).view(*k_shape[:3], -1)
        grad_p = torch.bmm(grad, v.transpose(1, 2)).float()
        p = p.float()
        # d softmax: p * (dp - sum_j p_j dp_j)
        inner = torch.bmm(p.view(-1, 1, p.shape[2]), grad_p.view(-1, p.shape[2], 1)).view(*p.shape[:2], 1)
        grad_scores = grad_p.sub_(inner).mul_(p).mul_(ctx.scale).to(ctx.dtype)
        grad_q = torch.bmm(grad_scores, k.to(ctx.dtype)).view(q_shape)
        grad_k = torch.bmm(grad_scores.transpose(1, 2), q.to(ctx.dtype)).view(k_shape)
        return grad_q, grad_k, grad_v, None, None


def _contiguous_fp32(x: Tensor) -> Tensor:
    """Cast and make contiguous in one pass over memory."""
    return torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x)


def causal_mask(queries: int, keys: int, window: int | None = None, device: torch.device | None = None) -> Tensor:
    """(queries, keys) booleans: causal, aligned at the end; with ``window``, the last ``window`` keys only."""
    ahead = torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device)[:, None]
    visible = ahead <= 0
    return visible if window is None else visible & (ahead > -window)


@lru_cache(maxsize=32)
def causal_bias(queries: int, keys: int, window: int | None = None) -> Tensor:
    """``causal_mask`` as a bias that is added to scores: 0 or -inf."""
    return torch.zeros(queries, keys).masked_fill_(~causal_mask(queries, keys, window), float("-inf"))


def short_sequence_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, as transformers calls it; returns (b, l, H, Dv)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_short = query.device.type == "cpu" and query.shape[2] == key.shape[2] <= LONGEST
    if not is_short or not causal or attention_mask is not None or dropout or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mask = causal_bias(query.shape[2], key.shape[2])
    return ShortSequenceAttention.apply(query, key, value, scale, mask).transpose(1, 2).contiguous(), None


def use_short_sequence_attention(model: Any) -> bool:
    """Switch ``model`` to this attention where it would use torch's fused one; returns whether it did."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if model.config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(NAME, short_sequence_attention_forward)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(NAME)
    return True
