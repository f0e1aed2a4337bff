"""The critic's loss: clipped squared error to the returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.algorithms.aggregate import Aggregation, PreparedBatch, agg_rows
from verl.algorithms.losses.actor import Metrics, TokenOutputs
from verl.algorithms.valid_tokens import valid_tokens
from verl.batch.ragged import Column

if TYPE_CHECKING:
    from verl.config.critic import CriticConfig


def compute_value_loss(
    vpreds: Column,
    returns: Column,
    values: Column,
    response_mask: Column,
    cliprange_value: float | None,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor]:
    """Fit the returns, but do not leave the values the advantages were computed with too fast.

        max((V - return)^2, (clip(V, V_old - c, V_old + c) - return)^2) / 2

    The gradient, written down: V - return, or zero where the clipped term is the greater, which does not move with V.

    Args:
        vpreds: (B, R) float; V, the critic's present prediction; differentiable.
        returns, values: (B, R) float; the target, and V_old.
        response_mask: (B, R); 1 on tokens that count. Masked positions have no influence and get no gradient. All
            may be without padding, as `Ragged`.
        cliprange_value: c, in units of the return; None: the first square alone.
        loss_agg_mode: see ``agg_loss``.

    Returns:
        scalars: loss, and the share of tokens where the clipped term decided.

    Source: the PPO implementation of Schulman et al. 2017; see Huang et al. 2022, detail 9 of
    https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/
    """
    tokens = valid_tokens(response_mask)
    v, target, old = tokens.pack(vpreds), tokens.pack(returns), tokens.pack(values)
    with torch.no_grad():
        error = v - target
        bounded = v if cliprange_value is None else torch.clamp(v, old - cliprange_value, old + cliprange_value)
        clipped_error = bounded - target
        # strictly: where both are equal the gradient stays
        is_clipped = clipped_error.abs() > error.abs()
        losses = 0.5 * torch.maximum(error.square(), clipped_error.square())
        slope = error * ~is_clipped
    losses = losses + slope * (v - v.detach())  # adds 0 to the value, the slope to the gradient
    # the width of this micro-batch: `ValueLoss` puts the configured length in its place
    loss = agg_rows(tokens.row_sum(losses), tokens.lengths, loss_agg_mode, response_mask.shape[-1])
    return loss, tokens.mean(is_clipped)


class ValueLoss:
    """The critic's loss: clipped squared error to the returns.

    Args:
        config: the ``critic`` section.
        response_length: tokens; needed for ``seq-mean-token-sum-norm`` only.
    """

    want_entropy = False
    columns = ("values", "returns", "response_mask")
    extra_columns = ()
    averaged_as_loss = frozenset({"critic/vf_loss"})

    def __init__(self, config: CriticConfig, response_length: int | None = None):
        self.config = config
        self.aggregation = Aggregation(config.loss_agg_mode, response_length)

    def weight(self, micro: Mapping[str, Column]) -> Tensor:
        """Return the weight of this micro-batch's mean, as a scalar."""
        return self.aggregation.weight(micro["response_mask"])

    def prepare(self, batch: Any, gather: Any) -> PreparedBatch:
        """Return the mini-batch as it is."""
        return PreparedBatch(batch, self.aggregation.is_sum)

    def __call__(self, out: TokenOutputs, micro: Mapping[str, Column]) -> tuple[Tensor, Metrics]:
        """Return the mean loss of a micro-batch and its metrics; ``columns`` are without padding, or each (b, r)."""
        mask = micro["response_mask"]
        tokens = valid_tokens(mask)
        loss, clipfrac = compute_value_loss(
            out.values,
            micro["returns"],
            micro["values"],
            mask,
            self.config.cliprange_value,
            self.aggregation.mode_of_mean,
        )
        loss = self.aggregation.rescaled(loss, tokens)
        return loss, {
            "critic/vf_loss": loss.detach(),
            "critic/vf_clipfrac": clipfrac,
            "critic/vpred_mean": tokens.mean(tokens.pack(out.values.detach())),
        }
