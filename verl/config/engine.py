"""Sharding and number formats of a model, its optimizer, and the training engines."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from verl.config.base import Config, option, read_if, section

Strategy = Literal["fsdp", "fsdp2", "fsdp1", "local", "megatron", "deepspeed"]
"""``fsdp2``, or ``fsdp``: torch's fully_shard. ``fsdp1``: its predecessor FullyShardedDataParallel. All give the same
numbers and read each other's checkpoints. ``local``: one process, no sharding. ``deepspeed``: ZeRO, by the library.
``megatron``: megatron-core, with the sections ``megatron``."""


class StrategyTraits(NamedTuple):
    """Peculiarities of a training engine that checks of the configuration ask for. A new engine adds a row below."""

    unread: tuple[str, ...] = ()
    """Options of ``fsdp_config`` that it does not read."""
    shards: str = ""
    """End of the sentence that says so, after ``strategy=...``."""
    is_one_process: bool = False
    has_flat_pieces: bool = False
    """Weights and gradients lie in flat pieces, without the shapes of the model's."""
    has_zero: bool = False
    """Reads the section ``deepspeed``."""
    has_megatron: bool = False
    """Reads the section ``megatron`` in place of ``fsdp_config``."""


_SHARDING = (
    "reshard_after_forward", "fsdp_size", "forward_prefetch", "reduce_once", "gather_once", "offload_policy",
    "wrap_policy.min_num_params", "wrap_policy.transformer_layer_cls_to_wrap",
)  # fmt: skip
STRATEGIES: dict[str, StrategyTraits] = {
    "fsdp1": StrategyTraits(has_flat_pieces=True),
    "deepspeed": StrategyTraits(_SHARDING, "shards as {role}.deepspeed says", has_flat_pieces=True, has_zero=True),
    "megatron": StrategyTraits(has_flat_pieces=True, has_megatron=True),
    "local": StrategyTraits((*_SHARDING, "mixed_precision.reduce_dtype"), "does not shard", is_one_process=True),
}
"""Training engine -> its peculiarities; one without a row, fsdp2 for example, has none."""

Dtype = Literal["fp32", "float32", "bf16", "bfloat16", "fp16", "float16"]

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def short_dtype(name: str) -> str:
    """``fp32``, ``bf16`` or ``fp16`` of either way to write it."""
    return _SHORT.get(name, name)


@dataclass
class WrapPolicyConfig(Config):
    """Modules that become units of sharding."""

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

    buffer_dtype: Dtype = option("fp32", never_read="buffers keep the format the model gives them")
    """Format of buffers, such as rotary frequencies. No effect: they keep the format the model gives them."""


_SHARE = 3
"""A state sharded within a node, and a state with the copies that save communication, take at most one in so many parts
of a device's memory: a critic may take as much, and rollout and activations need the rest."""


class ModelSizes(NamedTuple):
    """Bytes of a whole model."""

    state: int
    """Weights, gradients and optimizer state, as they are kept."""
    weights: int
    """Weights in the format of forward and backward."""
    gradients: int
    """Gradients in the format of their sum over ranks; 0 where nothing is trained."""


def _of_a_rank(ranks: int, sizes: ModelSizes, device_bytes: int | None) -> tuple[int, int, int]:
    """Bytes of a rank's part of the state, of sums of whole gradients beyond its part, and of a third of a device."""
    return sizes.state // ranks, sizes.gradients - sizes.gradients // ranks, (device_bytes or 0) // _SHARE


