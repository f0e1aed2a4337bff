"""DRO: the policy gradient with the squared log-ratio of the token as a penalty."""

from verl.algorithms.losses.common import LossInputs, TokenLoss, builtin_policy_loss
from verl.algorithms.registry import About


@builtin_policy_loss(
    "dro",
    about=About(
        "-A log pi + beta/2 (log w)^2",
        "the same, token by token",
        "arXiv:2405.19107",
        options="actor.policy_loss.dro_beta",
    ),
)
def compute_policy_loss_dro(x: LossInputs) -> TokenLoss:
    """The policy gradient, held back by the squared log-ratio of each token: direct reward optimization.

        l_t = -A log pi + beta/2 (log w)^2

    Its minimum over log pi is at log w = A / beta: how far a token may move is in proportion to its advantage, with no
    bound beyond which it is not pulled back. In the paper one log-ratio of the response stands for the tokens' and the
    advantage is the score above a learned value; tokens are verl's form.

    Source: Richemond et al. 2024 (arXiv:2405.19107).
    """
    # not `difference`, which is a constant: here the penalty must pull
    distance = x.log_prob - x.old_log_prob
    return TokenLoss(-x.advantages * x.log_prob + x.config.policy_loss.dro_beta / 2 * distance.square())
