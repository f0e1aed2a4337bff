"""The policy being trained, its loss, and its frozen reference."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from verl.batch import MicroBatching
from verl.config.algorithm import KLKind, RolloutCorrectionConfig
from verl.config.base import Config, option, read_if, section
from verl.config.engine import DeepSpeedConfig, FSDPConfig, OptimConfig, Strategy
from verl.config.megatron import MegatronConfig
from verl.config.profiler import FollowingProfilerConfig
from verl.config.trainer import CheckpointConfig

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"]
"""Aggregation of token losses into one number: mean over all tokens (DAPO, Yu et al. 2025, arXiv:2503.14476); mean over
responses of their sums; mean over responses of their means (GRPO as published); sum over all divided by the response
window, a constant (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783); sum over all tokens of the mini-batch."""


_IN_CHUNKS = "entropy and log-probs are always computed in chunks and recomputed in backward"


@dataclass
class PolicyLossConfig(Config):
    """The policy loss, and the parameters of those that have their own."""

    _target_: ClassVar[str] = "verl.workers.config.PolicyLossConfig"

    loss_mode: str = "vanilla"
    """``vanilla`` (clipped PPO, Schulman et al. 2017, arXiv:1707.06347), gspo, geo_mean, cispo, sapo, clip_cov,
    kl_cov, dppo_tv, dppo_kl, gpg, reinforce, tis, topr, kimi15, dro, sppo, bypass_mode, a name given to
    ``register_policy_loss``, or a function of yours as path/to/file.py:name. Equations and papers:
    docs/algorithms.md."""

    clip_cov_ratio: float = option(0.0002, at_least=0, at_most=1)
    """clip_cov: share of tokens whose gradient is dropped. Source: Cui et al. 2025 (arXiv:2505.22617)."""

    clip_cov_lb: float = 1.0
    """clip_cov: lower bound of the covariance of a token that may be dropped."""

    clip_cov_ub: float = 5.0
    """clip_cov: upper bound of that covariance."""

    kl_cov_ratio: float = option(0.0002, at_least=0, at_most=1)
    """kl_cov: share of tokens that get a KL penalty. Source: Cui et al. 2025 (arXiv:2505.22617)."""

    ppo_kl_coef: float = option(0.1, at_least=0)
    """kl_cov: coefficient of that penalty."""

    tis_lower_bound: float = option(0.0, at_least=0)
    """tis: importance weights below this are raised to it. Source: Espeholt et al. 2018 (arXiv:1802.01561)."""

    tis_upper_bound: float = option(1.0, above=0)
    """tis: importance weights above this are lowered to it."""

    topr_pos_weight: float = option(1.0, at_least=0)
    """topr: factor of the loss of responses with a positive score. Source: Le Roux et al. 2025 (arXiv:2503.14286)."""

    topr_neg_weight: float = option(1.0, at_least=0)
    """topr: factor of the loss of all other responses."""

    topr_ratio: Literal["sequence", "token"] = "sequence"
    """topr: taper failures by the probability ratio of the whole response, as published, or of each token."""

    kimi15_tau: float = option(0.1, at_least=0)
    """kimi15: weight of the squared log-ratio of a response. Source: Kimi k1.5 (arXiv:2501.12599)."""

    sppo_eta: float = option(1.0, above=0)
    """sppo: log-ratio that a response which always wins is fitted to, times 2. Source: Wu et al. 2024
    (arXiv:2405.00675)."""

    dro_beta: float = option(0.1, above=0)
    """dro: weight of the squared log-ratio of a token. Source: Richemond et al. 2024 (arXiv:2405.19107)."""

    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    """bypass_mode: follows ``algorithm.rollout_correction``, where it is to be set."""


@dataclass
class ActorConfig(Config):
    """Training of the policy."""

    _target_: ClassVar[str] = "verl.workers.config.FSDPActorConfig"

    strategy: Strategy = "fsdp"
    """Training engine: fsdp2 (``fully_shard``; fsdp is another name of it), fsdp1 (the older
    ``FullyShardedDataParallel``, not tried on GPUs yet), deepspeed (ZeRO), megatron (tensor, pipeline and expert
    parallel) or local (one process)."""

    ppo_mini_batch_size: int = option(256, above=0)
    """Prompts of one optimizer step, over all ranks; each brings ``rollout.n`` responses."""

    ppo_micro_batch_size: int | None = option(None, above=0)
    """Deprecated: responses of one forward, summed over all ranks. Becomes ``ppo_micro_batch_size_per_gpu`` when the
    configuration is loaded, and is null afterwards."""

    ppo_micro_batch_size_per_gpu: int | None = option(None, above=0)
    """Responses of one forward and backward on one device. Changes memory and speed, never the gradient. One of this
    and ``use_dynamic_bsz`` must be set."""

    use_dynamic_bsz: bool = False
    """Cut micro-batches by ``ppo_max_token_len_per_gpu`` instead of by count."""

    ppo_max_token_len_per_gpu: int = option(16384, above=0)
    """With ``use_dynamic_bsz``: tokens (prompt and response) of one micro-batch on one device. Real ones with
    ``use_remove_padding``, of shared prompts once; else rows times the longest of them."""

    clip_ratio: float = option(0.2, above=0)
    """PPO's clip range on both sides. The two options below win where they are not null. What is clipped depends on
    the loss: the ratio of a token (vanilla, cispo, clip_cov), of a response (gspo; 3e-4 as published), the log-ratio
    (geo_mean; 0.4), a difference of probabilities (dppo_tv), or a divergence (dppo_kl)."""

    # not null, as in verl: ``clip_ratio`` given alone is copied to both sides when the tree is loaded
    clip_ratio_low: float | None = option(0.2, above=0)
    """Lower side: the ratio is clipped at 1 - this. Null: ``clip_ratio``."""

    clip_ratio_high: float | None = option(0.2, above=0)
    """Upper side: the ratio is clipped at 1 + this. Null: ``clip_ratio``. A higher upper side is DAPO's "clip-higher"
    (arXiv:2503.14476)."""

    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    """The policy loss."""

    clip_ratio_c: float | None = option(3.0, above=1)
    """Dual-clip bound: for negative advantages the loss stops growing at this ratio. Must exceed 1. Null: no such
    bound. dppo_tv and dppo_kl cap every importance weight at it.
    Source: Ye et al. 2019 (arXiv:1912.09729)."""

    tau_pos: float = option(1.0, above=0)
    """sapo: how fast a token of positive advantage fades as its ratio leaves 1. Source: Gao et al. 2025
    (arXiv:2511.20347)."""

    tau_neg: float = option(1.05, above=0)
    """sapo: the same for all other tokens."""

    loss_agg_mode: LossAggMode = "token-mean"
    """Aggregation of token losses into one number."""

    loss_scale_factor: int | None = option(None, read_if("loss_agg_mode", "seq-mean-token-sum-norm"), above=0)
    """Tokens: the constant divisor of ``loss_agg_mode=seq-mean-token-sum-norm``. Null: ``rollout.response_length``."""

    rl_loss_coef: float = option(1.0, at_least=0)
    """Factor of policy loss and KL loss together; the entropy bonus and the loss below keep their own. 0 with
    ``sft_loss_coef``: learn by imitating successes only."""

    sft_loss_coef: float = option(0.0, at_least=0)
    """Add sft_loss_coef x the negative log-likelihood of responses with a positive score, aggregated as
    ``loss_agg_mode`` says over all responses of the mini-batch, of which the others cost nothing."""

    l2_coef: float = option(0.0, at_least=0)
    """Add l2_coef / 2 x the sum of all squared trained weights to the loss. Unlike ``optim.weight_decay`` its gradient
    is clipped and passes through the optimizer's moments. With ``strategy`` fsdp2 or local."""

    difficulty_loss_weight: bool = False
    """Weigh each response's policy loss by 1/2 + 3/2 difficulty, cut at 0 and 1, over the mean of that in the
    mini-batch. The data need ``difficulty``, a number a row, as a column of its own or within ``extra_info``."""

    length_loss_weight: bool = False
    """Weigh each response's policy loss by its shortness, 3/2 for the shortest of the mini-batch down to 1/2 for the
    longest, over the mean of that."""

    calculate_sum_pi_squared: bool = False
    """Beside each token's log-probability compute the sum of all squared probabilities, by one more product with the
    head. ``algorithm.adv_estimator=optimal_token_baseline`` needs it."""

    entropy_coeff: float = 0
    """Weight of the entropy bonus subtracted from the loss. 0 skips its gradient."""

    use_kl_loss: bool = False
    """Add kl_loss_coef x KL(policy || reference) to the loss, as GRPO does. Starts a reference model."""

    freeze_vision_tower: bool = False
    """Leave the vision tower of a vision-language model as it is, and train the rest."""

    use_torch_compile: bool = True
    """Compile the head's maths with torch.compile. On CUDA only."""

    kl_loss_coef: float = option(0.001, read_if("use_kl_loss"), at_least=0)
    """Weight of the KL loss. Read only with ``use_kl_loss``."""

    kl_loss_type: KLKind = option("low_var_kl", read_if("use_kl_loss"))
    """Estimator of the KL loss. ``full``: the KL itself, summed over the vocabulary, for one more forward pass of the
    reference in every update; it must be in the actor's processes, where it is by default. Read only with
    ``use_kl_loss``."""

    ppo_epochs: int = option(1, above=0)
    """Passes over the batch of one training step."""

    shuffle: bool = False
    """Choose the responses of each mini-batch at random from the whole batch, again each epoch; the choice depends on
    ``trainer.seed`` and the step, not on the number of ranks. False: mini-batches follow the order of the prompts."""

    skip_old_log_probs: bool | None = None
    """Leave out the pass that computes the log-probs of the policy that sampled, where they are those of the update:
    with one optimizer step per batch its own forward pass gives them, and every ratio is exactly 1. Null: leave it out
    where nothing needs them earlier, except in trainers with stages of their own. True is refused where something
    does."""

    checkpoint: CheckpointConfig = section(CheckpointConfig)
    """Contents of a checkpoint of the actor holds."""

    optim: OptimConfig = section(OptimConfig, lr=1e-6)
    """Optimizer of the actor."""

    use_fused_kernels: bool = False
    """As ``actor_rollout_ref.model.use_fused_kernels``, which it follows."""

    grad_clip: float = option(1.0, above=0)
    """Gradient norm above which the gradient is scaled down. Source: Pascanu et al. 2013 (arXiv:1211.5063)."""

    ulysses_sequence_parallel_size: int = option(1, above=0)
    """Ranks that share one sequence, each with a part of its tokens, in attention with some of the heads: a row need
    not fit one device. Must divide the number of workers and of attention heads; more than 1 needs
    ``use_remove_padding``. Token budgets per device are then multiplied by it; batches are split over workers / size.
    Source: DeepSpeed-Ulysses, Jacobs et al. 2023 (arXiv:2309.14509)."""

    entropy_from_logits_with_chunking: bool = option(False, never_read=_IN_CHUNKS)
    """Compute entropy in chunks. Always so here: both values do the same."""

    entropy_checkpointing: bool = option(False, never_read=_IN_CHUNKS)
    """Recompute entropy in backward. Always so here: both values do the same."""

    fsdp_config: FSDPConfig = section(FSDPConfig)
    """Sharding, offload and number formats."""

    deepspeed: DeepSpeedConfig = section(DeepSpeedConfig)
    """ZeRO, with ``strategy=deepspeed``."""

    megatron: MegatronConfig = section(MegatronConfig)
    """Parallelism, formats and offload, with ``strategy=megatron``."""

    use_remove_padding: bool = False
    """As ``actor_rollout_ref.model.use_remove_padding``, which it follows. Holds for the reference too."""

    @property
    def sharding(self) -> FSDPConfig | MegatronConfig:
        """Sharding, offload and number formats of the engine that ``strategy`` names."""
        return self.megatron if self.strategy == "megatron" else self.fsdp_config

    @property
    def update_split(self) -> MicroBatching:
        """Division of a mini-batch into forwards."""
        if self.use_dynamic_bsz:
            return MicroBatching(None, self.ppo_max_token_len_per_gpu)
        return MicroBatching(self.ppo_micro_batch_size_per_gpu, None)


