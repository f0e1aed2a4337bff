"""Log-probability, entropy, divergence from a reference, and value of each token, computed from hidden states.

The (T, V) logits are never in memory as a whole: they are computed and freed in chunks, forward and backward. Knows
modules and tensors, not batches or losses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verl.models.distributions import (
    TopTokens,
    chunked_divergence,
    chunked_log_probs_of,
    chunked_sum_pi_squared,
    chunked_top_log_probs,
)
from verl.models.heads import OutputHead, score_layer
from verl.models.logits import NO_LOGIT, LogitTransform, chunk_sizes, raw_logits, scaled
from verl.models.multimodal import is_vision_language
from verl.utils.torch_functional import add_to_wider

logger = logging.getLogger(__name__)


def _score_block(
    raw: Tensor, targets: Tensor, transform: LogitTransform, want_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of ``targets``, log of the normaliser, and entropy (or zeros) of each row of raw logits."""
    x, _ = scaled(raw, transform)
    top = x.amax(-1, keepdim=True)
    x = x.sub_(top)
    target_logits = x.gather(1, targets[:, None]).squeeze(1)
    if want_entropy:
        p = torch.exp(x)
        total = p.sum(-1)
        mean = (p * x).sum(-1) / total  # no matrix product, which users may let run in TF32
    else:
        total = x.exp_().sum(-1)
        mean = torch.zeros_like(total)
    log_total = torch.log(total)
    entropy = log_total - mean if want_entropy else mean
    return target_logits - log_total, log_total + top.squeeze(1), entropy


def _grad_block(
    raw: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    entropy: Tensor | None,
    grad: Tensor,
    grad_entropy: Tensor | None,
    transform: LogitTransform,
) -> Tensor:
    """Gradient by raw logits: dlogp_y/dx_j = [j = y] - p_j and dH/dx_j = -p_j (log p_j + H)."""
    x, derivative = scaled(raw, transform)
    x = x.sub_(normaliser[:, None])
    if grad_entropy is None:
        x = x.exp_().mul_(-grad[:, None])
    else:
        coefficient = (x + entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad[:, None])
        x = x.exp_().mul_(coefficient).neg_()
    x = x.scatter_add_(1, targets[:, None], grad[:, None])
    return x if isinstance(derivative, float) and derivative == 1.0 else x.mul_(derivative)


