"""The value model."""

from dataclasses import dataclass
from typing import Any, ClassVar

from verl.batch import MicroBatching
from verl.config.actor import LossAggMode
from verl.config.base import Config, option, read_if, section
from verl.config.engine import DeepSpeedConfig, FSDPConfig, OptimConfig, Strategy
from verl.config.megatron import MegatronConfig
from verl.config.profiler import ProfilerConfig
from verl.config.trainer import CheckpointConfig


@dataclass
class CriticModelConfig(Config):
    """Model of the critic: any causal model, its head replaced by one number per token."""

    _target_: ClassVar[str] = "verl.workers.config.FSDPCriticModelCfg"

    path: str = "~/models/deepseek-llm-7b-chat"
    """Folder in Hugging Face format or hub id."""

    tokenizer_path: str | None = "~/models/deepseek-llm-7b-chat"
    """Tokenizer to save with checkpoints; follows ``actor_rollout_ref.model.path``. Token ids must agree."""

    override_config: dict[str, Any] = option({})
    """Free-form: entries laid over the model's config.json."""

    external_lib: str | None = None
    """Module to import before the model is built; follows the actor's."""

    trust_remote_code: bool = False
    """Let the model run Python code that comes with its folder; follows the actor's."""

    use_shm: bool = False
    """Copy the model's folder to /dev/shm, once a node, and let all processes load it from there. The copy stays for
    the next run (delete /dev/shm/verl-cache-*); without room for it the folder itself is read, with a warning."""

    enable_gradient_checkpointing: bool = True
    """Recompute activations in backward instead of keeping them."""

    enable_activation_offload: bool = False
    """Keep activations in host memory between forward and backward; with ``enable_gradient_checkpointing`` the inputs
    of layers, else also their insides. Gradients are the same to the bit. No effect on a CPU device."""

    use_remove_padding: bool = False
    """Pack rows one behind another in one sequence, as ``actor_rollout_ref.model.use_remove_padding``."""

    use_prefix_sharing: bool = False
    """Responses to one prompt share its tokens, as ``actor_rollout_ref.model.use_prefix_sharing``."""

    fsdp_config: FSDPConfig = section(FSDPConfig)
    """Sharding, offload and number formats."""

    lora_rank: int = option(0, at_least=0)
    """Rank of LoRA adapters; 0 trains the full weights."""

    lora_alpha: float = option(16, read_if("lora_rank", remark="trains all weights"))
    """LoRA's scale."""

    target_modules: str | list[str] = option("all-linear", read_if("lora_rank", remark="trains all weights"))
    """Linear layers that get an adapter, as ``actor_rollout_ref.model.target_modules``. The value head is trained
    whole."""

    exclude_modules: str | list[str] | None = option(None, read_if("lora_rank", remark="trains all weights"))
    """Linear layers that get none."""

    lora_adapter_path: str | None = None
    """Folder of an adapter in peft's format to go on from."""


@dataclass
class CriticConfig(Config):
    """Training of the value model. It exists if ``critic.enable`` says so, or with ``adv_estimator=gae``."""

    _target_: ClassVar[str] = "verl.workers.config.FSDPCriticConfig"

    rollout_n: int = option(1, above=0)
    """Responses per prompt; follows ``rollout.n``."""

    strategy: Strategy = "fsdp"
    """Training engine, as ``actor.strategy``."""

    deepspeed: DeepSpeedConfig = section(DeepSpeedConfig)
    """ZeRO, with ``strategy=deepspeed``."""

    megatron: MegatronConfig = section(MegatronConfig)
    """Parallelism, formats and offload, with ``strategy=megatron``; the mesh follows the actor's."""

    # null rather than false: whether there is a critic is the estimator's to say
    enable: bool | None = None
    """Train a critic? Null: yes if the advantage estimator needs one."""

    # verl's default for a critic; the class's own is the actor's
    optim: OptimConfig = section(OptimConfig, lr=1e-5, min_lr_ratio=None)
    """Optimizer of the critic."""

    model: CriticModelConfig = section(CriticModelConfig)
    """Model of the critic."""

    ppo_mini_batch_size: int = option(256, above=0)
    """Prompts of one optimizer step; follows the actor's."""

    ppo_micro_batch_size: int | None = option(None, above=0)
    """Deprecated: responses of one forward, summed over all ranks. Becomes the option below and is null afterwards."""

    ppo_micro_batch_size_per_gpu: int | None = option(None, above=0)
    """Responses of one forward and backward on one device."""

    use_dynamic_bsz: bool = False
    """Cut micro-batches by tokens instead; follows the actor's."""

    ppo_max_token_len_per_gpu: int = option(32768, above=0)
    """With ``use_dynamic_bsz``: tokens of one micro-batch on one device."""

    forward_max_token_len_per_gpu: int = option(32768, above=0)
    """The same when only values are computed; follows the option above."""

    ppo_epochs: int = option(1, above=0)
    """Passes over the batch of one training step; follows the actor's."""

    shuffle: bool = False
    """Draw mini-batches at random, as ``actor.shuffle`` does; follows the actor's."""

    cliprange_value: float | None = option(0.5, above=0)
    """A new value may leave the old one by this much before its loss is clipped, as in OpenAI's
    implementation of PPO. Null: it is not clipped."""

    loss_agg_mode: LossAggMode = "token-mean"
    """Aggregation of token losses into one number; follows the actor's."""

    checkpoint: CheckpointConfig = section(CheckpointConfig)
    """Contents of a checkpoint of the critic holds."""

    profiler: ProfilerConfig = section(ProfilerConfig)
    """Profiling of the critic."""

    forward_micro_batch_size: int | None = option(None, above=0)
    """Deprecated: as ``ppo_micro_batch_size`` when only values are computed."""

    forward_micro_batch_size_per_gpu: int | None = option(None, above=0)
    """Responses of one forward when only values are computed; follows ``ppo_micro_batch_size_per_gpu``."""

    ulysses_sequence_parallel_size: int = option(1, above=0)
    """Ranks that share one sequence; more than 1 needs ``critic.model.use_remove_padding``."""

    grad_clip: float = option(1.0, above=0)
    """Gradient norm above which the gradient is scaled down."""

    @property
    def sharding(self) -> FSDPConfig | MegatronConfig:
        """Sharding, offload and number formats of the engine that ``strategy`` names."""
        return self.megatron if self.strategy == "megatron" else self.model.fsdp_config

    @property
    def update_split(self) -> MicroBatching:
        """Division of a mini-batch into forwards."""
        if self.use_dynamic_bsz:
            return MicroBatching(None, self.ppo_max_token_len_per_gpu)
        return MicroBatching(self.ppo_micro_batch_size_per_gpu, None)

    @property
    def forward_split(self) -> MicroBatching:
        """Division of a batch into forwards when only values are computed."""
        if self.use_dynamic_bsz:
            return MicroBatching(None, self.forward_max_token_len_per_gpu)
        return MicroBatching(self.forward_micro_batch_size_per_gpu, None)
