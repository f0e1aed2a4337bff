"""KL-Cov: the unclipped objective, with a penalty on tokens of highest covariance (see ``clip_cov``)."""

from typing import Any

from torch import Tensor

from verl.algorithms.losses.clip_cov import as_mask, covariance
from verl.algorithms.losses.common import LossInputs, TokenLoss, builtin_policy_loss
from verl.algorithms.registry import About


def choose_kl_cov(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: Any) -> Tensor:
    """Choose the tokens that are penalised: (T,) each, in any order, to (T,) bool."""
    count = min(max(int(config.policy_loss.kl_cov_ratio * len(log_prob)), 1), len(log_prob))
    return as_mask(covariance(log_prob, advantages).topk(count).indices, log_prob)


@builtin_policy_loss(
    "kl_cov",
    about=About(
        "-w A, and + coef |log w| for those of highest covariance",
        "the same, more gently",
        "arXiv:2505.22617",
        "algorithms/losses/test_every_loss.py::test_loss_by_hand_in_a_batch_and_alone",
        options="actor.policy_loss.kl_cov_ratio actor.policy_loss.ppo_kl_coef",
    ),
    choose=choose_kl_cov,
)
def compute_policy_loss_kl_cov(x: LossInputs) -> TokenLoss:
    """The unclipped objective, with a penalty on moving the tokens of highest covariance.

        l_t = -w A + ppo_kl_coef |log w| if the token is selected, -w A otherwise

    Selected are the ``kl_cov_ratio`` of all tokens, at least one, of highest covariance. The penalty holds from the
    second optimizer step on a batch on: at w = 1 it has no slope.
    """
    is_selected = x.selected_tokens(choose_kl_cov)
    free, penalty = -x.advantages * x.ratio, x.config.policy_loss.ppo_kl_coef * is_selected
    dloss_dlogp = free + penalty * x.log_ratio.sign()
    return TokenLoss(x.with_gradient(free + penalty * x.log_ratio.abs(), dloss_dlogp), is_selected)
