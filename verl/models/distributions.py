"""Whole distributions of a linear head, in chunks: divergences between two models, and their likeliest tokens.

Knows hidden states and weights of last layers, not batches or losses; the log-probs of sampled tokens are in
`token_outputs`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from verl.models.logits import LogitTransform, chunk_sizes, raw_logits, scaled


@torch.no_grad()
def chunked_sum_pi_squared(hidden: Tensor, weight: Tensor, transform: LogitTransform = LogitTransform()) -> Tensor:  # noqa: B008
    """sum_v pi(v)^2 of softmax(logits) at each of the states ``hidden`` (T, H): (T,) fp32, by the same chunks."""
    squares = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    chunk, step = chunk_sizes(hidden, weight.shape[0])
    for start in range(0, hidden.shape[0], chunk):
        raw = raw_logits(hidden[start : start + chunk], weight)
        for at in range(0, len(raw), step):
            p = torch.softmax(scaled(raw[at : at + step], transform)[0], dim=-1)
            squares[start + at : start + at + len(p)] = torch.linalg.vecdot(p, p)
    return squares


def _log_softmax(raw: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor | float]:
    """Log-probabilities of all tokens, fp32, and the derivative of the logits by ``raw``."""
    x, derivative = scaled(raw, transform)
    return x.sub_(torch.logsumexp(x, -1, keepdim=True)), derivative


def _divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """The divergence of each row; ``log_p`` and ``log_q`` may be overwritten."""
    if beta == 1.0:
        ratio = log_q.neg_().add_(log_p)
        return log_p.exp_().mul_(ratio).sum(-1)
    if beta == 0.0:
        ratio = log_p.neg_().add_(log_q)
        return log_q.exp_().mul_(ratio).sum(-1)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    of_q = log_q.exp().mul_(log_q.sub_(log_m)).sum(-1)
    return of_q.mul_(beta).add_(log_p.exp().mul_(log_p.sub_(log_m)).sum(-1), alpha=1 - beta)


def _divergence_gradient(log_p: Tensor, log_q: Tensor, beta: float, value: Tensor) -> Tensor:
    """The gradient of ``value``, the divergence of each row, by the logits of p; the inputs may be overwritten."""
    if beta == 0.0:
        return log_p.exp_().sub_(log_q.exp_())
    if beta == 1.0:
        return log_q.neg_().add_(log_p).sub_(value[:, None]).mul_(log_p.exp_())
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    ratio, p = log_p - log_m, log_p.exp_()
    return ratio.sub_((p * ratio).sum(-1, keepdim=True)).mul_(p).mul_(1 - beta)


class _ChunkedDivergence(torch.autograd.Function):
    """hidden (T, H), weight (V, H), and those of a reference -> divergence of the two softmaxes (T,), fp32.

    With p of the policy, q of the reference and m = beta q + (1 - beta) p the generalised Jensen-Shannon divergence is
    beta KL(q || m) + (1 - beta) KL(p || m); over its factor it becomes KL(p || q) as beta goes to 1, and KL(q || p) as
    it goes to 0, which is what these two values of beta mean here. With g = log p - log q (beta = 1) or
    (1 - beta) (log p - log m) its gradient by logit j is p_j (g_j - sum_v p_v g_v), and p_j - q_j for beta = 0. The
    reference gets no gradient.
    """

    @staticmethod
    def forward(ctx, hidden, weight, ref_hidden, ref_weight, transform, ref_transform, beta):
        found = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for chunk, raw, ref_raw, step in _ChunkedDivergence._chunks(hidden, weight, ref_hidden, ref_weight):
            for at in range(0, len(raw), step):
                log_p, _ = _log_softmax(raw[at : at + step], transform)
                log_q, _ = _log_softmax(ref_raw[at : at + step], ref_transform)
                found[chunk][at : at + step] = _divergence(log_p, log_q, beta)
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, found)
        ctx.transform, ctx.ref_transform, ctx.beta = transform, ref_transform, beta
        return found

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, ref_hidden, ref_weight, found = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # many bf16 parts would be rounded away one by one: sum them in fp32
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for chunk, raw, ref_raw, step in _ChunkedDivergence._chunks(hidden, weight, ref_hidden, ref_weight):
            d_raw = raw if raw.dtype == hidden.dtype else torch.empty_like(raw, dtype=hidden.dtype)
            for at in range(0, len(raw), step):
                log_p, derivative = _log_softmax(raw[at : at + step], ctx.transform)
                log_q, _ = _log_softmax(ref_raw[at : at + step], ctx.ref_transform)
                d_logits = _divergence_gradient(log_p, log_q, ctx.beta, found[chunk][at : at + step])
                d_raw[at : at + step] = d_logits.mul_(grad[chunk][at : at + step, None]).mul_(derivative)
            if wants_hidden:
                torch.mm(d_raw, weight, out=grad_hidden[chunk])
            if wants_weight:
                grad_weight += d_raw.t() @ hidden[chunk]
        return grad_hidden, grad_weight.to(weight.dtype) if wants_weight else None, *(None,) * 5

    @staticmethod
    def _chunks(hidden, weight, ref_hidden, ref_weight):
        """Yield row slices, the raw logits of both models, and the rows of an element-wise pass."""
        rows, step = chunk_sizes(hidden, weight.shape[0], models=2)
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            yield chunk, raw_logits(hidden[chunk], weight), raw_logits(ref_hidden[chunk], ref_weight), step


def chunked_divergence(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    transform: LogitTransform = LogitTransform(),  # noqa: B008
    ref_transform: LogitTransform = LogitTransform(),  # noqa: B008
    beta: float = 1.0,
) -> Tensor:
    """Divergence of softmax(logits) from softmax(reference's logits) at each position, over the whole vocabulary.

    Equal to that of the whole logits, forward and backward, with logits in chunks only: with ``beta=1`` to
    ``verl.algorithms.kl.kl_full``.

    Args:
        hidden: (T, H), and ``weight`` (V, H) of the last linear layer.
        ref_hidden: (T, H'), and ``ref_weight`` (V, H'): the reference's, which gets no gradient; H' may differ.
        beta: 1: KL(policy || reference); 0: KL(reference || policy); between: the generalised Jensen-Shannon
            divergence (Agarwal et al. 2023, arXiv:2306.13649).

    Returns:
        (T,) fp32, differentiable in ``hidden`` and ``weight``.
    """
    ref_weight = ref_weight.detach()
    return _ChunkedDivergence.apply(
        hidden, weight, ref_hidden.detach().to(ref_weight.dtype), ref_weight, transform, ref_transform, beta
    )


# -- a few tokens of each distribution --------------------------------------------------------------------------------


class TopTokens(NamedTuple):
    """The likeliest tokens of each distribution that are wanted."""

    k: int
    vocab: int | None = None
    """Ids from this one on are not taken: another model's vocabulary ends there. None: all are."""

    def of(self, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """The largest log-probs of (T, V) in falling order, (T, k), and their ids, int32."""
        values, ids = log_p[:, : self.vocab].topk(self.k)
        return values, ids.int()


@torch.no_grad()
def chunked_top_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    top: TopTokens,
    transform: LogitTransform = LogitTransform(),  # noqa: B008
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of ``targets`` (T,), and those of the likeliest tokens (T, k) with their ids (T, k) int32.

    Args:
        hidden: (T, H), and ``weight`` (V, H) of the last linear layer.
    """
    rows = hidden.shape[0]
    log_probs = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    values = log_probs.new_empty(rows, top.k)
    ids = torch.empty(rows, top.k, dtype=torch.int32, device=hidden.device)
    chunk, step = chunk_sizes(hidden, weight.shape[0])
    for start in range(0, rows, chunk):
        raw = raw_logits(hidden[start : start + chunk], weight)
        for at in range(0, len(raw), step):
            log_p, _ = _log_softmax(raw[at : at + step], transform)
            block = slice(start + at, start + at + len(log_p))
            log_probs[block] = log_p.gather(1, targets[block, None]).squeeze(1)
            values[block], ids[block] = top.of(log_p)
    return log_probs, values, ids


class _ChunkedLogProbsOf(torch.autograd.Function):
    """hidden (T, H), weight (V, H), ids (T, k) -> log-probs (T, k), fp32; dlogp_i/dx_j = [j = i] - p_j."""

    @staticmethod
    def forward(ctx, hidden, weight, ids, transform):
        found = torch.empty(ids.shape, dtype=torch.float32, device=hidden.device)
        normaliser = found.new_empty(len(ids), 1)
        chunk, step = chunk_sizes(hidden, weight.shape[0])
        for start in range(0, len(ids), chunk):
            raw = raw_logits(hidden[start : start + chunk], weight)
            for at in range(0, len(raw), step):
                x, _ = scaled(raw[at : at + step], transform)
                block = slice(start + at, start + at + len(x))
                normaliser[block] = torch.logsumexp(x, -1, keepdim=True)
                found[block] = x.gather(1, ids[block]) - normaliser[block]
        ctx.save_for_backward(hidden, weight, ids, normaliser)
        ctx.transform = transform
        return found

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, ids, normaliser = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        chunk, step = chunk_sizes(hidden, weight.shape[0])
        for start in range(0, len(ids), chunk):
            rows = slice(start, start + chunk)
            raw = raw_logits(hidden[rows], weight)
            d_raw = raw if raw.dtype == hidden.dtype else torch.empty_like(raw, dtype=hidden.dtype)
            for at in range(0, len(raw), step):
                x, derivative = scaled(raw[at : at + step], ctx.transform)
                block = slice(start + at, start + at + len(x))
                p = x.sub_(normaliser[block]).exp_()
                d_x = p.mul_(-grad[block].sum(-1, keepdim=True)).scatter_add_(1, ids[block], grad[block])
                d_raw[at : at + step] = d_x.mul_(derivative)
            if wants_hidden:
                torch.mm(d_raw, weight, out=grad_hidden[rows])
            if wants_weight:
                grad_weight += d_raw.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype) if wants_weight else None, None, None


def chunked_log_probs_of(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    transform: LogitTransform = LogitTransform(),  # noqa: B008
) -> Tensor:
    """Log-probs of several tokens of each position, ``ids`` (T, k): (T, k) fp32, differentiable.

    Args:
        hidden: (T, H), and ``weight`` (V, H) of the last linear layer.
    """
    return _ChunkedLogProbsOf.apply(hidden, weight, ids.long(), transform)
