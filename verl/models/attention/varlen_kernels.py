"""Attention of rows that lie one behind another in one sequence, by the fastest kernel at hand.

Half precision on CUDA: the flash-attn package where it is installed, else torch's ``varlen_attn``. Everything else goes
row by row through torch's dense attention, rows of like length together: the oracle of the others. All give the same
numbers. Knows tensors of one layer.

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
from verl.models.attention.short import LONGEST, ShortAttention, seen_keys, short_mask

logger = logging.getLogger(__name__)

ROUND_TO = 16
"""Short rows of like length are laid side by side, as long as the next multiple of this."""


class Scoring(NamedTuple):
    """How a layer turns products of queries and keys into weights."""

    scale: float
    window: int | None = None
    """Keys a query sees, itself counted; None: all before it."""
    softcap: float | None = None
    """Scores x become ``softcap * tanh(x / softcap)``. Source: Gemma 2 (arXiv:2408.00118)."""
    sinks: Tensor | None = None
    """(H,): a score of each head that takes weight and gives no value. Source: Xiao et al. 2023 (arXiv:2309.17453)."""


Kernel = Callable[[Tensor, Tensor, Tensor, Packing, Scoring], Tensor]
"""q (T, H, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv), keys as ``packing`` has them -> (T, H, Dv)."""


def attend(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scoring: Scoring) -> Tensor:
    """Attention of every segment to its own keys: q (T, H, D), k (T, Hkv, D), v (T, Hkv, Dv) -> (T, H, Dv)."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    if packing.kv_index is not None:
        k, v = k.index_select(0, packing.kv_index), v.index_select(0, packing.kv_index)
    return choose_kernel(q, v, scoring)(q, k, v, packing, scoring)


def choose_kernel(q: Tensor, v: Tensor, scoring: Scoring) -> Kernel:
    """The fastest kernel that computes what is asked for."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or max(q.shape[-1], v.shape[-1]) > 256:
        return by_rows
    if scoring.sinks is None and flash_attn_kernel() is not None:
        return flash_attn
    if scoring.sinks is None and scoring.softcap is None and _can_use_varlen(q.device, scoring.window):
        return torch_varlen
    _say_slow(scoring.sinks is not None, scoring.softcap is not None)
    return by_rows


@cache
def _say_slow(has_sinks: bool, has_softcap: bool) -> None:
    if has_sinks:
        what = "the model's attention sinks, which no kernel for packed rows takes"
    elif has_softcap:
        what = "the model's attention softcap, which needs the flash-attn package (pip install flash-attn)"
    else:
        what = "this GPU or torch, which have no kernel for packed rows: install flash-attn, or torch 2.11 or newer"
    logger.warning("attention runs row by row with whole matrices of scores, slowly, because of %s", what)


# -- CUDA kernels -------------------------------------------------------------------------------------------------


@cache
def flash_attn_kernel() -> Callable | None:
    """``flash_attn_varlen_func``, or None where the package is missing or does not fit this torch.

    The import itself is tried: SGLang brings flash-attn-4, a namespace ``flash_attn`` without this function, and
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
    """torch's kernel and the names of its arguments, which grew from release to release."""
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


def flash_attn(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scoring: Scoring) -> Tensor:
    """The flash-attn package."""
    width = v.shape[-1]
    out = flash_attn_kernel()(
        *_equally_wide(q, k, v),
        packing.cu_q,
        packing.cu_k,
        max(packing.q_lengths),
        max(packing.k_lengths),
        softmax_scale=scoring.scale,
        causal=True,
        window_size=_window(scoring),
        softcap=scoring.softcap or 0.0,
    )
    return out[..., :width]


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scoring: Scoring) -> Tensor:
    """torch's own kernel."""
    kernel, arguments = _varlen()
    width, heads = v.shape[-1], q.shape[1]
    q, k, v = _equally_wide(q, k, v)
    options: dict[str, Any] = {"scale": scoring.scale}
    if "window_size" in arguments:
        options["window_size"] = _window(scoring)
    else:
        options["is_causal"] = True
    if "enable_gqa" in arguments:
        options["enable_gqa"] = heads != k.shape[1]
    else:
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    longest = max(packing.q_lengths), max(packing.k_lengths)
    return kernel(q, k, v, packing.cu_q, packing.cu_k, *longest, **options)[..., :width]


def _window(scoring: Scoring) -> tuple[int, int]:
    """Tokens to the left and right of a query that it sees beside itself; -1: all."""
    return (-1 if scoring.window is None else scoring.window - 1, 0)


