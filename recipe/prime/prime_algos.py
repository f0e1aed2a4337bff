"""PRIME's mathematics: the advantage from outcome and process rewards, and the loss of the process reward model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from verl.algorithms.advantages.common import Groups, outcome_scores, pack_finite, whiten
from verl.algorithms.aggregate import PreparedBatch, agg_weight
from verl.algorithms.losses.actor import Metrics, TokenOutputs
from verl.algorithms.valid_tokens import ValidTokens, valid_tokens


@torch.no_grad()
def compute_prime_advantage(
    token_level_rewards: Tensor,
    rm_scores: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    config: Any,
    gamma: float = 1.0,
    whiten_advantages: bool = True,
) -> tuple[Tensor, Tensor]:
    """Judge a token by its response's outcome and by the process rewards from it on, each against the group.

        A_it = c_o (s_i - mean_(j != i) s_j) + c_p sum_(k >= t) gamma^(k-t) (r_ik - mean_(j != i) mean_t r_jt)

    whitened over the tokens of the batch; s the outcome, r the process rewards, c_o ``reward_gt_coef`` and c_p
    ``reward_dpo_coef``. A response alone in its group is compared with zero.

    Args:
        token_level_rewards: (B, R) float; a response's outcome is the sum over its tokens.
        rm_scores: (B, R) float, process rewards.
        response_mask: (B, R); 1 on tokens the policy sampled.
        index: (B,) prompt ids; equal ids are one group.
        config: the ``algorithm`` section.

    Returns:
        advantages, returns: (B, R), zero where masked.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Source: Cui et al. 2025, PRIME, equation 5 (arXiv:2502.01456).
    """
    groups, tokens = Groups(index, token_level_rewards.device), ValidTokens(response_mask)

    def against_others(x: Tensor) -> Tensor:
        """Return the mean of x, (B,), over the others of each response's group; 0 for one alone."""
        return (groups.sum(x) - x) / (groups.sizes - 1).clamp(min=1)

    outcomes = outcome_scores(token_level_rewards)
    process = pack_finite("rm_scores", rm_scores, tokens).double()
    means = tokens.row_sum(process) / tokens.lengths.clamp(min=1)
    to_go = tokens.suffix_sum(process - tokens.repeat(against_others(means)), gamma)
    returns = config.reward_dpo_coef * to_go
    returns = returns + config.reward_gt_coef * tokens.repeat(outcomes - against_others(outcomes))
    advantages = whiten(returns, tokens) if whiten_advantages else returns
    dtype = token_level_rewards.dtype
    return tokens.unpack(advantages.to(dtype)), tokens.unpack(returns.to(dtype))


def batch_norm(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Divide process rewards (B, R) by the largest absolute sum from a token to the end of its response."""
    masked = torch.where(response_mask != 0, rewards, 0)
    to_go = masked.flip(-1).cumsum(-1).flip(-1)
    return masked / (to_go.abs().max() + 1e-6)


class ImplicitRewardLoss:
    """Cross-entropy of the outcome: a response succeeds with probability sigmoid(beta sum_t (log pi - log ref)).

    Fitted to outcomes alone, beta (log pi - log ref) of each token is its process reward (Yuan et al. 2024,
    arXiv:2412.01981). The label is the sum of ``token_level_scores``, in [0, 1].
    """

    want_entropy = want_full_kl = False
    columns = ("response_mask", "prime_ref_log_probs", "token_level_scores")
    extra_columns = ()
    averaged_as_loss = None

    def __init__(self, beta: float):
        self.beta = beta

    def weight(self, micro: Mapping[str, Any]) -> Tensor:
        """Return the responses with a token, as a scalar."""
        return agg_weight(micro["response_mask"], "seq-mean-token-sum")

    def prepare(self, batch: Any, gather: Any) -> PreparedBatch:
        """Return the mini-batch as it is."""
        return PreparedBatch(batch)

    def __call__(self, out: TokenOutputs, micro: Mapping[str, Any]) -> tuple[Tensor, Metrics]:
        """Return the mean cross-entropy over the responses of a micro-batch, a scalar, and its metrics."""
        assert out.log_probs is not None
        tokens = valid_tokens(micro["response_mask"])
        ratios = tokens.pack(out.log_probs) - tokens.pack(micro["prime_ref_log_probs"]).to(out.log_probs)
        logits, is_row = self.beta * tokens.row_sum(ratios), tokens.lengths > 0
        labels = tokens.row_sum(tokens.pack(micro["token_level_scores"])).to(logits)
        losses = binary_cross_entropy_with_logits(logits, labels, reduction="none")
        rows = is_row.sum().clamp(min=1)
        loss = torch.where(is_row, losses, 0).sum() / rows
        right = ((logits > 0) == (labels > 0.5)) & is_row
        return loss, {"critic/prime_loss": loss.detach(), "critic/prime_accuracy": right.sum() / rows}