@dataclass
class RefModelConfig(Config):
    """Another model than the actor's for the reference."""

    path: str | None = None
    """Folder or hub id. Null: the actor's initial weights."""


@dataclass
class FrozenModelConfig(Config):
    """A model beside the policy that scores the policy's responses and is not trained: the reference, or teachers."""

    # the sections of other roles follow the actor's by interpolation in the groups' YAML, not by these defaults
    strategy: Strategy = "fsdp"
    """Engine; follows the actor's."""

    use_torch_compile: bool = True
    """As ``actor.use_torch_compile``, which it follows."""

    log_prob_micro_batch_size: int | None = option(None, above=0)
    """Deprecated: responses of one forward, summed over all ranks. Becomes the option below and is null afterwards."""

    log_prob_micro_batch_size_per_gpu: int | None = option(None, above=0)
    """Responses of one forward on one device."""

    log_prob_use_dynamic_bsz: bool = False
    """Cut micro-batches by tokens instead; follows ``actor.use_dynamic_bsz``."""

    log_prob_max_token_len_per_gpu: int = option(16384, above=0)
    """Tokens of one micro-batch on one device; follows ``actor.ppo_max_token_len_per_gpu``. A forward needs less
    memory than an update: may be larger."""

    fsdp_config: FSDPConfig = section(FSDPConfig)
    """Sharding, offload and number formats."""

    deepspeed: DeepSpeedConfig = section(DeepSpeedConfig)
    """ZeRO, with ``strategy=deepspeed``; ``zero_stage`` follows the actor's."""

    megatron: MegatronConfig = section(MegatronConfig)
    """Parallelism, formats and offload, with ``strategy=megatron``; follows the actor's but for offload."""

    ulysses_sequence_parallel_size: int = option(1, above=0)
    """Ranks that share one sequence; follows the actor's."""

    entropy_from_logits_with_chunking: bool = option(False, never_read=_IN_CHUNKS)
    """Both values do the same."""

    entropy_checkpointing: bool = option(False, never_read=_IN_CHUNKS)
    """Both values do the same."""

    @property
    def sharding(self) -> FSDPConfig | MegatronConfig:
        """Sharding, offload and number formats of the engine that ``strategy`` names."""
        return self.megatron if self.strategy == "megatron" else self.fsdp_config

    @property
    def log_prob_split(self) -> MicroBatching:
        """Division of a batch into forwards."""
        if self.log_prob_use_dynamic_bsz:
            return MicroBatching(None, self.log_prob_max_token_len_per_gpu)
        return MicroBatching(self.log_prob_micro_batch_size_per_gpu, None)


@dataclass
class RefConfig(FrozenModelConfig):
    """The frozen reference policy. It exists with ``algorithm.use_kl_in_reward`` or ``actor.use_kl_loss``."""

    model: RefModelConfig | None = None
    """Null: a frozen copy of the actor's initial weights."""

    profiler: FollowingProfilerConfig = section(FollowingProfilerConfig)
    """Profiling of the reference."""

    @property
    def own_path(self) -> str | None:
        """The model, where it is another than the actor's."""
        return self.model.path if self.model is not None else None
