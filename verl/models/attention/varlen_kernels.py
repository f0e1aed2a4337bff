"""Variable-length attention of packed rows, by the fastest kernel available.

Half precision on CUDA: the flash-attn package where it is installed, else torch's ``varlen_attn``. Everything else goes
row by row through torch's dense attention, rows of similar length in one batch: the reference of the others. All give
the same numbers. Knows tensors of one layer.

Source: Dao 2023, FlashAttention-2 (arXiv:2307.08691).
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.models.attention.packing import Packing
from verl.models.attention.short_sequence import LONGEST, ShortSequenceAttention, causal_bias, causal_mask

logger = logging.getLogger(__name__)

ROUND_TO = 16
"""Short rows are padded to the next multiple of this, so that rows of similar length form one batch."""


class AttentionOptions(NamedTuple):
    """Scale, window, softcap and sinks of one layer's attention."""

    scale: float
    window: int | None = None
    """Keys a query attends to, its own included; None: all before it."""
    softcap: float | None = None
    """Scores x become ``softcap * tanh(x / softcap)``. Source: Gemma 2 (arXiv:2408.00118)."""
    sinks: Tensor | None = None
    """(H,): attention sink logit of each head. Source: Xiao et al. 2023 (arXiv:2309.17453)."""


Kernel = Callable[[Tensor, Tensor, Tensor, Packing, AttentionOptions], Tensor]
"""q (T, H, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv), keys in the order of ``packing`` -> (T, H, Dv)."""


def attend(q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: AttentionOptions) -> Tensor:
    """Attention of every segment to its own keys: q (T, H, D), k (T, Hkv, D), v (T, Hkv, Dv) -> (T, H, Dv)."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    if packing.kv_index is not None:
        k, v = k.index_select(0, packing.kv_index), v.index_select(0, packing.kv_index)
    return choose_kernel(q, v, options)(q, k, v, packing, options)


def choose_kernel(q: Tensor, v: Tensor, options: AttentionOptions) -> Kernel:
    """Return the fastest kernel that supports ``options``."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or max(q.shape[-1], v.shape[-1]) > 256:
        return attend_row_by_row
    if options.sinks is None and flash_attn_kernel() is not None:
        return flash_attn
    if options.sinks is None and options.softcap is None and _can_use_varlen(q.device, options.window):
        return torch_varlen
    _warn_slow_attention(options.sinks is not None, options.softcap is not None)
    return attend_row_by_row


@cache
def _warn_slow_attention(has_sinks: bool, has_softcap: bool) -> None:
    if has_sinks:
        reason = "the model uses attention sinks, which no variable-length kernel supports"
    elif has_softcap:
        reason = "the model's attention softcap needs the flash-attn package (pip install flash-attn)"
    else:
        reason = "this GPU or torch has no variable-length kernel: install flash-attn, or torch 2.11 or newer"
    logger.warning("attention of packed rows runs row by row with whole score matrices, which is slow: %s", reason)


# -- CUDA kernels -------------------------------------------------------------------------------------------------


@cache
def flash_attn_kernel() -> Callable | None:
    """``flash_attn_varlen_func``, or None where the package is missing or does not fit this torch.

    Tries the import itself: SGLang installs flash-attn-4, a namespace ``flash_attn`` without this function, and
    a wheel built for another torch fails with an undefined symbol.
    """
    try:
        from flash_attn import flash_attn_varlen_func
    except (ImportError, OSError) as error:
        if importlib.util.find_spec("flash_attn") is not None:
            logger.warning(
                "the installed flash_attn package has no usable flash_attn_varlen_func (%s), so torch's varlen_attn is "
                "used. Install a flash-attn 2 wheel built for torch %s, or remove the package.",
                str(error).splitlines()[0],
                torch.__version__,
            )
        return None
    return flash_attn_varlen_func


