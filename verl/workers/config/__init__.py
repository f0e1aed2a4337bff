"""Public names of the option classes that belong to workers; the classes are those of ``verl.config``.

One class serves every FSDP variant, so the plain and the ``FSDP`` name of verl mean the same class here.
"""

from verl.compat import missing
from verl.config.actor import ActorConfig, PolicyLossConfig, RefConfig, RefModelConfig
from verl.config.critic import CriticConfig, CriticModelConfig
from verl.config.engine import FSDPConfig, MixedPrecisionConfig, OptimConfig, WrapPolicyConfig
from verl.config.model import FusedKernelConfig, ModelConfig
from verl.config.reward import RewardModelConfig
from verl.config.rollout import AgentConfig, MultiTurnConfig, RolloutConfig, SamplingConfig, TraceConfig

FSDPActorConfig = ActorConfig
FSDPCriticConfig = CriticConfig
FSDPCriticModelCfg = CriticModelConfig
FSDPEngineConfig = FSDPConfig
FSDPOptimizerConfig = OptimConfig
HFModelConfig = ModelConfig
OptimizerConfig = OptimConfig

__all__ = [
    "ActorConfig",
    "AgentConfig",
    "CriticConfig",
    "CriticModelConfig",
    "FSDPActorConfig",
    "FSDPConfig",
    "FSDPCriticConfig",
    "FSDPCriticModelCfg",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "FusedKernelConfig",
    "HFModelConfig",
    "MixedPrecisionConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "OptimConfig",
    "OptimizerConfig",
    "PolicyLossConfig",
    "RefConfig",
    "RefModelConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "SamplingConfig",
    "TraceConfig",
    "WrapPolicyConfig",
]


def __getattr__(name: str):
    raise missing(__name__, name)
