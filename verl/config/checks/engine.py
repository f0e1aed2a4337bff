"""Validators of training engines: sharding, formats, offload, adapters, kernels."""

from collections.abc import Iterator

from verl.config.base import Problem, get_path
from verl.config.checks.base import (
    EngineRole,
    IsGiven,
    contradictions,
    engine_roles,
    given_below,
    models,
    problem,
    trained_roles,
    unused,
    validator,
)
from verl.config.engine import deepspeed_conflicts
from verl.config.ppo import ACTOR, MODEL, REF, RM, ROLLOUT, TEACHER, PPOConfig
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
        world = config.world_size_of(role)
        if world % role.ulysses_sequence_parallel_size:
            text = f"does not divide the {world} workers. Choose a divisor of {world}."
            yield problem(config, f"{key}.ulysses_sequence_parallel_size", text, "trainer.n_gpus_per_node")


@validator("error")
def sequence_parallel_requires_remove_padding(config: PPOConfig) -> Iterator[Problem]:
    for key, role in models(config).items():
        # the reference runs the actor's model, and runs it as the actor does
        switch = f"{ACTOR}.use_remove_padding" if key in (ACTOR, REF, TEACHER) else f"{key}.model.use_remove_padding"
        if role.ulysses_sequence_parallel_size > 1 and not get_path(config, switch):
            text = (
                f"with {switch}=false: ranks can share one packed sequence, not padded rows. Set it to "
                f"true{' (actor_rollout_ref.model.use_remove_padding)' if switch.startswith(ACTOR) else ''}, or the "
                "size to 1."
            )
            yield problem(config, f"{key}.ulysses_sequence_parallel_size", text, switch)


@validator("error")
def fsdp_size_divides_world_size(config: PPOConfig) -> Iterator[Problem]:
    own = (f"{key}.fsdp_config" for key in (ACTOR, REF, TEACHER, "critic.model", f"{RM}.model"))
    for key in own:
        world = config.world_size_of(get_path(config, key.rpartition(".")[0]))
        size = get_path(config, key).fsdp_size
        # more than there are workers means all of them
        if size == 0 or size < -1 or (size > 0 and world % min(size, world)):
            text = f"must be -1 (all ranks) or a divisor of the {world} workers."
            yield problem(config, f"{key}.fsdp_size", text, "trainer.n_gpus_per_node")


@validator("error")
def fp16_training_unsupported(config: PPOConfig) -> Iterator[Problem]:
    for role in engine_roles(config):
        formats = {
            "dtype" if role.engine.has_megatron else "mixed_precision.param_dtype": role.sharding.compute_dtype,
            "model_dtype": role.sharding.master_dtype,
        }
        for name, chosen in formats.items():
            if chosen == "fp16" and role.is_trained:
                key = f"{role.place}.{name}"
                yield Problem(
                    key, f"{key}=fp16 loses small gradients, which no loss scaling keeps here. Use bf16 or fp32."
                )


@validator("error")
def offload_policy_requires_fsdp2(config: PPOConfig) -> Iterator[Problem]:
    for role in engine_roles(config):
        if role.section.strategy == "fsdp1" and role.sharding.offload_policy:
            text = (
                f"needs fsdp2, and {role.key}.strategy=fsdp1. Use {role.key}.strategy=fsdp2, or param_offload and "
                "optimizer_offload."
            )
            yield problem(config, f"{role.place}.offload_policy", text, f"{role.key}.strategy")


@validator("error")
def once_a_mini_batch_requires_fsdp2(config: PPOConfig) -> Iterator[Problem]:
    for role in engine_roles(config):
        for name, verb in (("reduce_once", "reduces"), ("gather_once", "gathers for")):
            if role.section.strategy == "fsdp1" and role.sharding[name]:
                text = f"needs fsdp2: FSDP1 {verb} each micro-batch. Set {role.key}.strategy=fsdp2, or leave it null."
                yield problem(config, f"{role.place}.{name}", text, f"{role.key}.strategy")


@validator("error")
def l2_coef_requires_whole_weights(config: PPOConfig) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    # the actor is always the first of the roles
    if actor.l2_coef and engine_roles(config)[0].engine.has_flat_pieces:
        text = (
            f"needs fsdp2 or local, and {ACTOR}.strategy={actor.strategy} keeps weights and gradients in flat pieces. "
            f"Use {ACTOR}.optim.weight_decay, or {ACTOR}.strategy=fsdp2."
        )
        yield problem(config, f"{ACTOR}.l2_coef", text, f"{ACTOR}.strategy")


@validator("error")
def local_strategy_requires_one_worker(config: PPOConfig) -> Iterator[Problem]:
    trainer = config.trainer
    for role in engine_roles(config):
        world = config.world_size_of(role.section)
        if role.engine.is_one_process and world > 1:
            place = (
                (trainer, "trainer")
                if not config.teacher_processes or role.key != TEACHER
                else (config.distillation, "distillation")
            )
            text = (
                f"runs in one process, but there are {world} workers ({place[1]}.nnodes={place[0].nnodes} x "
                f"{place[1]}.n_gpus_per_node={place[0].n_gpus_per_node}). Use fsdp2, or one worker."
            )
            yield problem(config, f"{role.key}.strategy", text, "trainer.n_gpus_per_node")


