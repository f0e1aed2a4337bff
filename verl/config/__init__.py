"""Options of verl: names, types, defaults, meanings and checks, each in one place. See README.md."""

from verl.batch import MicroBatching
from verl.config.actor import ActorConfig, PolicyLossConfig, RefConfig, RefModelConfig
from verl.config.algorithm import AlgorithmConfig, KLControlConfig, PFPPOConfig, RolloutCorrectionConfig
from verl.config.base import Config, ConfigError, ConfigWarning, FreeDict, option, section
from verl.config.critic import CriticConfig, CriticModelConfig
from verl.config.data import DataConfig
from verl.config.engine import FSDPConfig, MixedPrecisionConfig, OptimConfig, WrapPolicyConfig
from verl.config.load import check, load_ppo_config, run_from_command_line
from verl.config.model import ModelConfig
from verl.config.ppo import ActorRolloutRefConfig, PPOConfig
from verl.config.reward import RewardFunctionConfig, RewardModelConfig
from verl.config.rollout import RolloutConfig, SamplingConfig
from verl.config.trainer import CheckpointConfig, ProfilerConfig, RayInitConfig, TrainerConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "ConfigWarning",
    "CriticConfig",
    "CriticModelConfig",
    "DataConfig",
    "FSDPConfig",
    "FreeDict",
    "KLControlConfig",
    "MicroBatching",
    "MixedPrecisionConfig",
    "ModelConfig",
    "OptimConfig",
    "PFPPOConfig",
    "PPOConfig",
    "PolicyLossConfig",
    "ProfilerConfig",
    "RayInitConfig",
    "RefConfig",
    "RefModelConfig",
    "RewardFunctionConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "SamplingConfig",
    "TrainerConfig",
    "WrapPolicyConfig",
    "check",
    "load_ppo_config",
    "option",
    "run_from_command_line",
    "section",
]