@dataclass
class FSDPConfig(Config):
    """Sharding, offload and number formats of one model."""

    _target_: ClassVar[str] = "verl.workers.config.FSDPEngineConfig"

    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig)
    """Modules that become units of sharding."""

    param_offload: bool = False
    """Keep the parameters in host memory while the model is idle. No effect on a CPU device."""

    optimizer_offload: bool = False
    """Keep the optimizer state in host memory between updates. No effect on a CPU device or an untrained model."""

    offload_policy: bool = False
    """FSDP2's own offload: parameters, gradients and optimizer state stay on the host during training too, where the
    optimizer then runs; a layer's weights visit the device when it computes. Needs ``strategy=fsdp2``; makes
    ``param_offload`` and ``optimizer_offload`` redundant. No effect on a CPU device.
    Source: Ren et al. 2021, ZeRO-Offload (arXiv:2101.06840)."""

    reshard_after_forward: bool = True
    """Free gathered parameters after each layer's forward and gather them again in backward: less memory, more
    communication. Source: ZeRO stage 3, Rajbhandari et al. 2020 (arXiv:1910.02054)."""

    fsdp_size: int = -1
    """Ranks per sharding group. A smaller divisor of the world gives hybrid sharding (HSDP): shards within a group,
    replicas between groups, and the network between nodes carries gradients alone, once a mini-batch. -1: the ranks of
    a node where weights, gradients and optimizer state in so many parts take at most a third of a device's memory (on a
    CPU of a rank's part of the node's), and ``offload_policy`` does not say that memory is short; else all ranks. The
    log names the numbers. Source: Zhao et al. 2023, PyTorch FSDP, section 3.2.2 (arXiv:2304.11277)."""

    forward_prefetch: bool = False
    """Start to gather the next layer's parameters as soon as the current layer's have arrived: hides communication
    behind computation for one more layer's memory. The backward pass always does."""

    reduce_once: bool | None = None
    """Sum gradients over ranks once a mini-batch instead of once a micro-batch: less communication, and meanwhile every
    rank holds whole gradients in ``mixed_precision.reduce_dtype``. Needs ``strategy=fsdp2``. Null: on a CPU device,
    where gloo is slow, and on another where a rank's part of weights, gradients and optimizer state takes, with these
    copies and those of ``gather_once``, at most a third of the memory, and ``offload_policy`` does not say that it is
    short; the log names the numbers. Changes no number but by rounding."""

    gather_once: bool | None = None
    """Cast and gather weights once a mini-batch, or once a pass that scores a batch, instead of for the forward and
    again for the backward pass of every micro-batch: less communication, and meanwhile every rank holds whole weights
    in ``mixed_precision.param_dtype``; ``reshard_after_forward`` has no effect then. Needs ``strategy=fsdp2``. Null: as
    for ``reduce_once``, and decided before it. Changes no number."""

    full_determinism: bool = False
    """Use only algorithms of torch, cuBLAS and flash-attn that repeat bit for bit, so that two runs on one machine are
    equal; slower on CUDA. Holds for the whole process that has the model, for other roles in it too. An operation that
    has no such algorithm is named in a warning. See docs/training_engine.md."""

    model_dtype: Dtype = "fp32"
    """Format of the master weights the optimizer changes. bf16 halves memory, but small steps are rounded away."""

    mixed_precision: MixedPrecisionConfig | None = None
    """Number formats of a step. Null: the defaults of the section, bf16 compute with fp32 gradient sums, on CPU and
    CUDA alike. For plain fp32 set ``mixed_precision.param_dtype=fp32``."""

    def group_size(self, world: int, per_node: int, state_bytes: int, device_bytes: int | None) -> int:
        """Ranks that share one copy of a model's state, by ``fsdp_size``.

        Args:
            per_node: ranks of each node; 0 where nodes differ.
            state_bytes: weights, gradients and optimizer state of the whole model.
            device_bytes: memory of a device, or on a CPU of a rank; None: unknown.
        """
        if self.fsdp_size > 0:
            return min(self.fsdp_size, world)
        if not 0 < per_node < world or world % per_node or self.offload_policy or device_bytes is None:
            return world
        return per_node if state_bytes <= per_node * device_bytes // _SHARE else world

    def sharding(self, world: int, per_node: int, state_bytes: int, device_bytes: int | None) -> str:
        """Say what `group_size` decides by the memory of several nodes, and by which numbers; mostly empty."""
        if self.fsdp_size > 0 or not 0 < per_node < world:
            return ""
        size = self.group_size(world, per_node, state_bytes, device_bytes)
        where = f"within nodes of {per_node} ranks, replicated on {world // size}" if size < world else "over all ranks"
        has = "of unknown memory" if device_bytes is None else f"which has {device_bytes / 2**30:.2f} GiB"
        part = f"{state_bytes / per_node / 2**30:.2f} GiB a rank, {has}"
        return (
            f"fsdp_config.fsdp_size={self.fsdp_size}: sharded {where}. Weights, gradients and optimizer state are "
            f"{state_bytes / 2**30:.2f} GiB, in {per_node} parts {part}."
        )

    def once_a_mini_batch(
        self, device: str, ranks: int, sizes: ModelSizes, device_bytes: int | None
    ) -> tuple[bool, bool]:
        """Whether weights are gathered, and gradients reduced, once a mini-batch: by ``gather_once``, ``reduce_once``.

        Args:
            ranks: of a group that shares one copy of the model's state.
            device_bytes: memory of a device; None: unknown.
        """
        gathers, reduces = self.gather_once, self.reduce_once
        if not self._asks_memory(device, device_bytes):
            is_cpu = device == "cpu"
            return is_cpu if gathers is None else gathers, is_cpu if reduces is None else reduces
        part, summed, limit = _of_a_rank(ranks, sizes, device_bytes)
        free = limit - part - (summed if reduces else 0)
        if gathers is None:
            gathers = sizes.weights <= free
        if reduces is None:
            reduces = summed <= free - (sizes.weights if gathers else 0)
        return gathers, reduces

    def copies(self, device: str, ranks: int, sizes: ModelSizes, device_bytes: int | None) -> str:
        """Say what `once_a_mini_batch` decides by the memory, and by which numbers; empty where it does not."""
        names = ("gather_once", "reduce_once")
        if not self._asks_memory(device, device_bytes) or all(self[name] is not None for name in names):
            return ""
        chosen = zip(names, self.once_a_mini_batch(device, ranks, sizes, device_bytes), strict=True)
        means = " and ".join(f"{name}=null means {str(is_on).lower()}" for name, is_on in chosen if self[name] is None)
        part, summed, limit = (f"{size / 2**30:.2f} GiB" for size in _of_a_rank(ranks, sizes, device_bytes))
        return (
            f"fsdp_config: {means}. A rank's part of weights, gradients and optimizer state is {part}; whole weights "
            f"to compute with are {sizes.weights / 2**30:.2f} GiB more, sums of whole gradients {summed}; all may be "
            f"{limit}, a third of a device."
        )

    def _asks_memory(self, device: str, device_bytes: int | None) -> bool:
        """Whether the memory decides where ``gather_once`` or ``reduce_once`` is null."""
        return device != "cpu" and not self.offload_policy and device_bytes is not None

    @property
    def compute_dtype(self) -> str:
        """``fp32``, ``bf16`` or ``fp16``: format of forward and backward."""
        chosen = (self.mixed_precision or MixedPrecisionConfig()).param_dtype
        return short_dtype(chosen)

    @property
    def master_dtype(self) -> str:
        """``fp32``, ``bf16`` or ``fp16``: format of the master weights."""
        return short_dtype(self.model_dtype)


