"""GAE: generalized advantage estimation, with a critic."""

from torch import Tensor

from verl.algorithms.advantages.common import builtin_estimator, pack_finite, whiten
from verl.algorithms.valid_tokens import tokens_of


@builtin_estimator(
    "gae",
    "whiten(sum_k (gamma lam)^k delta_(t+k)), delta_t = r_t + gamma V_(t+1) - V_t",
    "PPO proper: dense rewards, long responses; trains a critic, too",
    "arXiv:1506.02438",
    "algorithms/advantages/test_gae.py::test_gae_of_a_batch_with_a_hole_by_hand",
    options="algorithm.gamma algorithm.lam algorithm.advantage.whiten",
    ragged=True,
)
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
    whiten_advantages: bool = True,
) -> tuple[Tensor, Tensor]:
    """Judge a token by the discounted sum of the surprises that follow it.

    With V the critic's value before each token and delta_t = r_t + gamma V_(t+1) - V_t the surprise at token t,

        A_t = sum_k (gamma lam)^k delta_(t+k),      return_t = A_t + V_t,      V = 0 after the last token.

    lam = 0 trusts the critic, lam = 1 only what happened. Masked tokens are skipped, not waited for: the token before
    a tool's output is followed by the token after it. Advantages are then whitened over all tokens of the batch.

    Args:
        token_level_rewards: (B, R) float; only unmasked tokens are read.
        values: (B, R) float.
        response_mask: (B, R); 1 on tokens the policy sampled; holes allowed.
        gamma, lam: discount and trace decay, both in [0, 1].
        whiten_advantages: False leaves the advantages as the sum gave them.

    Returns:
        advantages, returns: (B, R), zero where masked. Advantages have mean 0 and variance 1 over the tokens; returns
        are left as they are, since the critic learns them.

    Raises:
        NonFiniteError: a reward or value of an unmasked token is NaN or infinite.

    Source: Schulman et al. 2016, section 3 (arXiv:1506.02438).
    """
    tokens = tokens_of(response_mask)
    r = pack_finite("token_level_rewards", token_level_rewards, tokens)
    v = pack_finite("values", values, tokens)
    # packed: the token after a tool's output follows the one before it, and the last value of a row is followed by 0
    delta = r + gamma * tokens.next(v) - v
    advantages = tokens.suffix_sum(delta, gamma * lam)
    returns = advantages + v  # before whitening: the critic learns rewards, not their scale
    advantages = whiten(advantages, tokens) if whiten_advantages else advantages
    return tokens.unpack(advantages), tokens.unpack(returns)
