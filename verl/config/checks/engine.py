"""Validators of training engines: sharding, formats, offload, adapters, kernels."""

from collections.abc import Iterator

from verl.config.base import Problem, get_path
from verl.config.checks.base import (
    IsGiven,
    Role,
    contradictions,
    given_below,
    models,
    problem,
    sharded,
    trained_roles,
    unused,
    validator,
)
from verl.config.engine import FSDPConfig, deepspeed_conflicts
from verl.config.ppo import ACTOR, MODEL, REF, RM, ROLLOUT, PPOConfig
from verl.config.tree import show
from verl.utils.distribution import install_command

_RANK_OF_FILE = (
    ", which trains all weights: set lora_rank and lora_alpha to those of its adapter_config.json, or leave the path "
    "out."
)

_CONTRADICTIONS = {
    f"{ROLLOUT}.lora_sync=adapter with actor_rollout_ref.hybrid_engine=false if {MODEL}.lora_rank": (
        "weights travel to devices of the rollout's own merged. Use merge or auto, which then means merge."
    ),
    f"{MODEL}.lora_adapter_path with {MODEL}.lora_rank=0": _RANK_OF_FILE,
    "critic.model.lora_adapter_path with critic.model.lora_rank=0 if uses_critic": _RANK_OF_FILE,
}
contradictions(__name__, _CONTRADICTIONS)


@validator("error")
def sequence_parallel_size_divides_world_size(config: PPOConfig) -> Iterator[Problem]:
    for key, role in models(config).items():
        if config.trainer.world_size % role.ulysses_sequence_parallel_size:
            text = (
                f"does not divide the {config.trainer.world_size} workers. Choose a divisor of "
                f"{config.trainer.world_size}."
            )
            yield problem(config, f"{key}.ulysses_sequence_parallel_size", text, "trainer.n_gpus_per_node")


@validator("error")
def sequence_parallel_requires_remove_padding(config: PPOConfig) -> Iterator[Problem]:
    for key, role in models(config).items():
        # the reference runs the actor's model, and runs it as the actor does
        switch = f"{ACTOR}.use_remove_padding" if key in (ACTOR, REF) else f"{key}.model.use_remove_padding"
        if role.ulysses_sequence_parallel_size > 1 and not get_path(config, switch):
            text = (
                f"with {switch}=false: ranks can share one packed sequence, not padded rows. Set it to "
                f"true{' (actor_rollout_ref.model.use_remove_padding)' if key in (ACTOR, REF) else ''}, or the size to "
                "1."
            )
            yield problem(config, f"{key}.ulysses_sequence_parallel_size", text, switch)


@validator("error")
def fsdp_size_divides_world_size(config: PPOConfig) -> Iterator[Problem]:
    world = config.trainer.world_size
    for key in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.model.fsdp_config", f"{RM}.model.fsdp_config"):
        size = get_path(config, key).fsdp_size
        if size == 0 or size < -1 or (size > 0 and world % min(size, world)):
            text = f"must be -1 (all ranks) or a divisor of the {world} workers."
            yield problem(config, f"{key}.fsdp_size", text, "trainer.n_gpus_per_node")


@validator("error")
def fp16_training_unsupported(config: PPOConfig) -> Iterator[Problem]:
    for key, _, _ in trained_roles(config):
        place = f"{key}.model.fsdp_config" if key == "critic" else f"{key}.fsdp_config"
        sharding = get_path(config, place)
        formats = {"mixed_precision.param_dtype": sharding.compute_dtype, "model_dtype": sharding.master_dtype}
        for name, chosen in formats.items():
            if chosen == "fp16":
                text = f"{place}.{name}=fp16 loses small gradients, which no loss scaling keeps here. Use bf16 or fp32."
                yield Problem(f"{place}.{name}", text)


@validator("error")
def offload_policy_requires_fsdp2(config: PPOConfig) -> Iterator[Problem]:
    for role, place in sharded(config).items():
        if get_path(config, place).offload_policy and get_path(config, role).strategy == "fsdp1":
            text = (
                f"needs fsdp2, and {role}.strategy=fsdp1. Use {role}.strategy=fsdp2, or param_offload and "
                "optimizer_offload."
            )
            yield problem(config, f"{place}.offload_policy", text, f"{role}.strategy")


