"""Kimi k1.5: the policy gradient with the squared log-ratio of the response as a penalty."""

from verl.algorithms.losses.common import LossInputs, TokenLoss, builtin_policy_loss
from verl.algorithms.registry import About


@builtin_policy_loss(
    "kimi15",
    about=About(
        "-A log pi + tau/2 D log w, D the sum of log w over the response",
        "mirror descent, several steps a batch; `loss_agg_mode=seq-mean-token-sum`",
        "arXiv:2501.12599",
        options="actor.policy_loss.kimi15_tau",
    ),
)
def compute_policy_loss_kimi15(x: LossInputs) -> TokenLoss:
    """The policy gradient, held back by the squared log-ratio of the response: policy mirror descent.

    With D_i = sum_t log w_it,

        sum_t l_it = -A_i log pi(y_i) + tau/2 D_i^2,      l_it = -A_it log pi_it + tau/2 D_i log w_it

    Published as a mean over responses of this sum, ``loss_agg_mode=seq-mean-token-sum``, with A the score above the
    group's mean (``grpo`` with ``norm_adv_by_std_in_grpo=False``). D grows with the length: tau is small.

    Source: Kimi k1.5, 2025, equation 3 (arXiv:2501.12599).
    """
    # uncut, as its square must pull back whatever the distance
    pull = x.config.policy_loss.kimi15_tau * x.to_tokens(x.row_sum(x.difference))
    # D holds every token: the derivative of the sum is twice that of the token's own share
    value = -x.advantages * x.log_prob.detach() + pull / 2 * x.difference
    return TokenLoss(x.with_gradient(value, dloss_dlogp=pull - x.advantages))
