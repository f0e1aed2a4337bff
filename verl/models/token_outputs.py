"""From hidden states to what a loss needs of each token: log-probability, entropy, KL to a reference, value.

The (T, V) logits are never whole in memory: they are made, used and dropped in chunks, forward and backward. Knows
modules and tensors, not batches or losses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from verl.models.multimodal import is_vision_language
from verl.models.scalar_head import value_layer

logger = logging.getLogger(__name__)

_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Size of the logits made by one matrix product; large enough to run it at full speed."""

_BLOCK_BYTES = 3 << 20
"""Size of fp32 logits that one pass of element-wise maths works on, on CPU: they stay in its cache."""


class HeadMaths(NamedTuple):
    """What turns the output of the last linear layer into log-probabilities.

    A raw output x becomes the logit ``scale * x``, or ``softcap * tanh(scale * x / softcap)`` where there is a cap
    (Gemma 2, arXiv:2408.00118), and is divided by ``temperature``. Tokens in ``never`` get no probability.
    """

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float = 0.0
    never: tuple[int, ...] = ()


_NO_LOGIT = -1e30
"""Its exp is 0; finite, so that it times a probability of 0 is 0."""


# -- maths of one block of logits ---------------------------------------------------------------------------------


def _scaled(raw: Tensor, maths: HeadMaths) -> tuple[Tensor, Tensor | float]:
    """fp32 logits over temperature, and their derivative by ``raw``."""
    # scaled in place below: fp32 input is copied, since the caller may keep it for the backward pass
    x = raw.to(torch.float32, copy=True)
    if maths.softcap:
        x = torch.tanh(x.mul_(maths.scale / maths.softcap))
        logits = x * (maths.softcap / maths.temperature)
        return _without(logits, maths.never), (1 - x * x).mul_(maths.scale / maths.temperature)
    gain = maths.scale / maths.temperature
    return _without(x if gain == 1.0 else x.mul_(gain), maths.never), gain


def _without(logits: Tensor, never: tuple[int, ...]) -> Tensor:
    """Take all probability from some tokens, in place."""
    for token in never:
        logits[:, token] = _NO_LOGIT
    return logits


