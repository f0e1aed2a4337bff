"""One optimizer step: the contract of losses, weights of micro-batches, means of metrics, and the reference of a KL.

Knows engines only by their topology and scores; no backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from verl.algorithms.aggregate import PreparedBatch
from verl.algorithms.losses import TokenOutputs
from verl.algorithms.valid_tokens import valid_tokens
from verl.batch.ragged import Column, Ragged
from verl.models.token_outputs import ReferenceStates, TokenScores
from verl.protocol import DataProto
from verl.utils.distributed import Topology, all_gather_objects
from verl.workers.engine.micro_batch import MicroBatch

if TYPE_CHECKING:
    from verl.workers.engine.engine import Engine


class LossFn(Protocol):
    """(outputs, columns of a micro-batch) -> (mean loss, metrics), with a weight for each mean."""

    @property
    def columns(self) -> Sequence[str]:
        """Columns it reads."""

    @property
    def extra_columns(self) -> Sequence[str]:
        """Columns it reads where the batch has them."""

    @property
    def want_entropy(self) -> bool:
        """Whether it reads the entropy of each token."""

    @property
    def averaged_as_loss(self) -> Collection[str] | None:
        """Metrics that are means by ``weight``; the others are means over tokens. None: all."""

    def prepare(self, batch: DataProto, gather: Gather) -> PreparedBatch:
        """Add the columns that depend on the whole mini-batch."""

    def weight(self, columns: Mapping[str, Column]) -> Tensor:
        """Return the divisor of the micro-batch's mean."""

    def __call__(self, outputs: TokenOutputs, columns: Mapping[str, Column], /) -> tuple[Tensor, dict[str, Any]]:
        """Return the mean loss of a micro-batch and its metrics, from outputs (t,) and columns without padding."""


class TrainStep(NamedTuple):
    """One optimizer step: the loss of a mini-batch, and how much each of its micro-batches counts."""

    loss: LossFn
    shares: Sequence[float]
    """Share of each micro-batch in means by the loss's weight; 0: idle, or without valid tokens."""
    token_shares: Sequence[float]
    """Share of each micro-batch in means over tokens."""
    scale: float
    """Factor from the mean over the mini-batch to its loss: its total weight for a sum, else 1."""
    ranks: int
    """Ranks whose gradients are averaged."""
    reference: Reference | None
    metrics: list[tuple[float, dict[str, Any]]]
    """Weight of a micro-batch's means, and their values; weights are compared among equal names only."""

    def scaled_loss(self, number: int, micro: MicroBatch, scores: TokenScores) -> Tensor:
        """Return the loss of micro-batch ``number`` for backward, and collect its metrics."""
        share = self.shares[number]
        if share == 0.0:
            # other ranks wait in backward, so run it, with zero gradients
            return torch.stack([part.sum() for part in scores if part is not None]).sum() * 0.0
        parts = scores.log_probs, scores.entropy, scores.values, scores.full_kl, scores.top_log_probs
        value, metrics = self.loss(TokenOutputs(*parts), micro.columns)
        # detached, or the graph of every micro-batch would live until the end of the step
        numbers = {name: one.detach() if isinstance(one, Tensor) else one for name, one in metrics.items()}
        # a fraction of tokens is a mean over tokens even where the loss is a mean over responses
        as_loss = metrics if self.loss.averaged_as_loss is None else self.loss.averaged_as_loss
        self.metrics.append((share, {name: one for name, one in numbers.items() if name in as_loss}))
        by_token = {name: one for name, one in numbers.items() if name not in as_loss}
        self.metrics.append((self.token_shares[number], by_token))
        return value * (share * self.scale * self.ranks)


