"""TIS: truncated importance sampling, with the probabilities of the rollout engine."""

from verl.algorithms.losses.common import LossInputs, TokenLoss, builtin_policy_loss
from verl.algorithms.registry import About


@builtin_policy_loss(
    "tis",
    about=About(
        "-sg[clip(pi / mu, lower, upper)] A log pi, mu as the sampler saw it",
        "old samples, or an engine with other numerics; needs `rollout.calculate_log_probs=true`",
        "arXiv:1802.01561",
        options="actor.policy_loss.tis_lower_bound actor.policy_loss.tis_upper_bound",
    ),
    columns=("rollout_log_probs",),
)
def compute_policy_loss_tis(x: LossInputs) -> TokenLoss:
    """The policy gradient on samples of another policy, by importance weights that are cut where they would explode.

        l_t = -sg[clip(pi / mu, tis_lower_bound, tis_upper_bound)] A log pi

    mu is what the rollout engine says it sampled with, so the weight repairs both stale samples and an engine whose
    numbers differ from the trainer's. ROLL takes pi_old for mu; the two agree where engine and trainer do.

    Source: Espeholt et al. 2018, IMPALA, section 4.1 (arXiv:1802.01561).
    """
    options = x.config.policy_loss
    low, high = options.tis_lower_bound, options.tis_upper_bound
    # gaps have ratio 1, which bounds may exclude: `is_valid` keeps them out of the clip fractions
    ratio = (x.log_prob.detach() - x.columns["rollout_log_probs"]).clamp(-20, 20).exp()
    losses = -ratio.clamp(low, high) * x.advantages * x.log_prob
    return TokenLoss(losses, x.is_valid & (ratio > high), x.is_valid & (ratio < low))
