"""SPPO: the log-ratio of a response is fitted to how often it is preferred."""

from verl.algorithms.losses.common import LossInputs, TokenLoss, builtin_policy_loss
from verl.algorithms.registry import About


@builtin_policy_loss(
    "sppo",
    about=About(
        "(D - eta A)^2, D the sum of log w over the response, A its win rate less 1/2",
        "self-play on preferences; goes with `adv_estimator=sppo` and `loss_agg_mode=seq-mean-token-sum`",
        "arXiv:2405.00675",
        options="actor.policy_loss.sppo_eta",
    ),
    loss_agg_mode="seq-mean-token-sum",
)
def compute_policy_loss_sppo(x: LossInputs) -> TokenLoss:
    """Move the log-ratio of a response to eta times the probability that it is preferred, less one half.

    With D_i = sum_t log w_it and A_i the advantage of the response (the mean over its tokens, which share it),

        sum_t l_it = (D_i - eta A_i)^2,      l_it = (D_i - eta A_i)^2 / T_i

    Published as a mean over responses, ``loss_agg_mode=seq-mean-token-sum``, with pi_old the policy of the iteration
    and A_i = P(y_i preferred to pi_old) - 1/2, which ``adv_estimator=sppo`` estimates. Unlike DPO it also lowers what
    is rejected by itself, not only relative to what is chosen.

    Source: Wu et al. 2024, equation 4.4 (arXiv:2405.00675).
    """
    eta = x.config.policy_loss.sppo_eta
    error = x.row_sum(x.difference) - eta * x.row_mean(x.advantages)
    tokens = x.valid_tokens.lengths.clamp(min=1)
    # the sum over a response depends on every token by the whole error, so the slope is not divided by T_i
    return TokenLoss(x.with_gradient(x.to_tokens(error.square() / tokens), dloss_dlogp=2 * x.to_tokens(error)))
