"""Random numbers of seeded requests, generated for all rows at once.

vLLM keeps a generator for each seeded request and samples row by row. Here the noise of a token depends on its
request's seed, its position in the sequence and its index in the vocabulary, and on nothing else: by the Gumbel-max
trick (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030), argmax(logits + noise) is a sample of the softmax. What the
batch holds besides, in which order, and whether a row was preempted, makes no difference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def draw_seeded_rows_at_once(runner: Any) -> bool:
    """Have vLLM's sampler draw the rows of seeded requests in one operation; returns whether this release allows it.

    Where it does not, vLLM samples row by row, with the same seeds.

    Args:
        runner: vLLM's model runner.
    """
    batch = getattr(runner, "input_batch", None)
    sampler = getattr(getattr(runner, "sampler", None), "topk_topp_sampler", None)
    try:
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
    except ImportError:
        apply_top_k_top_p = None
    has_all = hasattr(batch, "num_tokens_no_spec") and hasattr(sampler, "logprobs_mode")
    if apply_top_k_top_p is None or not has_all or getattr(sampler, "use_fp64_gumbel", False):
        logger.debug("the installed vLLM samples seeded requests row by row: its sampler is not the one known here")
        return False
    row_by_row: Callable[..., Any] = sampler.forward

    def forward(
        logits: Tensor, generators: Mapping[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        # the input batch has other rows, and may have moved on: warm-up, and drafts of speculative decoding
        if not generators or len(logits) != runner.input_batch.num_reqs:
            return row_by_row(logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        returned = None
        if sampler.logprobs_mode == "processed_logits":
            returned = logits
        elif sampler.logprobs_mode == "processed_logprobs":
            returned = logits.log_softmax(dim=-1, dtype=torch.float32)
        positions = runner.input_batch.num_tokens_no_spec[: len(logits)]
        return gumbel_argmax(logits.float(), row_seeds(generators, positions)), returned

    sampler.forward = forward
    return True


def row_seeds(generators: Mapping[int, torch.Generator], positions: np.ndarray) -> Tensor:
    """(n,) int64 below 2^62: one number for the seed and the position of each row; rows without a seed are zeros.

    Args:
        generators: row -> generator, of which only the seed is read.
        positions: (n,) tokens of each row so far.
    """
    seeds = np.zeros(len(positions), dtype=np.uint64)
    for row, generator in generators.items():
        seeds[row] = generator.initial_seed() & 0xFFFFFFFFFFFFFFFF
    mixed = _mixed64(_mixed64(seeds) ^ (positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)))
    return torch.from_numpy((mixed >> np.uint64(2)).astype(np.int64))


def _mixed64(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele et al. 2014), which no two numbers share."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gumbel_argmax(logits: Tensor, seeds: Tensor) -> Tensor:
    """Sample each row's softmax: argmax(logits + noise), (n,) int64, the noise by (row's seed, index).

    Args:
        logits: (n, V) fp32; -inf is never sampled.
        seeds: (n,) int64 in [0, 2^62), on the host.
    """
    if logits.device.type == "cpu" and hasattr(torch.ops._C, "fused_gumbel_argmax"):  # vLLM's own kernel
        return torch.ops._C.fused_gumbel_argmax(logits.contiguous(), seeds)
    halves = torch.stack([seeds & 0x7FFFFFFF, seeds >> 31]).to(logits.device, torch.int32)
    return argmax_with_noise(logits, halves[0], halves[1])


def argmax_with_noise(logits: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """``gumbel_argmax`` in torch, from the lower and upper half of each row's seed, (n,) int32."""
    index = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32)
    bits = _mix32(_mix32(index ^ low[:, None]).add_(high[:, None]))
    # 31 bits and half a step: small numbers keep their digits, and of the noise it is the small ones that decide
    uniform = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    # -log of exponential noise is Gumbel's
    return (logits - uniform.neg_().log1p_().neg_().log_()).argmax(-1)


def _mix32(x: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 (Appleby 2008) on int32, whose products wrap around; in place."""
    x ^= (x >> 16) & 0xFFFF
    x *= -2048144789
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387
    x ^= (x >> 16) & 0xFFFF
    return x
