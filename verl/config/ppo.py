"""The root of the configuration of ``verl.trainer.main_ppo``. Checks that span sections are in ``checks/``."""

from dataclasses import dataclass
from typing import Any

from verl.config.actor import ActorConfig, RefConfig
from verl.config.algorithm import AlgorithmConfig
from verl.config.base import Config, option, section
from verl.config.critic import CriticConfig
from verl.config.data import DataConfig
from verl.config.model import ModelConfig
from verl.config.reward import RewardFunctionConfig, RewardModelConfig
from verl.config.rollout import RolloutConfig
from verl.config.trainer import ProfilerConfig, RayInitConfig, TrainerConfig

# keys of sections that messages name again and again
ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
MODEL, RM = "actor_rollout_ref.model", "reward_model"
SHAPING, CORRECTION = "algorithm.reward_shaping", "algorithm.rollout_correction"


@dataclass
class ActorRolloutRefConfig(Config):
    """The roles that share the policy's weights."""

    actor: ActorConfig = section(ActorConfig)
    """Training of the policy."""

    ref: RefConfig = section(RefConfig)
    """The frozen reference policy."""

    rollout: RolloutConfig = section(RolloutConfig)
    """Sampling of responses."""

    hybrid_engine: bool = True
    """Training and sampling share the same devices and take turns. False: sampling has devices and processes of its
    own (``rollout.nnodes``, ``rollout.n_gpus_per_node``) apart from those of ``trainer``, and gets their weights."""

    nccl_timeout: int = option(600, above=0)
    """Seconds a collective between workers may take before they give up (gloo's timeout too)."""

    model: ModelConfig = section(ModelConfig)
    """Model of actor, rollout and reference."""

    profiler: ProfilerConfig = section(ProfilerConfig)
    """Profiling of these roles."""


@dataclass
class PPOConfig(Config):
    """Everything about one run of PPO and its relatives."""

    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    """The policy: training, sampling, reference."""

    trainer: TrainerConfig = section(TrainerConfig)
    """The run: length, hardware, logging, checkpoints."""

    data: DataConfig = section(DataConfig)
    """Prompts: files, columns, lengths, batches."""

    critic: CriticConfig = section(CriticConfig)
    """The value model."""

    reward_model: RewardModelConfig = section(RewardModelConfig)
    """Scoring: manager and reward model."""

    custom_reward_function: RewardFunctionConfig = section(RewardFunctionConfig)
    """Scoring function of the user's."""

    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    """From rewards to advantages."""

    ray_init: RayInitConfig = section(RayInitConfig)
    """How Ray is started."""

    @property
    def uses_critic(self) -> bool:
        """Is there a value model?"""
        if self.critic.enable is not None:
            return self.critic.enable
        return self.algorithm.adv_estimator == "gae"

    @property
    def uses_reference(self) -> bool:
        """Is there a reference policy?"""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def prompts_per_update(self) -> int:
        """Prompts one training step trains on."""
        return self.data.train_batch_size if self.algorithm.filter_groups.enable else self.data.prompts_per_step

    @property
    def compares_distributions(self) -> bool:
        """Does the update compare whole distributions with the reference's?"""
        actor = self.actor_rollout_ref.actor
        return actor.use_kl_loss and actor.kl_loss_type == "full"

    @property
    def scores_reference(self) -> bool:
        """Does the reference score log-probs in a pass of its own?"""
        return self.algorithm.use_kl_in_reward or self.uses_reference and not self.compares_distributions

    @property
    def rewrites_for_reward_model(self) -> bool:
        """Does the reward model read conversations in its own chat template?"""
        return self.reward_model.enable and bool(self.reward_model.model.input_tokenizer)

    @property
    def data_seed(self) -> int:
        """Seed of the shuffling of prompts."""
        return self.trainer.seed if self.data.seed is None else self.data.seed

    @property
    def rollout_processes(self) -> list[int]:
        """Processes that sample, by node: those of training, or with ``hybrid_engine=false`` those apart from them."""
        rollout, trainer = self.actor_rollout_ref.rollout, self.trainer
        if self.actor_rollout_ref.hybrid_engine:
            return [trainer.n_gpus_per_node] * trainer.nnodes
        return [rollout.n_gpus_per_node or trainer.n_gpus_per_node] * rollout.nnodes

    @property
    def rollout_beside(self) -> int:
        """Processes that only sample, in addition to those of ``trainer``."""
        return 0 if self.actor_rollout_ref.hybrid_engine else sum(self.rollout_processes)

    def dp_size(self, role: Any) -> int:
        """Data-parallel ranks of a role's section (``actor``, ``ref``, ``critic`` or ``reward_model``)."""
        return max(1, self.trainer.world_size // role.ulysses_sequence_parallel_size)