def zero_roles(config: PPOConfig) -> list[EngineRole]:
    """The roles that run on DeepSpeed."""
    return [role for role in engine_roles(config) if role.engine.has_zero]


@validator("error")
def zero_offload_requires_stage(config: PPOConfig) -> Iterator[Problem]:
    for role in zero_roles(config):
        zero, stage = role.section.deepspeed, f"{role.key}.deepspeed.zero_stage"
        if zero.offload_param and zero.zero_stage != 3:
            text = (
                f"with {stage}={zero.zero_stage}: weights that are whole on every rank cannot be kept in host memory "
                f"during training. Set {stage}=3, or fsdp_config.param_offload, which moves them between phases."
            )
            yield problem(config, f"{role.key}.deepspeed.offload_param", text, stage)
        if zero.offload_optimizer and zero.zero_stage == 0 and role.is_trained:
            text = (
                f"with {stage}=0: without ZeRO the optimizer is not DeepSpeed's. Set {stage} to 1, 2 or 3, or "
                "fsdp_config.optimizer_offload, which moves its state between updates."
            )
            yield problem(config, f"{role.key}.deepspeed.offload_optimizer", text, stage)


@validator("error")
def zero_optimizer_requires_fp32_weights(config: PPOConfig) -> Iterator[Problem]:
    for role in zero_roles(config):
        if role.is_trained and role.section.deepspeed.zero_stage and role.sharding.master_dtype != "fp32":
            text = (
                f"with {role.key}.strategy=deepspeed: the sharded optimizer keeps the weights in fp32. Set it to fp32; "
                "mixed_precision.param_dtype is the format of forward and backward."
            )
            yield problem(config, f"{role.place}.model_dtype", text, f"{role.key}.strategy")


@validator("error")
def zero_stage_1_bf16_cannot_offload(config: PPOConfig) -> Iterator[Problem]:
    for role in zero_roles(config):
        zero, sharding = role.section.deepspeed, role.sharding
        leaves = (sharding.param_offload or sharding.optimizer_offload) and not zero.offload_optimizer
        in_bf16 = config.trainer.device == "cuda" and sharding.compute_dtype == "bf16"
        if role.is_trained and leaves and in_bf16 and zero.zero_stage == 1:
            text = (
                "in bf16 with fsdp_config.param_offload or optimizer_offload: DeepSpeed's optimizer of this stage "
                "stays on the device. Use zero_stage=2, or deepspeed.offload_optimizer=true."
            )
            yield problem(config, f"{role.key}.deepspeed.zero_stage", text)


@validator("error")
def hpz_partition_size_divides_world_size(config: PPOConfig) -> Iterator[Problem]:
    for role in zero_roles(config):
        world = config.world_size_of(role.section)
        if role.section.deepspeed.zero_stage == 3 and world % role.section.deepspeed.zero_hpz_partition_size:
            text = f"does not divide the {world} workers. Choose a divisor of {world}, usually those of one machine."
            yield problem(config, f"{role.key}.deepspeed.zero_hpz_partition_size", text, "trainer.n_gpus_per_node")


@validator("error")
def deepspeed_config_conflicts(config: PPOConfig) -> Iterator[Problem]:
    for role in zero_roles(config):
        for name, value, option in deepspeed_conflicts(role.section.deepspeed.config):
            key = f"{role.key}.deepspeed.config"
            yield Problem(key, f"{key}.{name}={show(value)} is decided by verl: {option}.")


@validator("error")
def learning_rate_falls_no_lower_than_itself(config: PPOConfig) -> Iterator[Problem]:
    for key, role, _ in trained_roles(config):
        for name in ("min_lr", "lr_warmup_init"):
            if role.optim[name] > role.optim.lr and (name != "min_lr" or role.optim.warmup_style != "constant"):
                text = f"is more than {key}.optim.lr={role.optim.lr:g}, the highest rate. Lower it."
                yield problem(config, f"{key}.optim.{name}", text, f"{key}.optim.lr")


@validator("error")
def compiled_layers_are_pytorchs(config: PPOConfig) -> Iterator[Problem]:
    key, model = f"{MODEL}.compile_layers", config.actor_rollout_ref.model
    if model.compile_layers and model.use_liger:
        text = f"with {MODEL}.use_liger=true: both fuse the operations of layers. Leave {MODEL}.use_liger null, or off."
        yield problem(config, key, text, f"{MODEL}.use_liger")
    for role in zero_roles(config) if model.compile_layers else ():
        stage = f"{role.key}.deepspeed.zero_stage"
        if role.key in (ACTOR, REF) and role.section.deepspeed.zero_stage == 3:
            text = f"with {stage}=3: ZeRO gathers weights inside of layers, out of torch.compile's sight. Use fsdp2."
            yield problem(config, key, text, stage)


