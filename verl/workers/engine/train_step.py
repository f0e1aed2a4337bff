"""One optimizer step: the contract of losses, the weights of micro-batches, values over all ranks for a loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from verl.algorithms.aggregate import PreparedBatch
from verl.algorithms.losses import TokenOutputs
from verl.batch.ragged import Ragged
from verl.models.token_outputs import TokenScores
from verl.protocol import DataProto
from verl.utils.distributed import all_gather_objects
from verl.workers.engine.metrics import WeightedMeans, to_floats
from verl.workers.engine.micro_batch import MicroBatch
from verl.workers.engine.reference import Reference
from verl.workers.engine.topology import Topology

if TYPE_CHECKING:
    from verl.workers.engine.engine import Engine


class LossFn(Protocol):
    """(outputs, columns of a micro-batch) -> (mean loss, metrics), with a weight for each mean."""

    columns: Sequence[str]
    """Columns it reads."""
    extra_columns: Sequence[str]
    """Columns it reads where the batch has them."""
    want_entropy: bool
    averaged_as_loss: Collection[str] | None
    """Metrics that are means by ``weight``; the others are means over tokens. None: all."""

    def prepare(self, batch: DataProto, gather: Gather) -> PreparedBatch:
        """Add the columns that depend on the whole mini-batch."""

    def weight(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the divisor of the micro-batch's mean."""

    def __call__(self, outputs: TokenOutputs, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """Return the mean loss of a micro-batch and its metrics."""


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
    metrics: WeightedMeans

    def scaled_loss(self, number: int, micro: MicroBatch, scores: TokenScores) -> Tensor:
        """Return the loss of micro-batch ``number`` for backward, and collect its metrics."""
        share = self.shares[number]
        if share == 0.0:
            # other ranks wait in backward, so run it, with zero gradients
            return sum(part.sum() for part in scores if part is not None).mul(0.0)
        parts = scores.log_probs, scores.entropy, scores.values, scores.full_kl
        value, metrics = self.loss(TokenOutputs(*map(micro.to_rows, parts)), micro.columns)
        # a fraction of tokens is a mean over tokens even where the loss is a mean over responses
        as_loss = metrics if self.loss.averaged_as_loss is None else self.loss.averaged_as_loss
        self.metrics.add({name: value for name, value in metrics.items() if name in as_loss}, share)
        by_token = {name: value for name, value in metrics.items() if name not in as_loss}
        self.metrics.add(by_token, self.token_shares[number])
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
    masks = [micro.columns["response_mask"].sum() for micro in own if loss.averaged_as_loss is not None]
    numbers = to_floats([loss.weight(micro.columns) for micro in own] + masks)
    weights, tokens = numbers[:local], numbers[local:]
    packings = [micro.packing for micro in own if micro.packing]
    counts = [sum(weights), sum(p.tokens_saved for p in packings), sum(p.tokens for p in packings)]
    total, saved, run = engine.reduce(counts, "sum")
    idle = [0.0] * (len(micro_batches) - local)
    shares = [weight / total if total else 0.0 for weight in weights] + idle
    # gradients are averaged over ranks, so each rank multiplies by their number to have them summed; ranks that share
    # a sequence have the same loss and compute parts of its gradient
    ranks = engine.topology.dp_size * engine.topology.sp_size
    scale = total if is_sum else 1.0
    token_shares = [*(tokens or shares[:local]), *idle]
    return TrainStep(loss, shares, token_shares, scale, ranks, reference, WeightedMeans()), saved, run


class Gather:
    """Values over a whole mini-batch and all ranks, for ``loss.prepare``."""

    def __init__(self, log_probs: Callable[[], Ragged], topology: Topology, has_reference: bool) -> None:
        self.log_probs = log_probs
        """Returns the log-probs of this rank's rows under the current weights, by one more forward pass."""
        self.has_reference = has_reference
        """Whether ``TokenOutputs.full_kl`` will be computed."""
        self._topology = topology

    def apply(self, function: Callable[..., Tensor], values: Tensor) -> Tensor:
        """Apply ``function`` to the k rows of ``values`` (k, N) of all ranks; returns this rank's part, (N,)."""
        parts = [values]
        if self._topology.dp_size > 1:
            parts = [torch.from_numpy(part) for part in all_gather_objects(values.numpy(), self._topology.dp_group)]
        results = function(*torch.cat(parts, dim=1)).split([part.shape[1] for part in parts])
        return results[self._topology.dp_rank if self._topology.dp_size > 1 else 0]
