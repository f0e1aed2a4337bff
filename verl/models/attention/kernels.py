"""Attention kernels: of packed rows, by the fastest variable-length kernel available, and of short padded rows on CPU.

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
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# -- Boundaries of rows packed into one sequence, and the keys each of them attends to -------------------------------


@dataclass(frozen=True)
class Packing:
    """S segments of queries in one sequence of T tokens, and the keys of each.

    Attention is causal and aligned at the end: the last query of a segment attends to all of its keys, the one before
    to all but the last, as in variable-length kernels.
    """

    cu_q: Tensor
    """(S + 1,) int32: start of each segment of queries; the last entry is T."""
    cu_k: Tensor
    """(S + 1,) int32: the same of the keys; ``cu_q`` itself where every segment attends to its own tokens only."""
    q_lengths: tuple[int, ...]
    """Tokens of each segment, in host memory."""
    k_lengths: tuple[int, ...]
    """Keys of each segment, in host memory."""
    kv_index: Tensor | None = None
    """(sum of ``k_lengths``,) int64: tokens of the sequence that the segments attend to, segment after segment;
    None: their own, in order."""

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> Packing:
        """Segments that attend to themselves only."""
        cu = _cumulative(lengths)
        return cls(cu, cu, tuple(lengths), tuple(lengths))

    @classmethod
    def with_shared_keys(cls, q_lengths: Sequence[int], keys: Sequence[Tensor]) -> Packing:
        """Segments that attend to the tokens in ``keys``, of which a segment's own come last."""
        k_lengths = tuple(len(index) for index in keys)
        return cls(_cumulative(q_lengths), _cumulative(k_lengths), tuple(q_lengths), k_lengths, torch.cat(list(keys)))

    @property
    def tokens(self) -> int:
        """T, the tokens of the sequence."""
        return sum(self.q_lengths)

    @property
    def tokens_saved(self) -> int:
        """Tokens that shared prompts save: keys attended to minus tokens run."""
        return sum(self.k_lengths) - sum(self.q_lengths)

    def to(self, device: torch.device | str) -> Packing:
        """Return a copy on another device."""
        cu_q = self.cu_q.to(device)
        cu_k = cu_q if self.cu_k is self.cu_q else self.cu_k.to(device)
        index = None if self.kv_index is None else self.kv_index.to(device)
        return Packing(cu_q, cu_k, self.q_lengths, self.k_lengths, index)

    def append_segment(self, length: int) -> Packing:
        """Append a segment of ``length`` tokens that attend to themselves only."""
        if self.kv_index is None:
            return Packing.of_lengths((*self.q_lengths, length)).to(self.cu_q.device)
        own = torch.arange(self.tokens, self.tokens + length, device=self.kv_index.device)
        keys = [*self.kv_index.split(list(self.k_lengths)), own]
        return Packing.with_shared_keys((*self.q_lengths, length), keys).to(self.cu_q.device)


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


# -- short rows on CPU, where torch's fused kernel is slow ------------------------------------------------------------
# At 74 tokens a row, forward and backward of one layer take a fifth of the fused kernel's time in bf16. Longer rows,
# masks and other devices go to torch's kernel.

NAME = "verl_short"
"""Value of the model's ``attn_implementation``."""

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
        # cast and made contiguous in one pass over memory
        q_wide = torch.empty(q.shape, dtype=torch.float32, device=q.device).copy_(q).view(groups, -1, size)
        k_wide = torch.empty(k.shape, dtype=torch.float32, device=k.device).copy_(k).view(groups, keys, size)
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
    if NAME not in AttentionInterface():  # compiled layers call another form of it
        AttentionInterface.register(NAME, short_sequence_attention_forward)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(NAME)
    return True


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
    # norms and rotary embeddings may leave queries and keys in fp32
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
    # latent attention (DeepSeek-V3) has narrower values than keys
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
    # softmax in fp32, as in models' own eager attention
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
        return x if self.tokens is None else _Gather.apply(x, self.tokens, self.slots, None)

    def from_blocks(self, x: Tensor) -> Tensor:
        """(C, ...) to (T, ...)."""
        return x if self.tokens is None else _Gather.apply(x, self.slots, self.tokens, self.padding_slots)


class _Gather(torch.autograd.Function):
    """x (n, ...) at ``index``; the gradient is gathered by ``inverse``, and zero at ``padding``.

    Both ways are gathers: scattering a gradient is slow on CPU and in no fixed order on CUDA.
    """

    @staticmethod
    def forward(ctx, x, index, inverse, padding):
        ctx.inverse, ctx.padding = inverse, padding
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.index_select(0, ctx.inverse)
        return grad if ctx.padding is None else grad.index_fill_(0, ctx.padding, 0.0), None, None, None


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
    q_blocks, k_blocks = ([(segments, shape[side]) for shape, segments in segments_by_shape.items()] for side in (0, 1))
    q_layout = _block_layout(q_lengths, q_blocks, device)
    return blocks, q_layout, q_layout if q_lengths == k_lengths else _block_layout(k_lengths, k_blocks, device)


def _block_layout(lengths: Sequence[int], blocks: list[tuple[list[int], int]], device: torch.device) -> _BlockLayout:
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    token_parts, padding_parts = [], []
    for segments, width in blocks:
        column, last = torch.arange(width), sizes[segments, None] - 1
        token_parts.append((starts[segments, None] + torch.minimum(column, last)).flatten())
        padding_parts.append((column > last).flatten())
    tokens, is_padding = torch.cat(token_parts), torch.cat(padding_parts)
    if torch.equal(tokens, torch.arange(int(sizes.sum()))):
        return _BlockLayout(None, None, None)
    real = (~is_padding).nonzero().flatten()
    slots = torch.empty_like(real)
    slots[tokens[real]] = real
    return _BlockLayout(tokens.to(device), slots.to(device), is_padding.nonzero().flatten().to(device))
