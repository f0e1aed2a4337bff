"""How a model is sharded and in which number formats it lives (FSDP backends and the single-process one)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from verl.config.base import Config, option, section

Strategy = Literal["fsdp", "fsdp2", "local", "megatron", "deepspeed"]
"""``fsdp2``: torch's fully_shard. ``fsdp``: the same machinery under its older name. ``local``: one process, no
sharding. ``megatron`` and ``deepspeed`` are known names that are not built yet."""

Dtype = Literal["fp32", "float32", "bf16", "bfloat16", "fp16", "float16"]

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass
class WrapPolicyConfig(Config):
    """Which modules become units of sharding."""

    min_num_params: int = option(0, at_least=0)
    """0: one unit per transformer layer. Above 0: every module with at least this many parameters."""

    transformer_layer_cls_to_wrap: list[str] | str | None = None
    """Class names of the layers to shard one by one. Null: what the model itself declares
    (transformers' ``_no_split_modules``)."""


@dataclass
class MixedPrecisionConfig(Config):
    """Number formats of one training step."""

    param_dtype: Dtype = "bf16"
    """Format of weights and activations in forward and backward. The optimizer keeps ``model_dtype``."""

    reduce_dtype: Dtype = "fp32"
    """Format in which gradients are summed over ranks."""

    buffer_dtype: Dtype = "fp32"
    """Format of buffers, such as rotary frequencies. No effect: they keep the format the model gives them."""


@dataclass
class FSDPConfig(Config):
    """Sharding, offload and number formats of one model."""

    _target_: ClassVar[str] = "verl.workers.config.FSDPEngineConfig"

    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig)
    """Which modules become units of sharding."""

    param_offload: bool = False
    """Keep the parameters in host memory while the model is idle. No effect on a CPU device."""

    optimizer_offload: bool = False
    """Keep the optimizer state in host memory between updates. No effect on a CPU device or an untrained model."""

    offload_policy: bool = False
    """FSDP2's own offload: parameters, gradients and optimizer state stay on the host during training too."""

    reshard_after_forward: bool = True
    """Free gathered parameters after each layer's forward and gather them again in backward: less memory, more
    communication. Source: ZeRO stage 3, Rajbhandari et al. 2020 (arXiv:1910.02054)."""

    fsdp_size: int = -1
    """Ranks per sharding group. -1: all of them. A smaller divisor of the world gives hybrid sharding (HSDP): shards
    within a group, replicas between groups."""

    forward_prefetch: bool = False
    """Gather the next layer's parameters before the current layer's forward is over (FSDP1)."""

    model_dtype: Dtype = "fp32"
    """Format of the master weights the optimizer changes. bf16 halves memory, but small steps are rounded away."""

    mixed_precision: MixedPrecisionConfig | None = None
    """Number formats of a step. Null: the defaults of the section, bf16 compute with fp32 gradient sums, on CPU and
    CUDA alike. For plain fp32 set ``mixed_precision.param_dtype=fp32``."""

    @property
    def compute_dtype(self) -> str:
        """``fp32``, ``bf16`` or ``fp16``: format of forward and backward."""
        chosen = (self.mixed_precision or MixedPrecisionConfig()).param_dtype
        return _SHORT.get(chosen, chosen)

    @property
    def master_dtype(self) -> str:
        """``fp32``, ``bf16`` or ``fp16``: format of the master weights."""
        return _SHORT.get(self.model_dtype, self.model_dtype)


DEEPSPEED_OWN_KEYS = {
    "train_batch_size": "rows are cut into micro-batches by ppo_mini_batch_size and ppo_micro_batch_size_per_gpu",
}
