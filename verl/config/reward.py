"""Where scores come from: a function, a manager around it, or a reward model."""

from dataclasses import dataclass
from typing import Any, Literal

from verl.config.base import Config, option, section
from verl.config.engine import DeepSpeedConfig, FSDPConfig, Strategy
from verl.config.trainer import ProfilerConfig
from verl.utils.micro_batching import MicroBatching


@dataclass
class RewardFunctionConfig(Config):
    """A scoring function of the user's."""

    path: str | None = None
    """Python file that defines it. Null: the built-in scorers, chosen by ``data.reward_fn_key``."""

    name: str = "compute_score"
    """Name of the function: ``f(data_source, solution_str, ground_truth, extra_info) -> float | dict``."""

    reward_kwargs: dict[str, Any] = option({})
    """Free-form: keyword arguments added to every call."""


@dataclass
class SandboxFusionConfig(Config):
    """Remote execution of generated code."""

    url: str | None = None
    """Address of a sandbox-fusion service."""

    max_concurrent: int = option(64, above=0)
    """Requests under way at a time."""

    memory_limit_mb: int = option(1024, above=0)
    """Memory of one program, MiB."""


@dataclass
class RewardModelModelConfig(Config):
    """Model that scores whole responses."""

    input_tokenizer: str | None = "~/models/deepseek-llm-7b-chat"
    """Tokenizer of the policy if its tokens or chat template differ from the reward model's: each conversation is then
    written anew in the reward model's, which needs ``data.return_raw_chat``. Follows ``actor_rollout_ref.model.path``.
    Null: the reward model reads the policy's token ids as they are."""

    path: str = "~/models/FsfairX-LLaMA3-RM-v0.1"
    """Folder or hub id of a causal model that was trained to score texts: a sequence or token classifier with one
    label, its head among the weights. The score is read off the last token."""

    external_lib: str | None = None
    """Module to import before the model is built; follows the actor's."""

    trust_remote_code: bool = False
    """Let the model run Python code that comes with its folder."""

    use_shm: bool = False
    """Copy the model to /dev/shm before loading."""

    use_remove_padding: bool = False
    """Pack rows into one sequence."""

    use_fused_kernels: bool = False
    """Follows ``actor_rollout_ref.model.use_fused_kernels``. No effect: there are no logits over a vocabulary."""

    fsdp_config: FSDPConfig = section(FSDPConfig)
    """Sharding, offload and number formats."""


@dataclass
class RewardModelConfig(Config):
    """The reward model, and the manager that calls scoring functions."""

    enable: bool = False
    """Score responses with a model: ``rm_scores``, which the built-in managers give out as rewards. Validation rows
    whose ``reward_model`` has another ``style`` than ``model`` are scored by function all the same. False: with
    functions only."""

    strategy: Strategy = "fsdp"
    """Engine of the reward model, as ``actor.strategy``."""

    deepspeed: DeepSpeedConfig = section(DeepSpeedConfig)
    """ZeRO, with ``strategy=deepspeed``."""

    model: RewardModelModelConfig = section(RewardModelModelConfig)
    """The reward model."""

    micro_batch_size: int | None = option(None, above=0)
    """Deprecated: responses of one forward, summed over all ranks. Becomes the option below and is null afterwards."""

    micro_batch_size_per_gpu: int | None = option(None, above=0)
    """Responses of one forward on one device."""

    max_length: int | None = option(None, above=0)
    """Tokens at which a conversation that was written anew (``model.input_tokenizer``) is cut; what comes first is
    kept, and the score is that of the text up to there. Null: as many as the reward model has positions for."""

    use_dynamic_bsz: bool = False
    """Cut micro-batches by tokens; follows the critic's."""

    forward_max_token_len_per_gpu: int = option(32768, above=0)
    """Tokens of one micro-batch on one device; follows the critic's."""

    reward_manager: str = "naive"
    """Who calls the scoring function: ``naive`` (row by row), ``batch`` (once, with lists), or a name given to
    ``verl.workers.reward_manager.register``."""

    launch_reward_fn_async: bool = False
    """Call the scoring function in a thread of the driver while log-probs and values are computed."""

    sandbox_fusion: SandboxFusionConfig = section(SandboxFusionConfig)
    """Remote execution of generated code."""

    profiler: ProfilerConfig = section(ProfilerConfig)
    """Profiling of the reward model."""

    ulysses_sequence_parallel_size: int = option(1, above=0)
    """Ranks that share one sequence."""

    reward_kwargs: dict[str, Any] = option({})
    """Free-form: keyword arguments of the reward manager."""

    on_error: Literal["stop", "zero_and_count"] = "stop"
    """When a scoring function raises or returns no finite number: stop the run naming the sample, or score 0 and
    count it in the metrics."""

    @property
    def forward_split(self) -> MicroBatching:
        """How a batch is cut into forwards."""
        if self.use_dynamic_bsz:
            return MicroBatching(None, self.forward_max_token_len_per_gpu)
        return MicroBatching(self.micro_batch_size_per_gpu, None)
