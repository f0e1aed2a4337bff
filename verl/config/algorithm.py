"""From rewards to advantages: estimator, discounting, KL penalty."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from verl.config.base import Config, option, section

KLKind = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+", "full",
]  # fmt: skip
"""Estimators of the KL divergence from log-probs of sampled tokens (Schulman 2020,
http://joschu.net/blog/kl-approx.html). ``kl`` = ``k1``: the difference; ``abs``: its absolute value; ``mse`` = ``k2``:
half its square; ``low_var_kl`` = ``k3``: exp(-d) - 1 + d. With ``+``: that value, with the gradient of k2. ``full`` is
no estimate but the sum over the vocabulary, in the loss only."""


@dataclass
class KLControlConfig(Config):
    """Coefficient of the KL penalty in the reward."""

    _target_: ClassVar[str] = "verl.trainer.config.KLControlConfig"

    type: Literal["fixed", "adaptive"] = "fixed"
    """``fixed``, or ``adaptive``: steered towards ``target_kl`` (Ziegler et al. 2019, arXiv:1909.08593)."""

    kl_coef: float = option(0.001, at_least=0)
    """Coefficient; the first one if adaptive. Reward points per nat."""

    horizon: int = option(10000, above=0)
    """Adaptive: over this many responses the coefficient changes by at most about a fifth; larger is slower."""

    target_kl: float = option(0.1, above=0)
    """Adaptive: KL per response token to steer to, in nats."""


@dataclass
class PFPPOConfig(Config):
    """Policy-filtration PPO (Shen & Zhang 2024, arXiv:2409.06957): resample responses by reward before the update."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """How scores become sampling weights."""

    weight_pow: float = 2.0
    """Exponent of ``pow``."""


@dataclass
class AlgorithmConfig(Config):
    """Estimation of advantages and the KL penalty in the reward."""

    _target_: ClassVar[str] = "verl.trainer.config.AlgoConfig"

    gamma: float = option(1.0, at_least=0, at_most=1)
    """Discount per token."""

    lam: float = option(1.0, at_least=0, at_most=1)
    """Bias against variance in GAE: 0 is one-step TD, 1 is Monte Carlo. Source: Schulman et al. 2016
    (arXiv:1506.02438)."""

    adv_estimator: str = "gae"
    """Advantage estimator: gae, grpo, grpo_passk, rloo, remax, reinforce, step_reinforce, agentic_reinforce,
    reinforce_plus_plus, reinforce_plus_plus_baseline, opo, gpg, gdpo, optimal_token_baseline, or a name given to
    ``register_adv_est``. Only ``gae`` needs a critic. Equations and papers: docs/algorithms.md."""

    norm_adv_by_std_in_grpo: bool = True
    """GRPO: divide by the standard deviation of the group. False is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)."""

    step_gamma: float = option(0.95, at_least=0, at_most=1)
    """step_reinforce: discount from turn to turn. Source: Feng et al. 2025 (arXiv:2505.10978)."""

    gdpo_reward_keys: list[str] | None = None
    """gdpo: names of the rewards to combine, which the reward function returns beside ``score``. Source: Liu et al.
    2026 (arXiv:2601.05242)."""

    gdpo_reward_weights: list[float] | None = None
    """gdpo: a weight for each of those rewards. Null: all 1."""

    use_kl_in_reward: bool = False
    """Subtract kl_coef x KL(policy || reference) from the reward of every token. Starts a reference model."""

    kl_penalty: KLKind = "kl"
    """Estimator of that KL; not ``full``, which a reward cannot know. See also ``actor.kl_loss_type``, its sibling for
    the loss."""

    kl_ctrl: KLControlConfig = section(KLControlConfig)
    """Coefficient of that KL. Read only with ``use_kl_in_reward``."""

    use_pf_ppo: bool = False
    """Resample responses by reward before the update (PF-PPO)."""

    pf_ppo: PFPPOConfig = section(PFPPOConfig)
    """Parameters of ``use_pf_ppo``."""
