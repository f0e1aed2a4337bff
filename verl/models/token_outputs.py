"""Log-probability, entropy, KL to a reference, and value of each token, computed from hidden states.

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

from verl.models.heads import OutputHead, score_layer
from verl.models.multimodal import is_vision_language

logger = logging.getLogger(__name__)

_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Size of the logits of one matrix product; large enough to run it at full speed."""

_BLOCK_BYTES = 3 << 20
"""Size of the fp32 logits of one element-wise pass on CPU: they stay in its cache."""


class LogitTransform(NamedTuple):
    """Scale, softcap, temperature and excluded tokens between the last linear layer and the softmax.

    A raw output x becomes the logit ``scale * x``, or ``softcap * tanh(scale * x / softcap)`` where there is a cap
    (Gemma 2, arXiv:2408.00118), and is divided by ``temperature``. ``excluded_tokens`` get no probability.
    """

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float = 0.0
    excluded_tokens: tuple[int, ...] = ()


_NO_LOGIT = -1e30
"""Its exp is 0; finite, so that it times a probability of 0 is 0."""


# -- one block of logits ------------------------------------------------------------------------------------------


def _scaled(raw: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor | float]:
    """fp32 logits over temperature, and their derivative by ``raw``."""
    # scaled in place below: fp32 input is copied, since the caller may keep it for the backward pass
    x = raw.to(torch.float32, copy=True)
    derivative: Tensor | float = transform.scale / transform.temperature
    if transform.softcap:
        x = torch.tanh(x.mul_(transform.scale / transform.softcap))
        derivative = (1 - x * x).mul_(derivative)
        x = x * (transform.softcap / transform.temperature)
    elif derivative != 1.0:
        x = x.mul_(derivative)
    for token in transform.excluded_tokens:
        x[:, token] = _NO_LOGIT
    return x, derivative