def _equally_wide(*parts: Tensor) -> list[Tensor]:
    """Zeros behind each head, so that all are equally wide and a multiple of 8: what the kernels take."""
    width = -(-max(part.shape[-1] for part in parts) // 8) * 8
    return [part if part.shape[-1] == width else F.pad(part, (0, width - part.shape[-1])) for part in parts]


# -- row by row ---------------------------------------------------------------------------------------------------


def by_rows(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scoring: Scoring) -> Tensor:
    """torch's dense attention; rows of like shape go together."""
    blocks, queries, keys = _arrange(packing.q_lengths, packing.k_lengths, q.device)
    q, k, v = queries.lay(q), keys.lay(k), keys.lay(v)
    outputs, at, key_at = [], 0, 0
    for rows, length, key_length in blocks:
        part = q[at : at + rows * length].unflatten(0, (rows, length)).transpose(1, 2)
        seen = slice(key_at, key_at + rows * key_length)
        k_part, v_part = (x[seen].unflatten(0, (rows, key_length)).transpose(1, 2) for x in (k, v))
        outputs.append(_dense(part, k_part, v_part, scoring).transpose(1, 2).flatten(0, 1))
        at, key_at = at + rows * length, key_at + rows * key_length
    return queries.take(outputs[0] if len(outputs) == 1 else torch.cat(outputs))


def _dense(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """q (n, H, l, D), k (n, Hkv, m, D), v (n, Hkv, m, Dv) -> (n, H, l, Dv)."""
    length, keys = q.shape[2], k.shape[2]
    window = scoring.window if scoring.window is not None and scoring.window < keys else None
    if scoring.softcap is not None or scoring.sinks is not None:
        return _whole_scores(q, k, v, scoring._replace(window=window))
    if not _is_cuda(q) and keys <= LONGEST:
        return ShortAttention.apply(q, k, v, scoring.scale, short_mask(length, keys, window))
    is_plain = window is None and length == keys
    if not is_plain or q.shape[-1] != v.shape[-1] or _is_cuda(q):
        # torch's fast kernels take a mask, or heads that share keys, but not both. On CUDA the memory-efficient kernel,
        # which fp32 gets, takes no shared keys at all, and the fallback builds the whole matrix of scores
        k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if is_plain else seen_keys(length, keys, window, q.device),
        is_causal=is_plain and length > 1,
        scale=scoring.scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )


def _whole_scores(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """The formula itself, for what torch's kernels do not know."""
    k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    scores = (q @ k.transpose(-1, -2)).float() * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    unseen = ~seen_keys(q.shape[2], k.shape[2], scoring.window, q.device)
    scores = scores.masked_fill(unseen, float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.float().view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)
        return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1].to(v.dtype) @ v
    return torch.softmax(scores, -1).to(v.dtype) @ v


def _is_cuda(q: Tensor) -> bool:
    return q.is_cuda


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


class _Cells(NamedTuple):
    """Tokens laid out in blocks of rows of one length; a row's last token fills what it lacks."""

    tokens: Tensor | None
    """(C,): which token stands in each cell; None: token c in cell c."""
    cells: Tensor | None
    """(T,): the cell of each token."""
    fillers: Tensor | None
    """Cells that hold a token a second time: nobody looks at them."""

    def lay(self, x: Tensor) -> Tensor:
        """(T, ...) to (C, ...); what fillers get of the gradient is dropped."""
        return x if self.tokens is None else _Lay.apply(x, self)

    def take(self, x: Tensor) -> Tensor:
        """(C, ...) back to (T, ...)."""
        return x if self.tokens is None else _Take.apply(x, self)


class _Lay(torch.autograd.Function):
    # both ways are gathers: scattering a gradient is slow on CPU and in no fixed order on CUDA
    @staticmethod
    def forward(ctx, x, cells):
        ctx.cells = cells
        return x.index_select(0, cells.tokens)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, ctx.cells.cells), None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cells):
        ctx.cells = cells
        return x.index_select(0, cells.cells)

    @staticmethod
    def backward(ctx, grad):
        laid = grad.index_select(0, ctx.cells.tokens)
        return laid.index_fill_(0, ctx.cells.fillers, 0.0), None


@lru_cache(maxsize=16)
def _arrange(
    q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], device: torch.device
) -> tuple[list[tuple[int, int, int]], _Cells, _Cells]:
    """Blocks of (rows, queries, keys) of like segments, and where the tokens of queries and of keys stand in them."""
    alike: dict[tuple[int, int], list[int]] = {}
    for number, (queries, keys) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        shape = (queries, keys)
        if queries == keys <= LONGEST:
            # causal rows do not see what is laid behind them
            shape = (-(-queries // ROUND_TO) * ROUND_TO,) * 2
        alike.setdefault(shape, []).append(number)
    blocks = [(len(segments), *shape) for shape, segments in alike.items()]
    queries = _lay_out(q_lengths, [(segments, shape[0]) for shape, segments in alike.items()], device)
    if q_lengths == k_lengths:
        return blocks, queries, queries
    return blocks, queries, _lay_out(k_lengths, [(segments, shape[1]) for shape, segments in alike.items()], device)


def _lay_out(lengths: Sequence[int], blocks: list[tuple[list[int], int]], device: torch.device) -> _Cells:
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    tokens, is_filler = [], []
    for segments, width in blocks:
        column, last = torch.arange(width), sizes[segments, None] - 1
        tokens.append((starts[segments, None] + torch.minimum(column, last)).flatten())
        is_filler.append((column > last).flatten())
    tokens, is_filler = torch.cat(tokens), torch.cat(is_filler)
    if torch.equal(tokens, torch.arange(int(sizes.sum()))):
        return _Cells(None, None, None)
    real = (~is_filler).nonzero().flatten()
    cells = torch.empty_like(real)
    cells[tokens[real]] = real
    return _Cells(tokens.to(device), cells.to(device), is_filler.nonzero().flatten().to(device))