def plan_step(
    micro_batches: Sequence[MicroBatch],
    local: int,
    loss: LossFn,
    is_sum: bool,
    reference: Reference | None,
    engine: Engine,
) -> tuple[TrainStep, float, float]:
    """Weigh the micro-batches against those of all ranks.

    Args:
        local: micro-batches that are this rank's own; those after them are idle.
        is_sum: from ``loss.prepare``.

    Returns:
        The step, and over all ranks the tokens that shared prompts save, and the tokens that run.
    """
    own = micro_batches[:local]
    counts = [valid_tokens(micro.columns["response_mask"]).total for micro in own if loss.averaged_as_loss is not None]
    numbers = to_floats([loss.weight(micro.columns) for micro in own] + counts)
    weights, tokens = numbers[:local], numbers[local:]
    packings = [micro.packing for micro in own if micro.packing]
    sums = [sum(weights), sum(p.tokens_saved for p in packings), sum(p.tokens for p in packings)]
    total, saved, run = engine.reduce(sums, "sum")
    idle = [0.0] * (len(micro_batches) - local)
    shares = [weight / total if total else 0.0 for weight in weights] + idle
    # gradients are averaged over ranks, so each rank multiplies by their number to have them summed; ranks that share
    # a sequence have the same loss and compute parts of its gradient
    ranks = engine.topology.dp_size * engine.topology.sp_size
    scale = total if is_sum else 1.0
    token_shares = [*(tokens or shares[:local]), *idle]
    return TrainStep(loss, shares, token_shares, scale, ranks, reference, []), saved, run


@torch.no_grad()
def add_l2_gradient(parameters: Sequence[Tensor], coef: float) -> None:
    """Add to each gradient that of coef / 2 x the squared weights: coef x the weight."""
    for parameter in parameters if coef else ():
        if parameter.grad is not None:
            parameter.grad.add_(parameter.detach(), alpha=coef)


def clip_gradients(parameters: Sequence[Tensor], limit: float | None) -> float:
    """Norm of all gradients before clipping; they are scaled down to ``limit`` where it is finite and larger.

    Gradients that are not finite are left as they are: the caller skips the step.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return 0.0
    total = torch.nn.utils.get_total_norm(grads)
    if hasattr(total, "full_tensor"):
        total = total.full_tensor()
    norm = float(total)
    if limit is not None and math.isfinite(norm) and norm > limit:
        torch._foreach_mul_(grads, limit / (norm + 1e-6))
    return norm


def weighted_means(parts: Sequence[tuple[float, dict[str, Any]]], topology: Topology) -> dict[str, float]:
    """Means of ``TrainStep.metrics`` over micro-batches and ranks; a rank without valid tokens contributes nothing.

    Numbers on a device are fetched here, once a step: every transfer before would wait for its forward pass.
    """
    fetched = iter(to_floats([value for _, kept in parts for value in kept.values()]))
    parts = [(share, {name: next(fetched) for name in kept}) for share, kept in parts]
    if topology.dp_size > 1:
        parts = [part for rank in all_gather_objects(parts, topology.dp_group) for part in rank]
    sums: dict[str, float] = {}
    shares: dict[str, float] = {}
    for share, metrics in parts:
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + share * value
            shares[name] = shares.get(name, 0.0) + share
    return {name: sums[name] / shares[name] for name in sums}


def to_floats(values: list[Any]) -> list[float]:
    """Convert numbers and scalar tensors to floats; those on a device are fetched in one transfer."""
    away = [isinstance(value, Tensor) and value.device.type != "cpu" for value in values]
    scalars = [value.detach().double().reshape(()) for value, is_away in zip(values, away, strict=True) if is_away]
    fetched = iter(torch.stack(scalars).tolist() if scalars else ())
    return [next(fetched) if is_away else float(value) for value, is_away in zip(values, away, strict=True)]


@dataclass(frozen=True)
class Gather:
    """Values over a whole mini-batch and all ranks, for ``loss.prepare``."""

    log_probs: Callable[[], Ragged]
    """Returns the log-probs of this rank's rows under the current weights, by one more forward pass."""
    has_reference: bool
    """Whether ``TokenOutputs.full_kl`` will be computed."""
    topology: Topology
    values: Callable[[], Ragged] | None = None
    """The same of the values of a model with a score head."""

    def apply(self, function: Callable[..., Tensor], values: Tensor) -> Tensor:
        """Apply ``function`` to the k rows of ``values`` (k, N) of all ranks; returns this rank's part, (N,)."""
        parts, rank = [values], 0
        if self.topology.dp_size > 1:
            parts = [torch.from_numpy(part) for part in all_gather_objects(values.numpy(), self.topology.dp_group)]
            rank = self.topology.dp_rank
        return function(*torch.cat(parts, dim=1)).split([part.shape[1] for part in parts])[rank]


