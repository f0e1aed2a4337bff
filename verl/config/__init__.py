"""Options of verl: names, types, defaults, meanings and checks, each in one place. See README.md.

One class serves every FSDP variant, so that the plain and the ``FSDP`` name of verl mean the same class here. The
public addresses ``verl.base_config`` and ``verl.workers.config`` lead here too.
"""

from dataclasses import dataclass

from verl.batch import MicroBatching
from verl.compat import missing
from verl.config.actor import ActorConfig, PolicyLossConfig, RefConfig, RefModelConfig
from verl.config.algorithm import AlgorithmConfig, KLControlConfig, PFPPOConfig, RolloutCorrectionConfig
from verl.config.base import Config, ConfigError, ConfigWarning, FreeDict, option, section
from verl.config.critic import CriticConfig, CriticModelConfig
from verl.config.data import DataConfig
from verl.config.engine import FSDPConfig, MixedPrecisionConfig, OptimConfig, Strategy, WrapPolicyConfig
from verl.config.load import check, load_ppo_config, run_from_command_line
from verl.config.megatron import MegatronConfig
from verl.config.ppo import ActorRolloutRefConfig, FusedKernelConfig, ModelConfig, PPOConfig
from verl.config.reward import RewardFunctionConfig, RewardModelConfig
from verl.config.rollout import AgentConfig, MultiTurnConfig, RolloutConfig, SamplingConfig, TraceConfig
from verl.config.trainer import CheckpointConfig, ProfilerConfig, RayInitConfig, TrainerConfig

BaseConfig = Config
FSDPActorConfig = ActorConfig
FSDPCriticConfig = CriticConfig
FSDPCriticModelCfg = CriticModelConfig
FSDPEngineConfig = FSDPConfig
FSDPOptimizerConfig = McoreOptimizerConfig = OptimizerConfig = OptimConfig
McoreEngineConfig = MegatronConfig
HFModelConfig = ModelConfig


@dataclass
class McoreActorConfig(ActorConfig):
    """``ActorConfig`` on megatron-core."""

    strategy: Strategy = "megatron"
    """As ``ActorConfig.strategy``."""


@dataclass
class McoreCriticConfig(CriticConfig):
    """``CriticConfig`` on megatron-core."""

    strategy: Strategy = "megatron"
    """As ``CriticConfig.strategy``."""


@dataclass
class McoreRewardModelConfig(RewardModelConfig):
    """``RewardModelConfig`` on megatron-core."""

    strategy: Strategy = "megatron"
    """As ``RewardModelConfig.strategy``."""


__all__ = [
    "ActorConfig", "ActorRolloutRefConfig", "AgentConfig", "AlgorithmConfig", "BaseConfig", "CheckpointConfig",
    "Config", "ConfigError", "ConfigWarning", "CriticConfig", "CriticModelConfig", "DataConfig", "FSDPActorConfig",
    "FSDPConfig", "FSDPCriticConfig", "FSDPCriticModelCfg", "FSDPEngineConfig", "FSDPOptimizerConfig", "FreeDict",
    "FusedKernelConfig", "HFModelConfig", "KLControlConfig", "McoreActorConfig", "McoreCriticConfig",
    "McoreEngineConfig", "McoreOptimizerConfig", "McoreRewardModelConfig", "MegatronConfig", "MicroBatching",
    "MixedPrecisionConfig", "ModelConfig", "MultiTurnConfig", "OptimConfig", "OptimizerConfig", "PFPPOConfig",
    "PPOConfig", "PolicyLossConfig",
    "ProfilerConfig", "RayInitConfig", "RefConfig", "RefModelConfig", "RewardFunctionConfig", "RewardModelConfig",
    "RolloutConfig", "RolloutCorrectionConfig", "SamplingConfig", "TraceConfig", "TrainerConfig", "WrapPolicyConfig",
    "check", "load_ppo_config", "option", "run_from_command_line", "section",
]  # fmt: skip


def __getattr__(name: str) -> None:
    raise missing(__name__, name)