@validator("error")
def l2_coef_requires_fsdp2_or_local(config: PPOConfig) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    if actor.l2_coef and actor.strategy in ("deepspeed", "fsdp1"):
        text = (
            f"needs fsdp2 or local, and {ACTOR}.strategy={actor.strategy} keeps weights and gradients in flat pieces. "
            f"Use {ACTOR}.optim.weight_decay, or {ACTOR}.strategy=fsdp2."
        )
        yield problem(config, f"{ACTOR}.l2_coef", text, f"{ACTOR}.strategy")


@validator("error")
def local_strategy_requires_one_worker(config: PPOConfig) -> Iterator[Problem]:
    for key in models(config):
        if get_path(config, key).strategy == "local" and config.trainer.world_size > 1:
            text = (
                f"runs in one process, but there are {config.trainer.world_size} workers "
                f"(trainer.nnodes={config.trainer.nnodes} x trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}). "
                "Use fsdp2, or one worker."
            )
            yield problem(config, f"{key}.strategy", text, "trainer.n_gpus_per_node")


def deepspeed_roles(config: PPOConfig) -> Iterator[tuple[str, Role, FSDPConfig, bool]]:
    """(key, section, sharding section, trained?) of the roles that run on DeepSpeed."""
    for key, role in models(config).items():
        if role.strategy == "deepspeed":
            yield key, role, get_path(config, sharded(config)[key]), key in (ACTOR, "critic")


@validator("error")
def zero_offload_requires_stage(config: PPOConfig) -> Iterator[Problem]:
    for key, role, _, is_trained in deepspeed_roles(config):
        zero, stage = role.deepspeed, f"{key}.deepspeed.zero_stage"
        if zero.offload_param and zero.zero_stage != 3:
            text = (
                f"with {stage}={zero.zero_stage}: weights that are whole on every rank cannot be kept in host memory "
                f"during training. Set {stage}=3, or fsdp_config.param_offload, which moves them between phases."
            )
            yield problem(config, f"{key}.deepspeed.offload_param", text, stage)
        if zero.offload_optimizer and zero.zero_stage == 0 and is_trained:
            text = (
                f"with {stage}=0: without ZeRO the optimizer is not DeepSpeed's. Set {stage} to 1, 2 or 3, or "
                "fsdp_config.optimizer_offload, which moves its state between updates."
            )
            yield problem(config, f"{key}.deepspeed.offload_optimizer", text, stage)


@validator("error")
def zero_optimizer_requires_fp32_weights(config: PPOConfig) -> Iterator[Problem]:
    for key, role, sharding, is_trained in deepspeed_roles(config):
        if is_trained and role.deepspeed.zero_stage and sharding.master_dtype != "fp32":
            name = f"{'critic.model' if key == 'critic' else key}.fsdp_config.model_dtype"
            text = (
                f"with {key}.strategy=deepspeed: the sharded optimizer keeps the weights in fp32. Set it to fp32; "
                "mixed_precision.param_dtype is the format of forward and backward."
            )
            yield problem(config, name, text, f"{key}.strategy")


@validator("error")
def zero_stage_1_bf16_cannot_offload(config: PPOConfig) -> Iterator[Problem]:
    for key, role, sharding, is_trained in deepspeed_roles(config):
        leaves = sharding.param_offload or sharding.optimizer_offload
        zero = role.deepspeed
        if config.trainer.device != "cuda" or not is_trained or not leaves or zero.offload_optimizer:
            continue
        if zero.zero_stage == 1 and sharding.compute_dtype == "bf16":
            text = (
                "in bf16 with fsdp_config.param_offload or optimizer_offload: DeepSpeed's optimizer of this stage "
                "stays on the device. Use zero_stage=2, or deepspeed.offload_optimizer=true."
            )
            yield problem(config, f"{key}.deepspeed.zero_stage", text)


@validator("error")
def hpz_partition_size_divides_world_size(config: PPOConfig) -> Iterator[Problem]:
    for key, role, _, _ in deepspeed_roles(config):
        size, world = role.deepspeed.zero_hpz_partition_size, config.trainer.world_size
        if role.deepspeed.zero_stage == 3 and world % size:
            text = f"does not divide the {world} workers. Choose a divisor of {world}, usually those of one machine."
            yield problem(config, f"{key}.deepspeed.zero_hpz_partition_size", text, "trainer.n_gpus_per_node")