class _CPUBlocks:
    """``_score_block`` and ``_grad_block`` in two buffers of (rows, V), which stay in the CPU's cache.

    Allocating memory for every operation costs more there than the operations.
    """

    def __init__(self, rows: int, vocab: int) -> None:
        self._first, self._second = torch.empty(2, rows, vocab)

    def _logits(self, raw: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor | float]:
        """``scaled``, in the first buffer if not ``raw`` itself: read only."""
        if raw.dtype == torch.float32 and transform == LogitTransform():
            return raw, 1.0
        return scaled(raw, transform, out=self._first[: len(raw)])

    def score(
        self, raw: Tensor, targets: Tensor, transform: LogitTransform, want_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        first, second = self._first[: len(raw)], self._second[: len(raw)]
        x, _ = self._logits(raw, transform)
        target_logits = x.gather(1, targets[:, None]).squeeze(1)
        # the same with entropy and without, since old log-probs are scored with it and an update may do without: their
        # ratio is exactly 1. The exp within both functions takes half the time of torch.exp
        log_p = torch.log_softmax(x, -1, out=second)
        log_probs = log_p.gather(1, targets[:, None]).squeeze(1)
        entropy = torch.zeros_like(log_probs)
        if want_entropy:
            entropy = torch.softmax(log_p, -1, out=first).mul_(log_p).sum(-1).neg_()
        return log_probs, target_logits - log_probs, entropy

    def grad(
        self,
        raw: Tensor,
        targets: Tensor,
        normaliser: Tensor,
        entropy: Tensor,
        grad: Tensor,
        grad_entropy: Tensor | None,
        transform: LogitTransform,
        out: Tensor,
    ) -> None:
        """Write the gradient to ``out`` (t, V), which may be ``raw``."""
        first, second = self._first[: len(raw)], self._second[: len(raw)]
        x, derivative = self._logits(raw, transform)
        p, factor = torch.softmax(x, -1, out=second), -grad[:, None]
        if grad_entropy is not None:
            log_p = torch.sub(x, normaliser[:, None], out=first)
            factor = log_p.mul_(-grad_entropy[:, None]).sub_((grad + grad_entropy * entropy)[:, None])
        by_x = torch.mul(p, factor, out=out if out.dtype == p.dtype else p)
        by_x.scatter_add_(1, targets[:, None], grad[:, None])
        if not (isinstance(derivative, float) and derivative == 1.0):
            by_x.mul_(derivative)
        if by_x is not out:
            out.copy_(by_x)


class _CompiledOrEager:
    """A function on blocks, compiled at its first call; eager where torch.compile fails."""

    def __init__(self, plain: Callable) -> None:
        self._plain = plain
        self._function = torch.compile(plain, dynamic=True)

    def __call__(self, *args: Any) -> Any:
        try:
            return self._function(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # no C compiler, no Triton, ...: each has its own type
            if self._function is self._plain:
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            logger.warning("torch.compile does not work here, so the eager functions are used: %s", reason)
            self._function = self._plain
            return self._plain(*args)


@lru_cache(maxsize=1)
def _compiled_blocks() -> tuple[Callable, Callable]:
    return _CompiledOrEager(_score_block), _CompiledOrEager(_grad_block)


def _triton_score(
    raw: Tensor, targets: Tensor, transform: LogitTransform, want_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``_score_block`` by liger's kernel, which computes log-probabilities only."""
    from verl.models.liger import target_log_probs

    log_probs = target_log_probs(scaled(raw, transform)[0], targets)
    nothing = torch.zeros_like(log_probs)
    return log_probs, nothing, nothing


def _triton_grad(
    raw: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    entropy: Tensor | None,
    grad: Tensor,
    grad_entropy: Tensor | None,
    transform: LogitTransform,
) -> Tensor:
    """``_grad_block`` by liger's kernel."""
    from verl.models.liger import target_log_probs_gradient

    x, derivative = scaled(raw, transform)
    return target_log_probs_gradient(x, targets, grad).mul_(derivative)


# -- the chunked head ---------------------------------------------------------------------------------------------


class _ChunkedLogProb(torch.autograd.Function):
    """hidden (T, H), weight (V, H), targets (T,) -> log-probabilities and entropies (T,), fp32."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, transform, want_entropy, blocks):
        rows, vocab = hidden.shape[0], weight.shape[0]
        chunk, step = chunk_sizes(hidden, vocab)
        score = _CPUBlocks(min(step, rows), vocab).score if blocks is None else blocks[0]
        buffer = hidden.new_empty(min(chunk, rows), vocab) if blocks is None else None
        log_probs = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        normaliser, entropy = torch.empty_like(log_probs), torch.empty_like(log_probs)
        raw = None
        for start in range(0, rows, chunk):
            raw = raw_logits(hidden[start : start + chunk], weight, buffer)
            for at in range(0, len(raw), step):
                block = slice(start + at, start + min(at + step, len(raw)))
                log_probs[block], normaliser[block], entropy[block] = score(
                    raw[at : at + step], targets[block], transform, want_entropy
                )
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.transform, ctx.blocks, ctx.sizes = transform, blocks, (chunk, step)
        # with a single chunk, kept logits save the backward pass one product of four, in memory it needs anyway
        ctx.raw = raw if rows <= chunk and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]) else None
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        if grad is None and grad_entropy is None:
            return (None,) * 6
        if grad is None:
            grad = torch.zeros_like(grad_entropy)
        rows, vocab, (chunk, step) = hidden.shape[0], weight.shape[0], ctx.sizes
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = None
        saved_logits, ctx.raw = ctx.raw, None
        on_cpu = _CPUBlocks(min(step, rows), vocab) if ctx.blocks is None else None
        buffer = hidden.new_empty(min(chunk, rows), vocab) if on_cpu is not None and saved_logits is None else None
        for start in range(0, rows, chunk):
            h = hidden[start : start + chunk]
            raw = raw_logits(h, weight, buffer) if saved_logits is None else saved_logits
            d_raw = raw if raw.dtype == hidden.dtype else torch.empty_like(raw, dtype=hidden.dtype)
            for at in range(0, len(raw), step):
                block = slice(start + at, start + min(at + step, len(raw)))
                of_block = (
                    raw[at : at + step],
                    targets[block],
                    normaliser[block],
                    entropy[block],
                    grad[block],
                    None if grad_entropy is None else grad_entropy[block],
                    ctx.transform,
                )
                if on_cpu is not None:
                    on_cpu.grad(*of_block, out=d_raw[at : at + step])
                else:
                    d_raw[at : at + step] = ctx.blocks[1](*of_block)
            if wants_hidden:
                torch.mm(d_raw, weight, out=grad_hidden[start : start + chunk])
            if wants_weight:
                if grad_weight is None:
                    part = d_raw.t() @ h
                    # many bf16 parts would be rounded away one by one: sum them in fp32
                    grad_weight = part if rows <= chunk else part.float()
                elif grad_weight.dtype == h.dtype:
                    grad_weight.addmm_(d_raw.t(), h)
                else:
                    add_to_wider(grad_weight, torch.mm(d_raw.t(), h, out=part))
        if wants_weight:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    transform: LogitTransform = LogitTransform(),  # noqa: B008
    want_entropy: bool = False,
    compiled: bool = False,
    triton: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target under softmax(logits), and the entropy of that distribution.

    Logits exist in chunks only, of 320 MiB on CPU and 512 MiB on CUDA; peak memory is up to four of the latter.

    Args:
        hidden: (T, H), the states that predict ``targets``.
        weight: (V, H) of the last linear layer.
        targets: (T,) int64 token ids.
        compiled: fuse the element-wise operations with torch.compile.
        triton: use liger's kernel, unless ``want_entropy``.

    Returns:
        log_probs (T,) and entropy (T,) or None; both fp32 and differentiable.
    """
    blocks: tuple[Callable, Callable] | None = (_score_block, _grad_block)
    if triton and not want_entropy:
        blocks = _triton_score, _triton_grad
    elif compiled:
        blocks = _compiled_blocks()
    elif hidden.device.type == "cpu":
        blocks = None  # buffers of the call's own
    log_probs, entropy = _ChunkedLogProb.apply(hidden, weight, targets, transform, want_entropy, blocks)
    return log_probs, entropy if want_entropy else None


def full_log_probs(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    want_entropy: bool = False,
    excluded_tokens: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities and entropies from whole logits (T, V), for models whose head is more than a linear layer."""
    log_p = torch.log_softmax(_whole_logits(logits, temperature, excluded_tokens), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1) if want_entropy else None
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


def _whole_logits(logits: Tensor, temperature: float, excluded_tokens: tuple[int, ...]) -> Tensor:
    logits = logits.float() / temperature
    for token in excluded_tokens:
        logits[:, token] = NO_LOGIT
    return logits


# -- on a model ---------------------------------------------------------------------------------------------------


class TokenScores(NamedTuple):
    """Outputs at the valid positions, (t,) each, fp32; None where not requested."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    """Has no gradient."""
    full_kl: Tensor | None = None
    """Divergence from the reference over the vocabulary."""
    top_log_probs: Tensor | None = None
    """(t, k): of the likeliest tokens, without gradient; or of the tokens that the caller named, with it."""
    top_ids: Tensor | None = None
    """(t, k) int32: the likeliest tokens."""
    states: Tensor | None = None
    """(t', H), inputs of the last layer at the t' positions of this rank; then all other fields are None."""


@dataclass(frozen=True)
class ReferenceStates:
    """Hidden states of a reference model at the valid positions, and its head."""

    hidden: Tensor
    """(t', H'), ``TokenScores.states`` of the reference."""
    weight: Tensor | None
    """(V, H') of its last linear layer; None: the policy's own."""
    head: OutputHead
    temperature: float | None = None
    """Of its logits; None: the policy's."""
    beta: float = 1.0
    """Divergence from it, as ``chunked_divergence`` has it; 1: KL(policy || reference)."""


def attach_token_outputs(model: Any) -> None:
    """Add ``token_outputs`` to ``model`` as a method, so that a sharding wrapper can gather weights around it."""
    model.token_outputs = MethodType(token_outputs, model)


def token_outputs(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor | None,
    positions: Tensor,
    targets: Tensor,
    head: OutputHead,
    temperature: float,
    want_entropy: bool,
    want_sum_pi_squared: bool = False,
    vision_inputs: Mapping[str, Tensor] | None = None,
    attention_kwargs: Mapping[str, Any] | None = None,
    reference: ReferenceStates | None = None,
    want_states: bool = False,
    top: TopTokens | None = None,
    ids: Tensor | None = None,
) -> TokenScores:
    """Run the model and compute its outputs at the valid positions.

    Args:
        input_ids: (b, l), right padded, or (1, T) packed. No attention mask: a causal model's real tokens do not attend
            to padding on their right, and outputs at the padding are not read.
        position_ids: like ``input_ids``, or (3, ...) of them, or None for counting from 0.
        positions: (t,) positions in the flattened ``input_ids`` that predict a token.
        targets: (t,) the tokens predicted.
        want_sum_pi_squared: also return the sum of squared probabilities over the vocabulary.
        vision_inputs: image tensors of the model: ``pixel_values``, ``image_grid_thw``.
        attention_kwargs: keyword arguments of each layer's attention: the ``packing`` of packed rows and, with sequence
            parallelism, this rank's ``shard``. All ranks pass whole inputs and get the outputs of all positions.
        reference: also return the divergence of the policy's distribution from this one.
        want_states: return only ``states``, of this rank's positions.
        top: also return the likeliest tokens; log-probs and these then have no gradient, and there is no entropy.
        ids: (t, k) tokens whose log-probs to return too.
    """
    inputs = {"input_ids": input_ids, "use_cache": False, **(vision_inputs or {}), **(attention_kwargs or {})}
    if position_ids is not None:
        inputs["position_ids"] = position_ids
    shard = inputs.get("shard")
    if shard is not None:
        if not is_vision_language(model.config):  # whose embeddings are made whole, and sliced by a hook
            inputs.update({name: shard.slice_of(inputs[name]) for name in ("input_ids", "position_ids")})
        positions, targets = shard.positions, targets.index_select(0, shard.local_index)
        ids = None if ids is None else ids.index_select(0, shard.local_index)
    if head.kind == "logits":
        logits = model(**inputs).logits.flatten(0, 1).index_select(0, positions)
        scores = _of_whole_logits(logits, targets, head, temperature, want_entropy, want_sum_pi_squared, top, ids)
    else:
        hidden = model.base_model(**inputs)[0].flatten(0, 1).index_select(0, positions)
        if want_states:
            return TokenScores(states=hidden)
        if head.kind == "value":
            layer = score_layer(model)
            bias = None if layer.bias is None else layer.bias.float()
            # the head in fp32: a bf16 value has three digits, too few for a TD error
            values = nn.functional.linear(hidden.float(), layer.weight.float(), bias)
            scores = TokenScores(values=values.sum(-1))  # over the one label: FSDP warns of outputs that are views
        else:
            weight = model.get_output_embeddings().weight
            transform = LogitTransform(temperature, head.scale, head.softcap, head.excluded_tokens)
            if top is not None:
                log_probs, top_log_probs, top_ids = chunked_top_log_probs(hidden, weight, targets, top, transform)
                scores = TokenScores(log_probs, top_log_probs=top_log_probs, top_ids=top_ids)
            else:
                scores = TokenScores(
                    *chunked_log_probs(hidden, weight, targets, transform, want_entropy, head.compiled, head.triton)
                )
            if want_sum_pi_squared:
                scores = scores._replace(sum_pi_squared=chunked_sum_pi_squared(hidden, weight, transform))
            if ids is not None:
                scores = scores._replace(top_log_probs=chunked_log_probs_of(hidden, weight, ids, transform))
            if reference is not None:
                ref_weight = weight if reference.weight is None else reference.weight
                # excluded tokens are left out of both distributions
                ref_transform = transform._replace(scale=reference.head.scale, softcap=reference.head.softcap)
                ref_transform = ref_transform._replace(temperature=reference.temperature or temperature)
                states, beta = reference.hidden, reference.beta
                kl = chunked_divergence(hidden, weight, states, ref_weight, transform, ref_transform, beta)
                scores = scores._replace(full_kl=kl)
    if shard is None:
        return scores
    return TokenScores(*(part if part is None else shard.gather(part) for part in scores))


def _of_whole_logits(
    logits: Tensor,
    targets: Tensor,
    head: OutputHead,
    temperature: float,
    want_entropy: bool,
    want_sum_pi_squared: bool,
    top: TopTokens | None,
    ids: Tensor | None,
) -> TokenScores:
    """The outputs of a model whose head is more than a linear layer, from its logits (t, V)."""
    scores = TokenScores(*full_log_probs(logits, targets, temperature, want_entropy, head.excluded_tokens))
    if want_sum_pi_squared:
        p = torch.softmax(_whole_logits(logits.detach(), temperature, head.excluded_tokens), dim=-1)
        scores = scores._replace(sum_pi_squared=p.square().sum(-1))
    if top is not None or ids is not None:
        log_p = torch.log_softmax(_whole_logits(logits, temperature, head.excluded_tokens), dim=-1)
        if top is not None:
            values, top_ids = top.of(log_p.detach())
            scores = scores._replace(top_log_probs=values, top_ids=top_ids)
        if ids is not None:
            scores = scores._replace(top_log_probs=log_p.gather(1, ids.long()))
    return scores
