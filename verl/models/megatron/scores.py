"""Log-probabilities and entropy of a linear head whose vocabulary is split over tensor-parallel ranks.

Logits exist in chunks only, and no rank sees those of another one: three numbers a token are summed over the ranks.
megatron-core's own cross entropy has no entropy, and overwrites its input.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from verl.models.logits import NO_LOGIT, LogitTransform, chunk_sizes, raw_logits, scaled
from verl.models.token_outputs import chunked_log_probs


class VocabularyPart(NamedTuple):
    """Rows of the last layer's weight on this rank."""

    group: dist.ProcessGroup | None
    """Ranks with the other rows; None: there are none."""
    first: int
    """Token of the first row."""
    vocab_size: int
    """Tokens that exist; rows from this one on are padding."""


def split_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    part: VocabularyPart,
    temperature: float = 1.0,
    want_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and the entropy of its distribution; both (T,) fp32 and differentiable.

    Args:
        hidden: (T, H), equal on all ranks, and so is its gradient.
        weight: (V / tp, H), the rows of this rank.
        targets: (T,) int64 token ids of the whole vocabulary.
    """
    if part.group is None:
        weight = weight[: part.vocab_size]
        return chunked_log_probs(hidden, weight, targets, LogitTransform(temperature), want_entropy)
    log_probs, entropy = _SplitLogProbs.apply(hidden, weight, targets, part, temperature, want_entropy)
    return log_probs, entropy if want_entropy else None


def _logits(hidden: Tensor, weight: Tensor, part: VocabularyPart, temperature: float) -> Tensor:
    """fp32 logits of this rank's tokens over temperature; padding has no probability."""
    x, _ = scaled(raw_logits(hidden, weight), LogitTransform(temperature))
    real = max(0, part.vocab_size - part.first)
    if real < x.shape[1]:
        x[:, real:] = NO_LOGIT
    return x


class _SplitLogProbs(torch.autograd.Function):
    """hidden (T, H), weight (V / tp, H), targets (T,) -> log-probabilities and entropies (T,), fp32.

    dlogp_y/dx_j = [j = y] - p_j and dH/dx_j = -p_j (log p_j + H), for the tokens j of this rank.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, part, temperature, want_entropy):
        count = len(weight)
        chunk, _ = chunk_sizes(hidden, count)
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        normaliser, entropy = torch.empty_like(log_probs), torch.zeros_like(log_probs)
        for start in range(0, len(hidden), chunk):
            block = slice(start, start + chunk)
            x = _logits(hidden[block], weight, part, temperature)
            top = x.amax(-1)
            dist.all_reduce(top, dist.ReduceOp.MAX, group=part.group)
            x = x.sub_(top[:, None])
            index, is_here = _local_targets(targets[block], part.first, count)
            picked = x.gather(1, index[:, None]).squeeze(1) * is_here
            p = torch.exp(x)
            # relative to the largest logit: the entropy keeps its digits
            mean = (p * x).sum(-1) if want_entropy else torch.zeros_like(picked)
            sums = torch.stack([p.sum(-1), mean, picked])
            dist.all_reduce(sums, group=part.group)
            log_total = torch.log(sums[0])
            log_probs[block], normaliser[block] = sums[2] - log_total, log_total + top
            if want_entropy:
                entropy[block] = log_total - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.part, ctx.temperature, ctx.chunk = part, temperature, chunk
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        if grad is None and grad_entropy is None:
            return (None,) * 6
        grad = torch.zeros_like(grad_entropy) if grad is None else grad
        grad_hidden = torch.empty_like(hidden)
        # many bf16 parts would be rounded away one by one: sum them in fp32
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), ctx.chunk):
            block = slice(start, start + ctx.chunk)
            x = _logits(hidden[block], weight, ctx.part, ctx.temperature).sub_(normaliser[block, None])
            factor = grad[block, None]
            if grad_entropy is not None:
                factor = factor + grad_entropy[block, None] * (x + entropy[block, None])
            x = torch.exp(x).mul_(factor).neg_()
            index, is_here = _local_targets(targets[block], ctx.part.first, len(weight))
            x.scatter_add_(1, index[:, None], (grad[block] * is_here)[:, None])
            d_raw = x.div_(ctx.temperature).to(hidden.dtype)
            torch.mm(d_raw, weight, out=grad_hidden[block])
            grad_weight += d_raw.t() @ hidden[block]
        dist.all_reduce(grad_hidden, group=ctx.part.group)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _local_targets(targets: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Index of each target among this rank's tokens, and whether it is one of them."""
    index = targets - first
    return index.clamp(0, count - 1), (index >= 0) & (index < count)


class SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over ranks that each compute the same loss of it: the gradient of each is its own."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None