@validator("error")
def deepspeed_config_conflicts(config: PPOConfig) -> Iterator[Problem]:
    for key, role, _, _ in deepspeed_roles(config):
        for name, value, way_out in deepspeed_conflicts(role.deepspeed.config):
            text = f"{key}.deepspeed.config.{name}={show(value)} is decided by verl: {way_out}."
            yield Problem(f"{key}.deepspeed.config", text)


@validator("error")
def triton_kernels_require_cuda(config: PPOConfig) -> Iterator[Problem]:
    model, place = config.actor_rollout_ref.model, "actor_rollout_ref.model"
    wanted = {
        f"{place}.use_liger": (model.use_liger, "Set it to false"),
        f"{place}.fused_kernel_options.impl_backend": (
            model.use_fused_kernels and model.fused_kernel_options.impl_backend == "triton",
            "Use torch, which computes the same",
        ),
    }
    for key, (is_wanted, way_out) in wanted.items():
        if is_wanted and config.trainer.device != "cuda":
            text = (
                f"with trainer.device={config.trainer.device}: liger's Triton kernels (`{install_command('liger')}`) "
                f"run on CUDA devices only. {way_out}, or set trainer.device=cuda."
            )
            yield problem(config, key, text, "trainer.device")


# -- Settings of models, sharding and formats without effect ---------------------------------------------------------