def _score_block(
    raw: Tensor, targets: Tensor, transform: LogitTransform, want_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of ``targets``, log of the normaliser, and entropy (or zeros) of each row of raw logits."""
    x, _ = _scaled(raw, transform)
    top = x.amax(-1, keepdim=True)
    x = x.sub_(top)
    target_logits = x.gather(1, targets[:, None]).squeeze(1)
    if want_entropy:
        p = torch.exp(x)
        total = p.sum(-1)
        if p.is_cuda:  # may be fused, and is exact where the user lets matrix products run in TF32
            mean = (p * x).sum(-1) / total
        else:
            mean = torch.bmm(p[:, None], x[:, :, None]).view(-1) / total
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
    x, derivative = _scaled(raw, transform)
    x = x.sub_(normaliser[:, None])
    if grad_entropy is None:
        x = x.exp_().mul_(-grad[:, None])
    else:
        coefficient = (x + entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad[:, None])
        x = x.exp_().mul_(coefficient).neg_()
    x = x.scatter_add_(1, targets[:, None], grad[:, None])
    return x if isinstance(derivative, float) and derivative == 1.0 else x.mul_(derivative)


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

    log_probs = target_log_probs(_scaled(raw, transform)[0], targets)
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

    x, derivative = _scaled(raw, transform)
    return target_log_probs_gradient(x, targets, grad).mul_(derivative)


# -- the chunked head ---------------------------------------------------------------------------------------------


def _raw_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden (t, H) times weight (V, H) transposed; in the fp32 of its sums where the device supports that."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16) and torch.version.hip is None:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden @ weight.t()


def _chunk_sizes(hidden: Tensor, vocab: int, models: int = 1) -> tuple[int, int]:
    """Rows of one matrix product, where so many ``models`` have theirs at a time, and of one element-wise pass."""
    size = 4 if hidden.is_cuda else hidden.element_size()
    rows = _CHUNK_BYTES["cuda" if hidden.is_cuda else "cpu"] // (size * vocab * models)
    rows = max(64, rows // 64 * 64)
    return rows, rows if hidden.is_cuda else max(4, _BLOCK_BYTES // (4 * vocab))


class _ChunkedLogProb(torch.autograd.Function):
    """hidden (T, H), weight (V, H), targets (T,) -> log-probabilities and entropies (T,), fp32."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, transform, want_entropy, blocks):
        rows, vocab = hidden.shape[0], weight.shape[0]
        score = blocks[0]
        chunk, step = _chunk_sizes(hidden, vocab)
        log_probs = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        normaliser, entropy = torch.empty_like(log_probs), torch.empty_like(log_probs)
        raw = None
        for start in range(0, rows, chunk):
            raw = _raw_logits(hidden[start : start + chunk], weight)
            for at in range(0, len(raw), step):
                block = slice(start + at, start + min(at + step, len(raw)))
                log_probs[block], normaliser[block], entropy[block] = score(
                    raw[at : at + step], targets[block], transform, want_entropy
                )
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.transform, ctx.grad_block, ctx.sizes = transform, blocks[1], (chunk, step)
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
        rows, (chunk, step) = hidden.shape[0], ctx.sizes
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = None
        saved_logits, ctx.raw = ctx.raw, None
        for start in range(0, rows, chunk):
            h = hidden[start : start + chunk]
            raw = _raw_logits(h, weight) if saved_logits is None else saved_logits
            d_raw = raw if raw.dtype == hidden.dtype else torch.empty_like(raw, dtype=hidden.dtype)
            for at in range(0, len(raw), step):
                block = slice(start + at, start + min(at + step, len(raw)))
                d_raw[at : at + step] = ctx.grad_block(
                    raw[at : at + step],
                    targets[block],
                    normaliser[block],
                    entropy[block],
                    grad[block],
                    None if grad_entropy is None else grad_entropy[block],
                    ctx.transform,
                )
            if wants_hidden:
                torch.mm(d_raw, weight, out=grad_hidden[start : start + chunk])
            if wants_weight:
                part = d_raw.t() @ h
                if grad_weight is None:
                    # many bf16 parts would be rounded away one by one: sum them in fp32
                    grad_weight = part if rows <= chunk else part.float()
                else:
                    grad_weight += part
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

    Logits exist in chunks only (64 MiB on CPU, 512 MiB on CUDA); peak memory is up to four of these.

    Args:
        hidden: (T, H), the states that predict ``targets``.
        weight: (V, H) of the last linear layer.
        targets: (T,) int64 token ids.
        compiled: fuse the element-wise operations with torch.compile.
        triton: use liger's kernel, unless ``want_entropy``.

    Returns:
        log_probs (T,) and entropy (T,) or None; both fp32 and differentiable.
    """
    blocks = _compiled_blocks() if compiled else (_score_block, _grad_block)
    if triton and not want_entropy:
        blocks = _triton_score, _triton_grad
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
        logits[:, token] = _NO_LOGIT
    return logits


@torch.no_grad()
def chunked_sum_pi_squared(hidden: Tensor, weight: Tensor, transform: LogitTransform = LogitTransform()) -> Tensor:  # noqa: B008
    """sum_v pi(v)^2 of softmax(logits) at each of the states ``hidden`` (T, H): (T,) fp32, by the same chunks."""
    squares = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    chunk, step = _chunk_sizes(hidden, weight.shape[0])
    for start in range(0, hidden.shape[0], chunk):
        raw = _raw_logits(hidden[start : start + chunk], weight)
        for at in range(0, len(raw), step):
            p = torch.softmax(_scaled(raw[at : at + step], transform)[0], dim=-1)
            squares[start + at : start + at + len(p)] = torch.linalg.vecdot(p, p)
    return squares


def _log_softmax(raw: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor | float]:
    """Log-probabilities of all tokens, fp32, and the derivative of the logits by ``raw``."""
    x, derivative = _scaled(raw, transform)
    return x.sub_(torch.logsumexp(x, -1, keepdim=True)), derivative


class _ChunkedFullKL(torch.autograd.Function):
    """hidden (T, H), weight (V, H), and those of a reference -> KL(softmax || reference's softmax) (T,), fp32.

    With log-ratios d_v = log p_v - log q_v: KL = sum_v p_v d_v, and dKL/dx_j = p_j (d_j - KL). The reference gets no
    gradient.
    """

    @staticmethod
    def forward(ctx, hidden, weight, ref_hidden, ref_weight, transform, ref_transform):
        kl = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for chunk, raw, ref_raw, step in _ChunkedFullKL._chunks(hidden, weight, ref_hidden, ref_weight):
            for at in range(0, len(raw), step):
                log_p, _ = _log_softmax(raw[at : at + step], transform)
                log_q, _ = _log_softmax(ref_raw[at : at + step], ref_transform)
                ratio = log_q.neg_().add_(log_p)
                kl[chunk][at : at + step] = log_p.exp_().mul_(ratio).sum(-1)
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, kl)
        ctx.transform, ctx.ref_transform = transform, ref_transform
        return kl

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, ref_hidden, ref_weight, kl = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # many bf16 parts would be rounded away one by one: sum them in fp32
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for chunk, raw, ref_raw, step in _ChunkedFullKL._chunks(hidden, weight, ref_hidden, ref_weight):
            d_raw = raw if raw.dtype == hidden.dtype else torch.empty_like(raw, dtype=hidden.dtype)
            for at in range(0, len(raw), step):
                log_p, derivative = _log_softmax(raw[at : at + step], ctx.transform)
                log_q, _ = _log_softmax(ref_raw[at : at + step], ctx.ref_transform)
                coefficient = log_q.neg_().add_(log_p).sub_(kl[chunk][at : at + step, None])
                coefficient.mul_(log_p.exp_()).mul_(grad[chunk][at : at + step, None])
                d_raw[at : at + step] = coefficient.mul_(derivative)
            if wants_hidden:
                torch.mm(d_raw, weight, out=grad_hidden[chunk])
            if wants_weight:
                grad_weight += d_raw.t() @ hidden[chunk]
        return grad_hidden, grad_weight.to(weight.dtype) if wants_weight else None, None, None, None, None

    @staticmethod
    def _chunks(hidden, weight, ref_hidden, ref_weight):
        """Yield row slices, the raw logits of both models, and the rows of an element-wise pass."""
        rows, step = _chunk_sizes(hidden, weight.shape[0], models=2)
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            yield chunk, _raw_logits(hidden[chunk], weight), _raw_logits(ref_hidden[chunk], ref_weight), step


def chunked_full_kl(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    transform: LogitTransform = LogitTransform(),  # noqa: B008
    ref_transform: LogitTransform = LogitTransform(),  # noqa: B008
) -> Tensor:
    """KL(softmax(logits) || softmax(reference's logits)) at each position, summed over the vocabulary.

    Equal to ``verl.algorithms.kl.kl_full`` of the whole logits, forward and backward, with logits in chunks only.

    Args:
        hidden: (T, H), and ``weight`` (V, H) of the last linear layer.
        ref_hidden: (T, H'), and ``ref_weight`` (V, H'): the reference's, which gets no gradient; H' may differ.

    Returns:
        (T,) fp32, differentiable in ``hidden`` and ``weight``.
    """
    ref_weight = ref_weight.detach()
    return _ChunkedFullKL.apply(
        hidden, weight, ref_hidden.detach().to(ref_weight.dtype), ref_weight, transform, ref_transform
    )


# -- on a model ---------------------------------------------------------------------------------------------------


class TokenScores(NamedTuple):
    """Outputs at the valid positions, (t,) each, fp32; None where not requested."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    """Has no gradient."""
    full_kl: Tensor | None = None
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
        reference: also return the KL of the policy's distribution to this one.
        want_states: return only ``states``, of this rank's positions.
    """
    inputs = {"input_ids": input_ids, "use_cache": False, **(vision_inputs or {}), **(attention_kwargs or {})}
    if position_ids is not None:
        inputs["position_ids"] = position_ids
    shard = inputs.get("shard")
    if shard is not None:
        if not is_vision_language(model.config):  # whose embeddings are made whole, and sliced by a hook
            inputs.update({name: shard.slice_of(inputs[name]) for name in ("input_ids", "position_ids")})
        positions, targets = shard.positions, targets.index_select(0, shard.local_index)
    if head.kind == "logits":
        logits = model(**inputs).logits.flatten(0, 1).index_select(0, positions)
        scores = TokenScores(*full_log_probs(logits, targets, temperature, want_entropy, head.excluded_tokens))
        if want_sum_pi_squared:
            p = torch.softmax(_whole_logits(logits.detach(), temperature, head.excluded_tokens), dim=-1)
            scores = scores._replace(sum_pi_squared=p.square().sum(-1))
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
            scores = TokenScores(
                *chunked_log_probs(hidden, weight, targets, transform, want_entropy, head.compiled, head.triton)
            )
            if want_sum_pi_squared:
                scores = scores._replace(sum_pi_squared=chunked_sum_pi_squared(hidden, weight, transform))
            if reference is not None:
                ref_weight = weight if reference.weight is None else reference.weight
                # excluded tokens are left out of both distributions
                ref_transform = transform._replace(scale=reference.head.scale, softcap=reference.head.softcap)
                kl = chunked_full_kl(hidden, weight, reference.hidden, ref_weight, transform, ref_transform)
                scores = scores._replace(full_kl=kl)
    if shard is None:
        return scores
    return TokenScores(*(part if part is None else shard.gather(part) for part in scores))
