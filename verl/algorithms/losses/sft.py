"""The loss of supervised fine-tuning: the negative log-likelihood of given tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from verl.algorithms.aggregate import Aggregation, PreparedBatch
from verl.algorithms.losses.actor import Metrics, TokenOutputs
from verl.algorithms.valid_tokens import valid_tokens
from verl.batch.ragged import Column


class SFTLoss:
    """Negative log-likelihood of the tokens that ``response_mask`` marks, averaged over all of a step:

        - sum_it m_it log pi(y_it | x_i, y_i<t) / sum_it m_it

    The divisor counts the tokens of all micro-batches and ranks, so every token of the step weighs the same, however
    rows are packed, split or divided.
    """

    want_entropy = False
    columns = ("response_mask",)
    extra_columns = ()
    averaged_as_loss = None

    def __init__(self) -> None:
        self.aggregation = Aggregation("token-mean", None)

    def weight(self, micro: Mapping[str, Column]) -> Tensor:
        """Return the weight of this micro-batch's mean, as a scalar."""
        return self.aggregation.weight(micro["response_mask"])

    def prepare(self, batch: Any, gather: Any) -> PreparedBatch:
        """Return the mini-batch as it is."""
        return PreparedBatch(batch, self.aggregation.is_sum)

    def __call__(self, out: TokenOutputs, micro: Mapping[str, Column]) -> tuple[Tensor, Metrics]:
        """Return the mean loss of a micro-batch and its metrics."""
        assert out.log_probs is not None
        tokens = valid_tokens(micro["response_mask"])
        loss = self.aggregation.mean(-tokens.pack(out.log_probs), tokens)
        return loss, {"train/loss": loss.detach()}