@validator("warning")
def ref_options_unused_with_lora(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    shared = config.actor_rollout_ref
    if config.uses_reference and shared.model.lora_rank and not shared.ref.own_path:
        keys = [key for key in given_below(REF, config, is_given) if "log_prob" not in key]
        yield from unused(config, keys, is_given, "the reference is the actor with its LoRA adapter switched off")


@validator("warning")
def fused_kernels_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    model, key = config.actor_rollout_ref.model, "actor_rollout_ref.model.use_fused_kernels"
    why = "log-probs and entropy are computed from hidden states in chunks either way"
    if not model.use_fused_kernels or model.fused_kernel_options.impl_backend == "torch":
        yield from unused(config, [key], is_given, why)
    decides = f"{key}={show(model.use_fused_kernels)} decides"
    yield from unused(config, [f"{ACTOR}.use_fused_kernels"], is_given, decides)


@validator("warning")
def triton_kernel_without_entropy(config: PPOConfig) -> Iterator[Problem]:
    shared = config.actor_rollout_ref
    model, entropy = shared.model, shared.actor.entropy_coeff
    if model.use_fused_kernels and model.fused_kernel_options.impl_backend == "triton" and entropy:
        text = (
            f"actor_rollout_ref.model.fused_kernel_options.impl_backend=triton with {ACTOR}.entropy_coeff={entropy}: "
            "the kernel gives no entropy, so updates of the actor run on torch"
        )
        yield Problem("actor_rollout_ref.model.fused_kernel_options.impl_backend", text)


@validator("warning")
def torch_compile_unused_on_cpu(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.trainer.device == "cpu":
        keys = [f"{role}.use_torch_compile" for role in (ACTOR, REF) if get_path(config, role).use_torch_compile]
        yield from unused(config, keys, is_given, "the head is compiled on CUDA only")


@validator("warning")
def fsdp_means_fsdp2(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    roles = [role for role in sharded(config) if is_given(f"{role}.strategy")]
    named = [f"{role}.strategy=fsdp" for role in roles if get_path(config, role).strategy == "fsdp"]
    if named:
        text = f"{', '.join(named)} is FSDP2 (fully_shard), with the same results; fsdp1 names the older implementation"
        yield Problem(named[0].partition("=")[0], text)


@validator("warning")
def sharding_options_unused_with_local_strategy(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    names = (
        "reshard_after_forward",
        "forward_prefetch",
        "offload_policy",
        "fsdp_size",
        "wrap_policy.min_num_params",
        "wrap_policy.transformer_layer_cls_to_wrap",
        "mixed_precision.reduce_dtype",
    )
    for role, place in sharded(config).items():
        if get_path(config, role).strategy == "local":
            keys = [f"{place}.{name}" for name in names]
            yield from unused(config, keys, is_given, f"{role}.strategy=local does not shard")


@validator("warning")
def fsdp_options_unused_with_deepspeed(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    names = (
        "reshard_after_forward",
        "fsdp_size",
        "forward_prefetch",
        "offload_policy",
        "wrap_policy.min_num_params",
        "wrap_policy.transformer_layer_cls_to_wrap",
    )
    for role, place in sharded(config).items():
        if get_path(config, role).strategy == "deepspeed":
            keys = [f"{place}.{name}" for name in names]
            yield from unused(config, keys, is_given, f"{role}.strategy=deepspeed shards as {role}.deepspeed says")


@validator("warning")
def deepspeed_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    stage3 = ("offload_param", "zero_hpz_partition_size")
    for role in sharded(config):
        section, keys = get_path(config, role), given_below(f"{role}.deepspeed", config, is_given)
        stage = section.deepspeed.zero_stage
        keys = [key for key in keys if not key.endswith(".zero_stage") or section.strategy != "deepspeed"]
        if section.strategy != "deepspeed":
            yield from unused(config, keys, is_given, f"{role}.strategy={section.strategy}")
        elif role in (REF, RM) and stage < 3:
            yield from unused(config, keys, is_given, "below zero_stage=3 what only scores is whole on every rank")
        elif stage == 0:
            keys = [key for key in keys if not key.endswith(".reduce_bucket_size")]
            yield from unused(config, keys, is_given, f"{role}.deepspeed.zero_stage=0 shards nothing")
        elif stage < 3:
            names = [key for key in keys if key.rpartition(".")[2].startswith(("stage3_", *stage3))]
            yield from unused(config, names, is_given, f"{role}.deepspeed.zero_stage={stage} keeps weights whole")


@validator("warning")
def model_dtype_unused_without_training(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    keys = [f"{REF}.fsdp_config.model_dtype"] if config.uses_reference else []
    keys += [f"{RM}.model.fsdp_config.model_dtype"] if config.reward_model.enable else []
    why = "weights that are not trained are kept in mixed_precision.param_dtype"
    yield from unused(config, keys, is_given, why)


@validator("warning")
def offload_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.trainer.device == "cpu":
        names = ("param_offload", "optimizer_offload", "offload_policy")
        switches = [f"{place}.{name}" for place in sharded(config).values() for name in names]
        switches += ["actor_rollout_ref.model.enable_activation_offload"]
        switches += ["critic.model.enable_activation_offload"] * config.uses_critic
        switches += [f"{role}.deepspeed.offload_{name}" for role in sharded(config) for name in ("param", "optimizer")]
        keys = [key for key in switches if get_path(config, key)]
        yield from unused(config, keys, is_given, "with trainer.device=cpu all is in host memory")
        return
    if config.uses_reference:
        yield from unused(config, [f"{REF}.fsdp_config.optimizer_offload"], is_given, "the reference is not trained")
    for role, place in sharded(config).items():
        if get_path(config, place).offload_policy and get_path(config, role).strategy != "local":
            keys = [key for key in (f"{place}.param_offload", f"{place}.optimizer_offload") if get_path(config, key)]
            yield from unused(config, keys, is_given, f"{place}.offload_policy keeps both in host memory for good")
    if config.reward_model.enable:
        keys = [f"{RM}.model.fsdp_config.optimizer_offload"]
        yield from unused(config, keys, is_given, "the reward model is not trained")


# -- Settings with which a run would work and which are probably not meant ------------------------------------------


@validator("advice")
def sequence_parallel_for_short_sequences(config: PPOConfig) -> Iterator[Problem]:
    longest = config.actor_rollout_ref.rollout.longest_sequence
    for key, section in models(config).items():
        size = section.ulysses_sequence_parallel_size
        if size > 1 and longest < 4096:
            text = (
                f"shares samples of at most {longest} tokens among {size} ranks, which exchange tokens in every layer. "
                "Of so few tokens a device holds many: set it to 1."
            )
            yield problem(config, f"{key}.ulysses_sequence_parallel_size", text)


@validator("advice")
def bf16_weights_with_small_learning_rate(config: PPOConfig) -> Iterator[Problem]:
    for key, role, _ in trained_roles(config):
        place = f"{key}.model.fsdp_config" if key == "critic" else f"{key}.fsdp_config"
        if get_path(config, place).master_dtype == "bf16" and role.optim.lr < 1e-4:
            text = (
                f"with {key}.optim.lr={role.optim.lr:g}: bf16 has 8 bits, and steps so small are rounded away. Use "
                "fp32."
            )
            yield problem(config, f"{place}.model_dtype", text, f"{key}.optim.lr")
