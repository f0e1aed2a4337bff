"""The plain policy gradient: REINFORCE, and the loss of GPG."""

from typing import Any

from torch import Tensor

from verl.algorithms.losses.common import LossInputs, TokenLoss, builtin_policy_loss
from verl.algorithms.registry import About


@builtin_policy_loss("gpg", "reinforce", about=About("-A log pi", "one step on fresh samples", "arXiv:2504.02546"))
def compute_policy_loss_gpg(x: LossInputs) -> TokenLoss:
    """Raise the probability of what was good: the policy gradient, with no ratio and no bound.

        l_t = -A log pi

    Right for one step on fresh samples. ``gpg`` and ``reinforce`` are the same; GPG's scale is in its advantage.

    Source: Williams 1992, https://doi.org/10.1007/BF00992696; Chu et al. 2025, equation 4 (arXiv:2504.02546).
    """
    return TokenLoss(-x.advantages * x.log_prob)


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient on tokens of another policy: -sg[w] A log pi, w = ``rollout_is_weights`` or 1; all (B, R).

    ``rollout_log_prob`` is read for the metrics only, ``config`` not at all. As ``policy_loss.loss_mode=reinforce``.
    """
    return compute_policy_loss_gpg(
        rollout_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
