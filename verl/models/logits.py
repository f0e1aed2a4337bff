"""Logits of a linear head in chunks: the product, its scale and softcap, and the sizes of the chunks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK_BYTES = {"cpu": 320 << 20, "cuda": 512 << 20}
"""Size of the logits of one matrix product; large enough to run it at full speed. On CPU also those of a whole
micro-batch of 1024 tokens, for up to 160k tokens in the vocabulary in bf16 and 80k in fp32: the backward pass then
needs no product for them, and makes the gradient of the weight at once."""

_BLOCK_BYTES = 1 << 20
"""Size of the fp32 logits of one element-wise pass on CPU: a few of these stay in a core's own cache."""


class LogitTransform(NamedTuple):
    """Scale, softcap, temperature and excluded tokens between the last linear layer and the softmax.

    A raw output x becomes the logit ``scale * x``, or ``softcap * tanh(scale * x / softcap)`` where there is a cap
    (Gemma 2, arXiv:2408.00118), and is divided by ``temperature``. ``excluded_tokens`` get no probability.
    """

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float = 0.0
    excluded_tokens: tuple[int, ...] = ()


NO_LOGIT = -1e30
"""Its exp is 0; finite, so that it times a probability of 0 is 0."""


def scaled(raw: Tensor, transform: LogitTransform, out: Tensor | None = None) -> tuple[Tensor, Tensor | float]:
    """fp32 logits over temperature, and their derivative by ``raw``.

    Args:
        out: memory that the logits may be written to, fp32 in the shape of ``raw``.
    """
    # scaled in place below: fp32 input is copied, since the caller may keep it for the backward pass
    x = raw.to(torch.float32, copy=True) if out is None else out.copy_(raw)
    derivative: Tensor | float = transform.scale / transform.temperature
    if transform.softcap:
        x = torch.tanh(x.mul_(transform.scale / transform.softcap))
        derivative = (1 - x * x).mul_(derivative)
        x = x * (transform.softcap / transform.temperature)
    elif derivative != 1.0:
        x = x.mul_(derivative)
    for token in transform.excluded_tokens:
        x[:, token] = NO_LOGIT
    return x, derivative


def raw_logits(hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """hidden (t, H) times weight (V, H) transposed; in the fp32 of its sums where the device supports that.

    Args:
        out: (at least t, V) of their dtype; its first rows are written to.
    """
    if out is not None:
        return torch.mm(hidden, weight.t(), out=out[: len(hidden)])
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16) and torch.version.hip is None:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden @ weight.t()


def chunk_sizes(hidden: Tensor, vocab: int, models: int = 1) -> tuple[int, int]:
    """Rows of one matrix product, where so many ``models`` have theirs at a time, and of one element-wise pass."""
    size = 4 if hidden.is_cuda else hidden.element_size()
    rows = _CHUNK_BYTES["cuda" if hidden.is_cuda else "cpu"] // (size * vocab * models)
    rows = max(64, rows // 64 * 64)
    return rows, rows if hidden.is_cuda else min(rows, max(4, _BLOCK_BYTES // (4 * vocab)))