@dataclass
class DeepSpeedConfig(Config):
    """ZeRO of one model, read with ``strategy=deepspeed``. Number formats, and what leaves the device between phases,
    are those of ``fsdp_config``: ``model_dtype``, ``mixed_precision``, ``param_offload``, ``optimizer_offload``.
    Source: Rajbhandari et al. 2020 (arXiv:1910.02054)."""

    zero_stage: int = option(2, at_least=0, at_most=3)
    """Share-out among ranks: 0 nothing (plain data parallelism, without the library), 1 the optimizer's state with the
    fp32 weights, 2 gradients too, 3 weights too. A model that is not trained is whole on every rank below 3."""

    offload_optimizer: bool = False
    """Keep the optimizer's state and the fp32 weights in host memory, and run the optimizer there (stages 1 to 3).
    Source: ZeRO-Offload, Ren et al. 2021 (arXiv:2101.06840)."""

    offload_param: bool = False
    """Keep each rank's part of the weights in host memory, also during training (stage 3)."""

    overlap_comm: bool | None = None
    """Sum gradients over ranks while the backward pass goes on. Null: with stage 3."""

    contiguous_gradients: bool = True
    """Copy gradients into one buffer as they are made, against fragmented memory."""

    reduce_bucket_size: int = option(500_000_000, above=0)
    """Numbers whose gradients are summed over ranks at a time; no more than the model has."""

    allgather_bucket_size: int = option(500_000_000, above=0)
    """Numbers that are gathered at a time after a step (stages 1 and 2)."""

    stage3_prefetch_bucket_size: int = option(50_000_000, at_least=0)
    """Stage 3: numbers fetched ahead of their use."""

    stage3_param_persistence_threshold: int = option(100_000, at_least=0)
    """Stage 3: weights of no more numbers than this stay whole on every rank."""

    stage3_max_live_parameters: int = option(1_000_000_000, at_least=0)
    """Stage 3: numbers that may be whole on a rank at a time."""

    stage3_max_reuse_distance: int = option(1_000_000_000, at_least=0)
    """Stage 3: a weight that is used again within so many numbers is not let go."""

    zero_hpz_partition_size: int = option(1, above=0)
    """Stage 3: ranks, usually of one machine, that hold a second copy of the weights in slices among them, to gather
    from in the backward pass. 1: none. Source: ZeRO++, Wang et al. 2023 (arXiv:2306.10209)."""

    config: dict[str, Any] = option({})
    """Further entries of DeepSpeed's own configuration, for example ``{zero_optimization: {round_robin_gradients:
    true}}``. What an option of verl decides is an error here."""