@cache
def _varlen() -> tuple[Callable, frozenset[str]] | None:
    """Return torch's kernel and the names of its arguments, which differ between releases."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _can_use_varlen(device: torch.device, window: int | None) -> bool:
    found = _varlen()
    if found is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return "window_size" in found[1] or ("is_causal" in found[1] and window is None)


def flash_attn(q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: AttentionOptions) -> Tensor:
    """Attention by the flash-attn package."""
    width = v.shape[-1]
    out = flash_attn_kernel()(
        *_pad_head_size(q, k, v),
        packing.cu_q,
        packing.cu_k,
        max(packing.q_lengths),
        max(packing.k_lengths),
        softmax_scale=options.scale,
        causal=True,
        window_size=_window(options),
        softcap=options.softcap or 0.0,
    )
    return out[..., :width]


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: AttentionOptions) -> Tensor:
    """Attention by ``torch.nn.attention.varlen``."""
    kernel, arguments = _varlen()
    width, heads = v.shape[-1], q.shape[1]
    q, k, v = _pad_head_size(q, k, v)
    kwargs: dict[str, Any] = {"scale": options.scale}
    if "window_size" in arguments:
        kwargs["window_size"] = _window(options)
    else:
        kwargs["is_causal"] = True
    if "enable_gqa" in arguments:
        kwargs["enable_gqa"] = heads != k.shape[1]
    else:
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    longest = max(packing.q_lengths), max(packing.k_lengths)
    return kernel(q, k, v, packing.cu_q, packing.cu_k, *longest, **kwargs)[..., :width]


def _window(options: AttentionOptions) -> tuple[int, int]:
    """Tokens to the left and right of a query that it attends to; -1: all."""
    return (-1 if options.window is None else options.window - 1, 0)


def _pad_head_size(*parts: Tensor) -> list[Tensor]:
    """Pad each head with zeros to one size, a multiple of 8, as the kernels require."""
    width = -(-max(part.shape[-1] for part in parts) // 8) * 8
    return [part if part.shape[-1] == width else F.pad(part, (0, width - part.shape[-1])) for part in parts]


# -- row by row ---------------------------------------------------------------------------------------------------


def attend_row_by_row(q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: AttentionOptions) -> Tensor:
    """torch's dense attention; rows of one shape form a batch."""
    blocks, queries, keys = _plan_blocks(packing.q_lengths, packing.k_lengths, q.device)
    q, k, v = queries.to_blocks(q), keys.to_blocks(k), keys.to_blocks(v)
    outputs, at, key_at = [], 0, 0
    for rows, length, key_length in blocks:
        part = q[at : at + rows * length].unflatten(0, (rows, length)).transpose(1, 2)
        visible = slice(key_at, key_at + rows * key_length)
        k_part, v_part = (x[visible].unflatten(0, (rows, key_length)).transpose(1, 2) for x in (k, v))
        outputs.append(_dense(part, k_part, v_part, options).transpose(1, 2).flatten(0, 1))
        at, key_at = at + rows * length, key_at + rows * key_length
    return queries.from_blocks(outputs[0] if len(outputs) == 1 else torch.cat(outputs))


def _dense(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """q (n, H, l, D), k (n, Hkv, m, D), v (n, Hkv, m, Dv) -> (n, H, l, Dv)."""
    length, keys = q.shape[2], k.shape[2]
    window = options.window if options.window is not None and options.window < keys else None
    if options.softcap is not None or options.sinks is not None:
        return _explicit_attention(q, k, v, options._replace(window=window))
    if not _is_cuda(q) and keys <= LONGEST:
        return ShortSequenceAttention.apply(q, k, v, options.scale, causal_bias(length, keys, window))
    is_plain = window is None and length == keys
    if not is_plain or q.shape[-1] != v.shape[-1] or _is_cuda(q):
        # torch's fast kernels take a mask, or heads that share keys, but not both. On CUDA the memory-efficient kernel,
        # which fp32 gets, takes no shared keys at all, and the fallback builds the whole matrix of scores
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if is_plain else causal_mask(length, keys, window, q.device),
        is_causal=is_plain and length > 1,
        scale=options.scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )


