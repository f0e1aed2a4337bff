"""YAML of the entry points, and the public names of the option classes that belong to the trainer.

The classes are those of ``verl.config``; the names are the ones user code knows from verl.
"""

from verl.config.algorithm import AlgorithmConfig as AlgoConfig
from verl.config.algorithm import KLControlConfig, PFPPOConfig, RolloutCorrectionConfig
from verl.config.ppo import ModelConfig as BaseModelConfig
from verl.config.ppo import PPOConfig
from verl.config.reward import RewardModelConfig, SandboxFusionConfig
from verl.config.trainer import CheckpointConfig, NPUProfileConfig, ProfilerConfig, RayInitConfig, TrainerConfig

__all__ = [
    "AlgoConfig",
    "BaseModelConfig",
    "CheckpointConfig",
    "KLControlConfig",
    "NPUProfileConfig",
    "PFPPOConfig",
    "PPOConfig",
    "ProfilerConfig",
    "RayInitConfig",
    "RewardModelConfig",
    "RolloutCorrectionConfig",
    "SandboxFusionConfig",
    "TrainerConfig",
]