# -- Optimizer and learning-rate schedule of a trained role ----------------------------------------------------------

_FALLING = ("cosine", "linear", "wsd", "inverse-square-root")


@dataclass
class OptimConfig(Config):
    """Optimizer and learning-rate schedule. The schedule advances once per training step, however many mini-batches
    that step has."""

    _target_: ClassVar[str] = "verl.workers.config.FSDPOptimizerConfig"

    optimizer: Literal["AdamW", "AdamW8bit"] = "AdamW"
    """``AdamW`` (Loshchilov & Hutter 2019, arXiv:1711.05101): torch's, fused, two fp32 numbers of state a weight.
    ``AdamW8bit``: two bytes a weight instead of eight, by torchao (``pip install -e '.[torchao]'``), compiled at its
    first step. Source: Dettmers et al. 2021 (arXiv:2110.02861)."""

    lr: float = option(1e-6, above=0)
    """Peak learning rate. verl's default is 1e-6 for the actor and 1e-5 for the critic."""

    lr_warmup_steps_ratio: float = option(0.0, at_least=0, at_most=1)
    """Share of all training steps spent warming up; read only while ``lr_warmup_steps`` is negative."""

    total_training_steps: int = -1
    """Length of the schedule in training steps. -1: the trainer fills in the length of the run."""

    weight_decay: float = option(0.01, at_least=0)
    """Decoupled weight decay, multiplied by the learning rate at every optimizer step; of all trained weights, norms
    and biases too, as in verl."""

    lr_warmup_steps: int | None = -1
    """Training steps over which the rate rises linearly. Negative or null: from ``lr_warmup_steps_ratio``."""

    min_lr_ratio: float | None = option(0.0, read_if("warmup_style", *_FALLING), at_least=0, at_most=1)
    """With all but ``constant``: the rate ends at this share of ``lr``, and warms up from it. Null: 0."""

    min_lr: float = option(0.0, read_if("warmup_style", *_FALLING), at_least=0)
    """With all but ``constant``: the rate falls no lower than this, and ends there where the share ``min_lr_ratio`` of
    ``lr`` is not higher."""

    lr_warmup_init: float = option(0.0, at_least=0)
    """Rate at the first step of the warm-up, from which it rises to ``lr``. 0: from zero, or from where the schedule
    ends."""

    num_cycles: float = option(0.5, read_if("warmup_style", "cosine"), above=0)
    """With ``cosine``: periods over the run; 0.5 is one fall from peak to floor."""

    warmup_style: Literal["constant", "cosine", "linear", "wsd", "inverse-square-root"] = "constant"
    """Course after the warm-up; ``lr_scheduler_type`` and ``lr_decay_style`` are other names of this option.
    ``constant``; ``cosine`` decay (Loshchilov & Hutter 2017, arXiv:1608.03983); ``linear`` decay; ``wsd``,
    warmup-stable-decay: constant, with a decay at the end (Hu et al. 2024, arXiv:2404.06395);
    ``inverse-square-root`` of the step (Vaswani et al. 2017, arXiv:1706.03762)."""

    lr_wsd_decay_steps: int | None = option(None, read_if("warmup_style", "wsd"), at_least=0)
    """With ``wsd``: training steps of the decay. Null: a tenth of those after the warm-up."""

    lr_wsd_decay_style: Literal["cosine", "linear", "exponential", "minus_sqrt"] = option(
        "cosine", read_if("warmup_style", "wsd")
    )
    """With ``wsd``: shape of the decay. ``minus_sqrt``: 1 - sqrt(x) (Hagele et al. 2024, arXiv:2405.18392)."""

    betas: list[float] = option([0.9, 0.999], at_least=0, below=1)
    """Decay of AdamW's running means of gradient and squared gradient. Not in verl's YAML, read by it."""

    eps: float = option(1e-8, above=0)
    """Added to AdamW's denominator."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = option(
        "constant", never_read="weight decay begins and ends at optim.weight_decay"
    )
    """Course of the weight decay in Megatron's trainer, where it begins and ends at ``weight_decay``: all values do the
    same."""

    use_checkpoint_opt_param_scheduler: bool = option(
        False, never_read="a checkpoint that holds the optimizer brings its schedule back"
    )
    """Both values do the same: a checkpoint that holds the optimizer brings its schedule back."""

    override_optimizer_config: dict[str, Any] | None = None
    """Free-form, with ``strategy=megatron``: entries of megatron-core's ``OptimizerConfig``. What an option of verl
    decides is an error here."""


# -- entries of DeepSpeed's own configuration that options of verl decide ----------------------------------------------


def backend_of(strategy: str, device: str, ranks: int) -> str:
    """The backend that ``strategy`` means: on one CPU process FSDP2 has nothing to shard, and ``local`` is a fifth
    faster with the same numbers."""
    return "local" if strategy in ("fsdp", "fsdp2") and device == "cpu" and ranks == 1 else strategy


_MICRO_BATCHES = "rows are split by ppo_mini_batch_size, and by ppo_micro_batch_size_per_gpu or a token budget"
_FORMATS = "set fsdp_config.mixed_precision.param_dtype"
_OPTIONS = (
    "offload_optimizer", "offload_param", "overlap_comm", "contiguous_gradients", "reduce_bucket_size",
    "allgather_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "zero_hpz_partition_size",
)  # fmt: skip
DEEPSPEED_KEYS = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), _MICRO_BATCHES),
    **dict.fromkeys(("gradient_accumulation_steps", "managed_gradient_accumulation"), _MICRO_BATCHES),
    "gradient_clipping": "set grad_clip",
    "optimizer": "set optim.*",
    "scheduler": "set optim.*",
    "zero_allow_untested_optimizer": "AdamW is the optimizer of every engine",
    "zero_force_ds_cpu_optimizer": "AdamW is the optimizer of every engine",
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "amp", "torch_autocast", "data_types"), _FORMATS),
    "communication_data_type": "set fsdp_config.mixed_precision.reduce_dtype",
    "zero_optimization.stage": "set deepspeed.zero_stage",
    "zero_optimization.memory_efficient_linear": "it would replace torch's linear layer in the whole process",
    **{f"zero_optimization.{name}": f"set deepspeed.{name}" for name in _OPTIONS},
}
"""Entry of DeepSpeed's own configuration that verl decides -> the option to use."""


def deepspeed_conflicts(entries: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield (key, value, the option to use) of every entry of ``deepspeed.config`` that an option of verl decides."""
    for name, value in entries.items():
        key = f"{path}{name}"
        if key in DEEPSPEED_KEYS:
            yield key, value, DEEPSPEED_KEYS[key]
        elif isinstance(value, Mapping):
            yield from deepspeed_conflicts(value, f"{key}.")
