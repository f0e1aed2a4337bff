"""Options of online DPO, in addition to those of the main job."""

from dataclasses import dataclass
from typing import Literal

from verl.config.actor import ActorConfig
from verl.config.base import option, section
from verl.config.ppo import ActorRolloutRefConfig, PPOConfig
from verl.config.trainer import TrainerConfig


@dataclass
class SpinActorConfig(ActorConfig):
    """Training of the policy by preference pairs of its own responses."""

    dpo_beta: float = option(0.1, above=0)
    """Strength of the constraint to the reference. Source: Rafailov et al. 2023 (arXiv:2305.18290)."""

    dpo_loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """``sigmoid``: DPO; ``ipo``: a squared error to a margin (Azar et al. 2023, arXiv:2310.12036)."""

    dpo_label_smoothing: float = option(0.0, at_least=0, below=0.5)
    """sigmoid: share of pairs that are taken to be the wrong way round."""


@dataclass
class SpinActorRolloutRefConfig(ActorRolloutRefConfig):
    """The roles that share the policy's weights."""

    actor: SpinActorConfig = section(SpinActorConfig)
    """Training of the policy."""


@dataclass
class SpinTrainerConfig(TrainerConfig):
    """The run."""

    ref_update_freq: int = option(1, at_least=0)
    """Make the policy the reference every so many steps. 0: the reference stays the initial model."""


@dataclass
class SpinConfig(PPOConfig):
    """Everything about one run of online DPO."""

    actor_rollout_ref: SpinActorRolloutRefConfig = section(SpinActorRolloutRefConfig)
    """The policy: training, sampling, reference."""

    trainer: SpinTrainerConfig = section(SpinTrainerConfig)
    """The run: length, hardware, logging, checkpoints."""