# -- the reference of a loss that compares whole distributions ------------------------------------------------------
# Distributions are too large to travel or to keep, so they are made where they are compared, one micro-batch at a time,
# from hidden states and the weight of the last layer.


_SAMPLED = {"reference": "low_var_kl", "teacher": "forward_kl_topk"}
"""Role -> the divergence whose numbers travel."""


@dataclass(frozen=True)
class Reference:
    """An engine that holds the reference, in the same processes as the policy's and on the device."""

    engine: Engine
    weight: Tensor | None
    """(V, H) of its last layer, whole; None: the engine is the policy's own, below its adapter."""
    temperature: float | None = None
    """Of its logits; None: the policy's."""
    beta: float = 1.0
    """Divergence from it: 1: KL(policy || reference); 0: KL(reference || policy); between: Jensen-Shannon."""

    @classmethod
    def of(
        cls,
        engine: Engine,
        policy: Engine,
        option: str = "actor.kl_loss_type=full",
        whose: str = "reference",
        temperature: float | None = None,
        beta: float = 1.0,
    ) -> Reference:
        """The model of another engine; its ranks call it together, which gathers the last layer.

        Args:
            option: that asks for it, for errors.
            whose: its role, for errors.

        Raises:
            ValueError: distributions of the two cannot be compared.
        """
        ours, theirs = policy.topology, engine.topology
        if (ours.world_size, ours.sp_size) != (theirs.world_size, theirs.sp_size):
            raise ValueError(
                f"{option}: the actor has {ours.world_size} ranks, {ours.sp_size} to a sequence, and "
                f"the {whose} {theirs.world_size}, {theirs.sp_size} to a sequence. They go through each micro-batch "
                f"together: give both the same ranks and ulysses_sequence_parallel_size, or use {_SAMPLED[whose]}."
            )
        check_linear_head(engine, option)
        check_linear_head(policy, option)
        weight, vocab = engine.head_weight(), policy.vocab_size
        if len(weight) != vocab:
            raise ValueError(
                f"{option}: the actor has a vocabulary of {vocab} and the {whose} ({engine.spec.path}) one of "
                f"{len(weight)}, and the KL compares them token by token. Use a {whose} with the same vocabulary, or "
                f"{_SAMPLED[whose]}."
            )
        return cls(engine, weight, temperature, beta)

    @classmethod
    def of_base_model(cls, policy: Engine) -> Reference:
        """The policy without its adapter: no second model, and no second last layer."""
        check_linear_head(policy)
        return cls(policy, None)

    def states(self, micro: MicroBatch) -> ReferenceStates:
        """Hidden states from which the reference predicts each response token of ``micro``, with its head."""
        with self.engine.without_adapter() if self.weight is None else nullcontext():
            hidden = self.engine.states(micro)
        return ReferenceStates(hidden, self.weight, self.engine.head, self.temperature, self.beta)


def check_linear_head(engine: Engine, option: str = "actor.kl_loss_type=full") -> None:
    """Refuse a model whose logits are more than its hidden states times a weight."""
    if engine.head.kind != "fused":
        raise ValueError(
            f"{option} with {engine.spec.path}: its logits are not the product of hidden states and a "
            "weight, so they would have to be held whole for two models. Use low_var_kl."
        )
