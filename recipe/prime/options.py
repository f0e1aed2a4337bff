"""Options of PRIME, in addition to those of the main job."""

from dataclasses import dataclass
from typing import Literal

from verl.config.algorithm import AlgorithmConfig
from verl.config.base import Config, option, section
from verl.config.critic import CriticConfig
from verl.config.ppo import PPOConfig


@dataclass
class ImplicitRewardConfig(Config):
    """The implicit process reward model, which takes the critic's place: ``critic.model.path`` is where it starts."""

    ref_path: str | None = None
    """Its frozen reference. Null: ``critic.model.path``, so that all rewards begin at zero."""

    beta: float = option(0.05, above=0)
    """Scale of the log-ratio that is a token's reward."""

    update: Literal["before", "after"] = "before"
    """Learn from the outcomes of a batch before its tokens are rewarded, or after."""

    norm: Literal["batch_norm", "none"] = "batch_norm"
    """``batch_norm``: divide the process rewards of a batch by the largest absolute sum to the end of a response."""


@dataclass
class PrimeCriticConfig(CriticConfig):
    """Training of the process reward model, with every option of a critic."""

    prime: ImplicitRewardConfig = section(ImplicitRewardConfig)
    """How its log-ratios become rewards."""


@dataclass
class PrimeAlgorithmConfig(AlgorithmConfig):
    """From rewards to advantages."""

    reward_gt_coef: float = option(5.0, at_least=0)
    """Weight of how a response's outcome compares with its group."""

    reward_dpo_coef: float = option(5.0, at_least=0)
    """Weight of how its tokens' process rewards compare with its group."""


@dataclass
class PrimeConfig(PPOConfig):
    """Everything about one run of PRIME."""

    critic: PrimeCriticConfig = section(PrimeCriticConfig)
    """The process reward model."""

    algorithm: PrimeAlgorithmConfig = section(PrimeAlgorithmConfig)
    """From rewards to advantages."""