@validator("error")
def triton_kernels_require_cuda(config: PPOConfig) -> Iterator[Problem]:
    model, device = config.actor_rollout_ref.model, config.trainer.device
    is_triton = model.use_fused_kernels and model.fused_kernel_options.impl_backend == "triton"
    for name, is_on, instead in (
        ("use_liger", model.use_liger, "Set it to false"),
        ("fused_kernel_options.impl_backend", is_triton, "Use torch, which computes the same"),
    ):
        if is_on and device != "cuda":
            text = (
                f"with trainer.device={device}: liger's Triton kernels (`{install_command('liger')}`) run on CUDA "
                f"devices only. {instead}, or set trainer.device=cuda."
            )
            yield problem(config, f"{MODEL}.{name}", text, "trainer.device")


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
    # the head never makes whole logits, so the option only chooses who computes
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
    keys = [f"{key}.strategy" for key in models(config) if is_given(f"{key}.strategy")]
    named = [f"{key}=fsdp" for key in keys if get_path(config, key) == "fsdp"]
    if named:
        text = f"{', '.join(named)} is FSDP2 (fully_shard), with the same results; fsdp1 names the older implementation"
        yield Problem(named[0].partition("=")[0], text)


@validator("warning")
def sharding_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    for role in engine_roles(config):
        why = f"{role.key}.strategy={role.section.strategy} {role.engine.shards.format(role=role.key)}"
        yield from unused(config, [f"{role.place}.{name}" for name in role.engine.unread], is_given, why)


@validator("warning")
def deepspeed_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    stage3 = ("stage3_", "offload_param", "zero_hpz_partition_size")
    for role in engine_roles(config):
        stage, keys = role.section.deepspeed.zero_stage, given_below(f"{role.key}.deepspeed", config, is_given)
        if not role.engine.has_zero:
            yield from unused(config, keys, is_given, f"{role.key}.strategy={role.section.strategy}")
            continue
        keys = [key for key in keys if not key.endswith(".zero_stage")]
        # stages 1 and 2 share out state and gradients, of which a frozen model has none
        if not role.is_trained and stage < 3:
            yield from unused(config, keys, is_given, "below zero_stage=3 what only scores is whole on every rank")
        elif stage == 0:
            keys = [key for key in keys if not key.endswith(".reduce_bucket_size")]
            yield from unused(config, keys, is_given, f"{role.key}.deepspeed.zero_stage=0 shards nothing")
        elif stage < 3:
            keys = [key for key in keys if key.rpartition(".")[2].startswith(stage3)]
            yield from unused(config, keys, is_given, f"{role.key}.deepspeed.zero_stage={stage} keeps weights whole")


@validator("warning")
def training_options_unused_without_training(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    frozen = [role for role in engine_roles(config) if not role.is_trained]
    why = "weights that are not trained are kept in mixed_precision.param_dtype"
    keys = [f"{role.place}.model_dtype" for role in frozen if not role.engine.has_megatron]
    yield from unused(config, keys, is_given, why)
    for role in frozen if config.trainer.device != "cpu" else ():  # there, the next warning names all offload
        why = f"the {'reference' if role.key == REF else 'reward model'} is not trained"
        yield from unused(config, [f"{role.place}.optimizer_offload"], is_given, why)


@validator("warning")
def offload_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    roles, names = engine_roles(config), ("param_offload", "optimizer_offload", "offload_policy")
    if config.trainer.device == "cpu":
        keys = [f"{role.place}.{name}" for role in roles for name in names if name in role.sharding]
        keys += [f"{role.place}.grad_offload" for role in roles if role.engine.has_megatron]
        keys += [f"{MODEL}.enable_activation_offload"]
        keys += ["critic.model.enable_activation_offload"] * config.uses_critic
        keys += [f"{role.key}.deepspeed.offload_{name}" for role in roles for name in ("param", "optimizer")]
        keys = [key for key in keys if get_path(config, key)]
        yield from unused(config, keys, is_given, "with trainer.device=cpu all is in host memory")
        return
    for role in roles:
        if role.sharding.get("offload_policy") and not role.engine.is_one_process:
            keys = [f"{role.place}.{name}" for name in names[:2] if role.sharding[name]]
            yield from unused(config, keys, is_given, f"{role.place}.offload_policy keeps both in host memory for good")


# -- Settings with which a run would work and which are probably not meant ------------------------------------------


@validator("advice")
def sequence_parallel_for_short_sequences(config: PPOConfig) -> Iterator[Problem]:
    longest = config.actor_rollout_ref.rollout.longest_sequence
    for key, section in models(config).items():
        size = section.ulysses_sequence_parallel_size
        # so few tokens fit one device with room to spare: sharing them costs more than it saves
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
        if role.strategy != "megatron" and get_path(config, place).master_dtype == "bf16" and role.optim.lr < 1e-4:
            text = (
                f"with {key}.optim.lr={role.optim.lr:g}: bf16 has 8 bits, and steps so small are rounded away. Use "
                "fp32."
            )
            yield problem(config, f"{place}.model_dtype", text, f"{key}.optim.lr")