def _score_block(raw: Tensor, targets: Tensor, maths: HeadMaths, want_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of ``targets``, log of the normaliser, and entropy (or zeros) of each row of raw logits."""
    x, _ = _scaled(raw, maths)
    top = x.amax(-1, keepdim=True)
    x = x.sub_(top)
    picked = x.gather(1, targets[:, None]).squeeze(1)
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
    return picked - log_total, log_total + top.squeeze(1), entropy


def _grad_block(
    raw: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    entropy: Tensor | None,
    grad: Tensor,
    grad_entropy: Tensor | None,
    maths: HeadMaths,
) -> Tensor:
    """Gradient by raw logits: dlogp_y/dx_j = [j = y] - p_j and dH/dx_j = -p_j (log p_j + H)."""
    x, slope = _scaled(raw, maths)
    x = x.sub_(normaliser[:, None])
    if grad_entropy is None:
        x = x.exp_().mul_(-grad[:, None])
    else:
        pull = (x + entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad[:, None])
        x = x.exp_().mul_(pull).neg_()
    x = x.scatter_add_(1, targets[:, None], grad[:, None])
    return x if isinstance(slope, float) and slope == 1.0 else x.mul_(slope)


class _Compiled:
    """A function on blocks, compiled when first called; as it is where this machine cannot compile."""

    def __init__(self, plain: Callable) -> None:
        self._plain = plain
        self._function = torch.compile(plain, dynamic=True)

    def __call__(self, *args: Any) -> Any:
        if self._function is self._plain:
            return self._plain(*args)
        try:
            return self._function(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # no C compiler, no Triton, ...: each has its own type
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            logger.warning("torch.compile does not work here, so it is left out: %s", reason)
            self._function = self._plain
            return self._plain(*args)


@lru_cache(maxsize=1)
def _compiled_blocks() -> tuple[Callable, Callable]:
    return _Compiled(_score_block), _Compiled(_grad_block)


def _triton_score(raw: Tensor, targets: Tensor, maths: HeadMaths, want_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``_score_block`` by liger's kernel, which gives log-probabilities only."""
    from verl.models.liger import target_log_probs

    log_probs = target_log_probs(_scaled(raw, maths)[0], targets)
    nothing = torch.zeros_like(log_probs)
    return log_probs, nothing, nothing


def _triton_grad(
    raw: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    entropy: Tensor | None,
    grad: Tensor,
    grad_entropy: Tensor | None,
    maths: HeadMaths,
) -> Tensor:
    """``_grad_block`` by liger's kernel."""
    from verl.models.liger import target_log_probs_gradient

    x, slope = _scaled(raw, maths)
    return target_log_probs_gradient(x, targets, grad).mul_(slope)


def _blocks(want_entropy: bool, compiled: bool, triton: bool) -> tuple[Callable, Callable]:
    """What works on a block of logits: (forward, backward)."""
    if triton and not want_entropy:
        return _triton_score, _triton_grad
    return _compiled_blocks() if compiled else (_score_block, _grad_block)


# -- the chunked head ---------------------------------------------------------------------------------------------


def _raw_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden (t, H) times weight (V, H) transposed; kept in the fp32 it was summed in where the device offers that."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16) and torch.version.hip is None:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return hidden @ weight.t()


def _chunk_rows(hidden: Tensor, vocab: int) -> int:
    size = 4 if hidden.is_cuda else hidden.element_size()
    rows = _CHUNK_BYTES["cuda" if hidden.is_cuda else "cpu"] // (size * vocab)
    return max(64, rows // 64 * 64)


def _block_rows(hidden: Tensor, vocab: int, rows: int) -> int:
    return rows if hidden.is_cuda else max(4, _BLOCK_BYTES // (4 * vocab))


class _ChunkedLogProb(torch.autograd.Function):
    """hidden (T, H), weight (V, H), targets (T,) -> log-probabilities and entropies (T,), fp32."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, maths, want_entropy, blocks):
        rows, vocab = hidden.shape[0], weight.shape[0]
        score = blocks[0]
        chunk = _chunk_rows(hidden, vocab)
        log_probs = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        normaliser, entropy = torch.empty_like(log_probs), torch.empty_like(log_probs)
        raw = None
        for start in range(0, rows, chunk):
            raw = _raw_logits(hidden[start : start + chunk], weight)
            step = _block_rows(hidden, vocab, len(raw))
            for at in range(0, len(raw), step):
                block = slice(start + at, start + min(at + step, len(raw)))
                log_probs[block], normaliser[block], entropy[block] = score(
                    raw[at : at + step], targets[block], maths, want_entropy
                )
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.maths, ctx.grad_block, ctx.chunk = maths, blocks[1], chunk
        # with a single chunk the logits at hand save the backward pass one product of four, in memory it needs anyway
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
        rows, vocab = hidden.shape[0], weight.shape[0]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = None
        kept, ctx.raw = ctx.raw, None
        for start in range(0, rows, ctx.chunk):
            h = hidden[start : start + ctx.chunk]
            raw = _raw_logits(h, weight) if kept is None else kept
            d_raw = raw if raw.dtype == hidden.dtype else torch.empty_like(raw, dtype=hidden.dtype)
            step = _block_rows(hidden, vocab, len(raw))
            for at in range(0, len(raw), step):
                block = slice(start + at, start + min(at + step, len(raw)))
                d_raw[at : at + step] = ctx.grad_block(
                    raw[at : at + step],
                    targets[block],
                    normaliser[block],
                    entropy[block],
                    grad[block],
                    None if grad_entropy is None else grad_entropy[block],
                    ctx.maths,
                )
            if wants_hidden:
                torch.mm(d_raw, weight, out=grad_hidden[start : start + ctx.chunk])
            if wants_weight:
                part = d_raw.t() @ h
                if grad_weight is None:
                    # many bf16 parts would be rounded away one by one: sum them in fp32
                    grad_weight = part if rows <= ctx.chunk else part.float()
                else:
                    grad_weight += part
        if wants_weight:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    maths: HeadMaths = HeadMaths(),  # noqa: B008
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
        compiled: fuse the element-wise maths with torch.compile.
        triton: let liger's kernel do it; with ``want_entropy`` this code does.

    Returns:
        log_probs (T,) and entropy (T,) or None; both fp32 and differentiable.
    """
    log_probs, entropy = _ChunkedLogProb.apply(
        hidden, weight, targets, maths, want_entropy, _blocks(want_entropy, compiled, triton)
    )
    return log_probs, entropy if want_entropy else None


def plain_log_probs(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    want_entropy: bool = False,
    never: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor | None]:
    """The same from finished logits (T, V): for models whose head is more than a linear layer."""
    log_p = torch.log_softmax(_without(logits.float() / temperature, never), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1) if want_entropy else None
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


@torch.no_grad()
def chunked_sum_pi_squared(hidden: Tensor, weight: Tensor, maths: HeadMaths = HeadMaths()) -> Tensor:  # noqa: B008
    """sum_v pi(v)^2 of softmax(logits) at each of the states ``hidden`` (T, H): (T,) fp32, by the same chunks."""
    squares = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    chunk = _chunk_rows(hidden, weight.shape[0])
    for start in range(0, hidden.shape[0], chunk):
        raw = _raw_logits(hidden[start : start + chunk], weight)
        step = _block_rows(hidden, weight.shape[0], len(raw))
        for at in range(0, len(raw), step):
            p = torch.softmax(_scaled(raw[at : at + step], maths)[0], dim=-1)
            squares[start + at : start + at + len(p)] = torch.linalg.vecdot(p, p)
    return squares


def _log_softmax(raw: Tensor, maths: HeadMaths) -> tuple[Tensor, Tensor | float]:
    """Log-probabilities of all tokens, fp32, and the derivative of the logits by ``raw``."""
    x, slope = _scaled(raw, maths)
    return x.sub_(torch.logsumexp(x, -1, keepdim=True)), slope


class _ChunkedFullKL(torch.autograd.Function):
    """hidden (T, H), weight (V, H), and those of a reference -> KL(softmax || reference's softmax) (T,), fp32.

    With log-ratios d_v = log p_v - log q_v: KL = sum_v p_v d_v, and dKL/dx_j = p_j (d_j - KL). Nothing flows into the
    reference.
    """

    @staticmethod
    def forward(ctx, hidden, weight, ref_hidden, ref_weight, maths, ref_maths):
        kl = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for chunk, raw, ref_raw in _ChunkedFullKL._chunks(hidden, weight, ref_hidden, ref_weight):
            step = _block_rows(hidden, weight.shape[0], len(raw))
            for at in range(0, len(raw), step):
                log_p, _ = _log_softmax(raw[at : at + step], maths)
                log_q, _ = _log_softmax(ref_raw[at : at + step], ref_maths)
                ratio = log_q.neg_().add_(log_p)
                kl[chunk][at : at + step] = log_p.exp_().mul_(ratio).sum(-1)
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, kl)
        ctx.maths, ctx.ref_maths = maths, ref_maths
        return kl

    @staticmethod
    def backward(ctx, grad):
        hidden, weight, ref_hidden, ref_weight, kl = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # many bf16 parts would be rounded away one by one: sum them in fp32
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for chunk, raw, ref_raw in _ChunkedFullKL._chunks(hidden, weight, ref_hidden, ref_weight):
            d_raw = raw if raw.dtype == hidden.dtype else torch.empty_like(raw, dtype=hidden.dtype)
            step = _block_rows(hidden, weight.shape[0], len(raw))
            for at in range(0, len(raw), step):
                log_p, slope = _log_softmax(raw[at : at + step], ctx.maths)
                log_q, _ = _log_softmax(ref_raw[at : at + step], ctx.ref_maths)
                pull = log_q.neg_().add_(log_p).sub_(kl[chunk][at : at + step, None])
                pull.mul_(log_p.exp_()).mul_(grad[chunk][at : at + step, None])
                d_raw[at : at + step] = pull.mul_(slope)
            if wants_hidden:
                torch.mm(d_raw, weight, out=grad_hidden[chunk])
            if wants_weight:
                grad_weight += d_raw.t() @ hidden[chunk]
        return grad_hidden, grad_weight.to(weight.dtype) if wants_weight else None, None, None, None, None

    @staticmethod
    def _chunks(hidden, weight, ref_hidden, ref_weight):
        """Rows, and both models' raw logits of them: together as many as one model's elsewhere."""
        rows = _chunk_rows(hidden, 2 * weight.shape[0])
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            yield chunk, _raw_logits(hidden[chunk], weight), _raw_logits(ref_hidden[chunk], ref_weight)


def chunked_full_kl(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    maths: HeadMaths = HeadMaths(),  # noqa: B008
    ref_maths: HeadMaths = HeadMaths(),  # noqa: B008
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
    return _ChunkedFullKL.apply(hidden, weight, ref_hidden.detach().to(ref_weight.dtype), ref_weight, maths, ref_maths)


# -- on a model ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """How to read a model's outputs; found by ``probe_head``."""

    kind: Literal["fused", "logits", "value"]
    scale: float = 1.0
    softcap: float = 0.0
    compiled: bool = False
    triton: bool = False
    never: tuple[int, ...] = ()
    """Tokens the policy never draws, such as the placeholders of images: they get no probability."""


class TokenScores(NamedTuple):
    """Outputs at the chosen positions, (t,) each, fp32; None where not asked for."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    """Has no gradient."""
    full_kl: Tensor | None = None
    states: Tensor | None = None
    """(t', H), what the last layer reads at those t' positions that this rank runs. Has nothing beside it."""


@dataclass(frozen=True)
class ReferenceStates:
    """A reference's distributions at the chosen positions, before they are multiplied out."""

    hidden: Tensor
    """(t', H'), ``TokenScores.states`` of the reference."""
    weight: Tensor | None
    """(V, H') of its last linear layer; None: the policy's own."""
    head: Head


def attach_token_outputs(model: nn.Module) -> None:
    """Give ``model`` the method ``token_outputs``, so that a sharding wrapper can gather weights around it."""
    model.token_outputs = MethodType(token_outputs, model)


def token_outputs(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor | None,
    cells: Tensor,
    targets: Tensor,
    head: Head,
    temperature: float,
    want_entropy: bool,
    want_squares: bool = False,
    vision_inputs: Mapping[str, Tensor] | None = None,
    told: Mapping[str, Any] | None = None,
    reference: ReferenceStates | None = None,
    want_states: bool = False,
) -> TokenScores:
    """Run the model and read its outputs at some positions.

    Args:
        input_ids: (b, l), right padded, or (1, T) packed. No attention mask: a causal model's real tokens cannot see
            padding on their right, and nobody reads what stands at the padding.
        position_ids: like ``input_ids``, or (3, ...) of them, or None for counting from 0.
        cells: (t,) positions in the flattened ``input_ids`` that predict a token.
        targets: (t,) the tokens predicted.
        want_squares: also sum the squared probabilities of all tokens.
        vision_inputs: what the model takes beside tokens: ``pixel_values``, ``image_grid_thw``.
        told: what each layer's attention is told: the ``packing`` of packed rows, and where ranks share the sequence
            this one's ``share`` of it. All ranks give whole inputs, and get the outputs of all cells.
        reference: also tell how far the policy's distribution is from this one.
        want_states: return ``states`` and nothing else, of this rank's cells.
    """
    inputs = {"input_ids": input_ids, "use_cache": False, **(vision_inputs or {}), **(told or {})}
    if position_ids is not None:
        inputs["position_ids"] = position_ids
    share = inputs.get("share")
    if share is None:
        return _outputs(
            model, inputs, cells, targets, head, temperature, want_entropy, want_squares, reference, want_states
        )
    if not is_vision_language(model.config):
        inputs.update({name: share.part(inputs[name]) for name in ("input_ids", "position_ids")})
    own = targets.index_select(0, share.picked)
    scores = _outputs(
        model, inputs, share.cells, own, head, temperature, want_entropy, want_squares, reference, want_states
    )
    if want_states:
        return scores
    return TokenScores(*(part if part is None else share.gather(part) for part in scores))


def _outputs(
    model: Any,
    inputs: Mapping[str, Any],
    cells: Tensor,
    targets: Tensor,
    head: Head,
    temperature: float,
    want_entropy: bool,
    want_squares: bool,
    reference: ReferenceStates | None,
    want_states: bool,
) -> TokenScores:
    if head.kind == "logits":
        logits = model(**inputs).logits.flatten(0, 1).index_select(0, cells)
        scores = TokenScores(*plain_log_probs(logits, targets, temperature, want_entropy, head.never))
        if not want_squares:
            return scores
        p = torch.softmax(_without(logits.detach().float() / temperature, head.never), dim=-1)
        return scores._replace(sum_pi_squared=p.square().sum(-1))
    hidden = model.base_model(**inputs)[0].flatten(0, 1).index_select(0, cells)
    if head.kind == "value":
        layer = value_layer(model)
        bias = None if layer.bias is None else layer.bias.float()
        # the head in fp32: a bf16 value has three digits, too few for a TD error
        values = nn.functional.linear(hidden.float(), layer.weight.float(), bias)
        return TokenScores(values=values.sum(-1))  # over the one label: FSDP warns of outputs that are views
    if want_states:
        return TokenScores(states=hidden)
    maths = HeadMaths(temperature, head.scale, head.softcap, head.never)
    weight = model.get_output_embeddings().weight
    scores = TokenScores(*chunked_log_probs(hidden, weight, targets, maths, want_entropy, head.compiled, head.triton))
    if want_squares:
        scores = scores._replace(sum_pi_squared=chunked_sum_pi_squared(hidden, weight, maths))
    if reference is not None:
        ref_weight = weight if reference.weight is None else reference.weight
        # what the policy never draws is left out of both distributions
        ref_maths = maths._replace(scale=reference.head.scale, softcap=reference.head.softcap)
        full_kl = chunked_full_kl(hidden, weight, reference.hidden, ref_weight, maths, ref_maths)
        scores = scores._replace(full_kl=full_kl)
    return scores


@torch.no_grad()
def probe_head(model: Any, device: torch.device, compiled: bool = False) -> Head:
    """Find out by one short forward pass what stands between hidden states and logits.

    The input of the last linear layer is blown up so that its outputs reach 30: a softcap or a scale then shows, which
    the small logits of a fresh model would hide. Anything that is not a linear layer, a constant from the config or a
    tanh cap is handled by taking the logits whole, with a warning.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear) or layer.bias is not None:
        return _whole_logits(model, "its last layer is not a linear layer without bias")
    seen: dict[str, Tensor] = {}

    def amplify(module: nn.Linear, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen["input"] = args[0]
        return (args[0] * (30 / (args[0] @ module.weight.t()).abs().amax().clamp_min(1e-6)),)

    hooks = [
        model.base_model.register_forward_hook(lambda _module, _args, out: seen.update(hidden=out[0])),
        layer.register_forward_pre_hook(amplify),
        layer.register_forward_hook(lambda _module, _args, out: seen.update(raw=out)),
    ]
    training = model.training
    try:
        model.eval()
        ids = torch.arange(16, device=device).view(2, 8) % model.config.get_text_config().vocab_size
        final = model(input_ids=ids, use_cache=False).logits.float()
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if "raw" not in seen or "hidden" not in seen or not torch.equal(seen["hidden"], seen["input"]):
        return _whole_logits(model, "its hidden states are changed before the last layer")
    raw = seen["raw"].float()
    for scale, softcap in _known_heads(model.config.get_text_config()):
        made = raw * scale
        made = torch.tanh(made / softcap) * softcap if softcap else made
        if torch.allclose(made, final, rtol=0.02, atol=0.02 * float(made.abs().amax())):
            return Head("fused", scale, softcap, compiled)
    return _whole_logits(model, "its logits are changed after the last layer")


def _known_heads(config: Any) -> list[tuple[float, float]]:
    """Scales and softcaps the config names, the plain head first."""
    softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    scales = [1.0]
    if getattr(config, "logit_scale", None):
        scales.append(float(config.logit_scale))
    if getattr(config, "logits_scaling", None):
        scales.append(1.0 / float(config.logits_scaling))
    return [(scale, cap) for cap in dict.fromkeys((0.0, softcap)) for scale in scales]


def _whole_logits(model: nn.Module, why: str) -> Head:
    logger.warning(
        "%s: %s, so the logits of a micro-batch are held whole; use small micro-batches", type(model).__name__, why
    )
    return Head("logits")
