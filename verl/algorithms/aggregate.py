"""From a loss per token to one number, and what that number was divided by.

Holds the five ``loss_agg_mode``s; independent of the loss.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.algorithms.registry import About, Registry
from verl.algorithms.valid_tokens import valid_tokens
from verl.batch.ragged import Column, Ragged


class AggMode(NamedTuple):
    """One way to aggregate.

    ``total`` maps the sums (B,) and counts (B,) of each row to what is added up over rows; ``weight`` maps the counts
    to what that total is divided by. The loss is total / weight. Both must be additive over rows: then cutting a
    batch anywhere and averaging the parts' losses by their weights gives the loss of the whole.
    """

    total: Callable[[Tensor, Tensor], Tensor]
    weight: Callable[[Tensor], Tensor]
    divides_by_width: bool = False


AGG_MODES: Registry[AggMode] = Registry(
    "loss_agg_mode",
    "AGG_MODES.register(name)(AggMode(total, weight))",
    test="test_aggregate.py::test_loss_and_weight_of_each_mode_by_hand",
)


def _sum(row_sums: Tensor, counts: Tensor) -> Tensor:
    return row_sums.sum()


def _sum_of_means(row_sums: Tensor, counts: Tensor) -> Tensor:
    # a row without tokens has sum 0: divided by 1 it adds nothing, by 0 it would add NaN
    return (row_sums / counts.clamp(min=1)).sum()


def _tokens(counts: Tensor) -> Tensor:
    return counts.sum()


def _sequences(counts: Tensor) -> Tensor:
    return (counts > 0).sum()


def _one(counts: Tensor) -> Tensor:
    return torch.ones((), device=counts.device)


AGG_MODES.register(
    "token-mean",
    about=About("sum over all tokens / number of tokens", "the default: every token alike (DAPO)", "arXiv:2503.14476"),
)(AggMode(_sum, _tokens))
AGG_MODES.register(
    "seq-mean-token-sum",
    about=About(
        "sum over all tokens / number of responses",
        "the policy gradient as it is derived: long responses count more",
        "[Williams 1992](https://doi.org/10.1007/BF00992696)",
    ),
)(AggMode(_sum, _sequences))
AGG_MODES.register(
    "seq-mean-token-mean",
    about=About(
        "mean over responses of their token mean",
        "every response alike (GRPO's paper): tokens of long ones count less",
        "arXiv:2402.03300",
    ),
)(AggMode(_sum_of_means, _sequences))
AGG_MODES.register(
    "seq-mean-token-sum-norm",
    about=About(
        "sum over all tokens / R; in a training step the mean of that over responses",
        "every token alike, by a constant (Dr. GRPO)",
        "arXiv:2503.20783",
        options="actor.loss_scale_factor",
    ),
)(AggMode(_sum, _one, divides_by_width=True))
AGG_MODES.register(
    "token-sum",
    about=About(
        "sum over all tokens", "large batches: no divisor", "[Williams 1992](https://doi.org/10.1007/BF00992696)"
    ),
)(AggMode(_sum, _one))


def agg_loss(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, loss_scale_factor: float | None = None) -> Tensor:
    """Aggregate a loss per token into a scalar. With l_it the loss of token t of response i, over unmasked tokens:

        token-mean               sum_it l_it / number of tokens                     every token counts the same
        seq-mean-token-sum       sum_it l_it / number of responses                  long responses count more
        seq-mean-token-mean      sum_i (mean_t l_it) / number of responses          every response counts the same
        seq-mean-token-sum-norm  sum_it l_it / R                                    a constant divisor
        token-sum                sum_it l_it                                        no divisor: grows with the batch

    A response without a token is not a response: it is in no sum and no count. A batch without tokens costs zero.

    Args:
        loss_mat: (B, R) float; what stands in masked positions is ignored.
        loss_mask: (B, R); 1 on tokens that count.
        loss_scale_factor: tokens; the divisor of ``seq-mean-token-sum-norm``. Default R, the width of ``loss_mat``:
            pass the configured response length where that width varies.

    Raises:
        ValueError: unknown mode.

    Source: token-mean: Yu et al. 2025, DAPO (arXiv:2503.14476); seq-mean-token-mean: Shao et al. 2024
    (arXiv:2402.03300); constant divisor: Liu et al. 2025, Dr. GRPO (arXiv:2503.20783).
    """
    tokens = valid_tokens(loss_mask)
    row_sums = tokens.row_sum(tokens.pack(loss_mat))  # packing drops masked positions, even NaN
    # micro-batches are trimmed, so this width varies: `Aggregation.mean` puts the configured length in its place
    return agg_rows(row_sums, tokens.lengths, loss_agg_mode, loss_scale_factor or loss_mat.shape[-1])


def agg_rows(row_sums: Tensor, counts: Tensor, loss_agg_mode: str, loss_scale_factor: float) -> Tensor:
    """``agg_loss`` from the sum (B,) and the number of unmasked tokens (B,) of each row."""
    mode = AGG_MODES[loss_agg_mode]
    # a micro-batch without a token has weight 0: its loss must be 0, not NaN
    loss = mode.total(row_sums, counts) / mode.weight(counts).clamp(min=1)
    return loss / loss_scale_factor if mode.divides_by_width else loss


def agg_weight(loss_mask: Column, loss_agg_mode: str) -> Tensor:
    """Return the divisor of ``agg_loss`` as a scalar: tokens, responses with a token, or 1.

    Over the parts of a batch, sum(weight * loss) / W is the loss of the whole, where W is the weight of the whole:
    the sum of the parts' weights, or 1 for ``seq-mean-token-sum-norm`` and ``token-sum``, whose parts simply add up.
    """
    counts = valid_tokens(loss_mask).lengths if isinstance(loss_mask, Ragged) else loss_mask.sum(-1)
    return AGG_MODES[loss_agg_mode].weight(counts)


class Aggregation:
    """A ``loss_agg_mode`` made into a mean with a weight, for micro-batches of any width."""

    def __init__(self, loss_agg_mode: str, response_length: int | None, loss_scale_factor: int | None = None):
        self.mode = loss_agg_mode
        self.has_constant_divisor = AGG_MODES[loss_agg_mode].divides_by_width
        self.is_sum = loss_agg_mode == "token-sum"
        # a sum depends on how many tokens a micro-batch holds, a mean does not: the engine multiplies at the end
        self.mode_of_mean = "token-mean" if self.is_sum else self.mode
        # never the width of a tensor: that is the longest response of one micro-batch
        self.divisor = loss_scale_factor or response_length
        if self.has_constant_divisor and not self.divisor:
            raise ValueError(
                f"loss_agg_mode={loss_agg_mode} divides by the response length, and response_length="
                f"{response_length} was given: micro-batches are trimmed, so their width will not do. "
                f"Pass response_length (data.max_response_length), or choose another mode."
            )

    def weight(self, mask: Column) -> Tensor:
        """Tokens or responses; responses too where parts are divided by a constant, to make a mean of that sum."""
        return agg_weight(mask, "seq-mean-token-sum" if self.has_constant_divisor else self.mode_of_mean)

    def mean(self, losses: Tensor, tokens: Any) -> Tensor:
        """Aggregate packed losses of the valid tokens ``tokens`` into the mean that ``weight`` belongs to."""
        loss = agg_rows(tokens.row_sum(losses), tokens.lengths, self.mode_of_mean, tokens.shape[-1])
        return self.rescaled(loss, tokens)

    def rescaled(self, loss: Tensor, tokens: Any) -> Tensor:
        """Turn what ``agg_loss`` gave in ``mode_of_mean`` into the mean that ``weight`` belongs to.

        Only ``seq-mean-token-sum-norm`` changes: from a sum over this micro-batch's width to a mean over responses of
        the token sum over the configured divisor, as Dr. GRPO has it.
        """
        if not self.has_constant_divisor:
            return loss
        # agg_loss divided by the width of this micro-batch, which is trimmed to its longest response
        responses = AGG_MODES["seq-mean-token-sum"].weight(tokens.lengths)
        return loss * (tokens.shape[-1] / self.divisor) / responses.clamp(min=1)


class PreparedBatch(NamedTuple):
    """A mini-batch with the columns that a loss adds before its micro-batches run."""

    data: Any
    """The ``DataProto`` of this rank's rows."""
    is_sum: bool = False
    """The loss is the sum over the mini-batch: the engine multiplies the mean by the sum of all weights."""