def _explicit_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """softmax(Q K^T) V with whole score matrices, for softcaps and sinks."""
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    scores = (q @ k.transpose(-1, -2)).float() * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    masked = ~causal_mask(q.shape[2], k.shape[2], options.window, q.device)
    scores = scores.masked_fill(masked, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)
        return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1].to(v.dtype) @ v
    return torch.softmax(scores, -1).to(v.dtype) @ v


def _is_cuda(q: Tensor) -> bool:
    return q.is_cuda


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


class _BlockLayout(NamedTuple):
    """Index maps between T packed tokens and blocks of equally long rows, padded with each row's last token."""

    tokens: Tensor | None
    """(C,): token of each slot; None: the identity."""
    slots: Tensor | None
    """(T,): slot of each token."""
    padding_slots: Tensor | None
    """Slots that repeat a token as padding."""

    def to_blocks(self, x: Tensor) -> Tensor:
        """(T, ...) to (C, ...); gradients of padding slots are dropped."""
        return x if self.tokens is None else _ToBlocks.apply(x, self)

    def from_blocks(self, x: Tensor) -> Tensor:
        """(C, ...) to (T, ...)."""
        return x if self.tokens is None else _FromBlocks.apply(x, self)


class _ToBlocks(torch.autograd.Function):
    # both ways are gathers: scattering a gradient is slow on CPU and in no fixed order on CUDA
    @staticmethod
    def forward(ctx, x, layout):
        ctx.layout = layout
        return x.index_select(0, layout.tokens)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, ctx.layout.slots), None


class _FromBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layout):
        ctx.layout = layout
        return x.index_select(0, layout.slots)

    @staticmethod
    def backward(ctx, grad):
        in_blocks = grad.index_select(0, ctx.layout.tokens)
        return in_blocks.index_fill_(0, ctx.layout.padding_slots, 0.0), None


@lru_cache(maxsize=16)
def _plan_blocks(
    q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], device: torch.device
) -> tuple[list[tuple[int, int, int]], _BlockLayout, _BlockLayout]:
    """Blocks of (rows, queries, keys) of equally shaped segments, and the layouts of queries and keys in them."""
    segments_by_shape: dict[tuple[int, int], list[int]] = {}
    for number, (queries, keys) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        shape = (queries, keys)
        if queries == keys <= LONGEST:
            # causal rows do not attend to padding behind them
            shape = (-(-queries // ROUND_TO) * ROUND_TO,) * 2
        segments_by_shape.setdefault(shape, []).append(number)
    blocks = [(len(segments), *shape) for shape, segments in segments_by_shape.items()]
    queries = _block_layout(q_lengths, [(segments, shape[0]) for shape, segments in segments_by_shape.items()], device)
    if q_lengths == k_lengths:
        return blocks, queries, queries
    return (
        blocks,
        queries,
        _block_layout(k_lengths, [(segments, shape[1]) for shape, segments in segments_by_shape.items()], device),
    )


def _block_layout(lengths: Sequence[int], blocks: list[tuple[list[int], int]], device: torch.device) -> _BlockLayout:
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    tokens, is_padding = [], []
    for segments, width in blocks:
        column, last = torch.arange(width), sizes[segments, None] - 1
        tokens.append((starts[segments, None] + torch.minimum(column, last)).flatten())
        is_padding.append((column > last).flatten())
    tokens, is_padding = torch.cat(tokens), torch.cat(is_padding)
    if torch.equal(tokens, torch.arange(int(sizes.sum()))):
        return _BlockLayout(None, None, None)
    real = (~is_padding).nonzero().flatten()
    slots = torch.empty_like(real)
    slots[tokens[real]] = real
    return _BlockLayout(tokens.to(device), slots.to(device), is_padding.nonzero().flatten().to(device))
