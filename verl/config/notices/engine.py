"""Settings of models, sharding and formats without effect."""

from collections.abc import Iterator

from verl.config.base import get_path
from verl.config.build import show
from verl.config.notices.base import IsGiven, given_below, notice, unread
from verl.config.ppo import PPOConfig
from verl.config.rules.base import ACTOR, REF, RM, ROLLOUT, sharded


@notice
def there_is_no_adapter(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    models = ["actor_rollout_ref.model", *(["critic.model"] if config.uses_critic else [])]
    for model in models:
        if not get_path(config, model).lora_rank:
            keys = [f"{model}.{name}" for name in ("lora_alpha", "target_modules", "exclude_modules")]
            keys += [f"{ROLLOUT}.lora_sync"] * (model == models[0])
            yield from unread(config, keys, is_given, f"{model}.lora_rank=0 trains all weights")


@notice
def reference_is_the_actor_without_its_adapter(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    shared = config.actor_rollout_ref
    if config.uses_reference and shared.model.lora_rank and not (shared.ref.model or {}).get("path"):
        keys = [key for key in given_below(REF, config, is_given) if "log_prob" not in key]
        yield from unread(config, keys, is_given, "the reference is the actor with its LoRA adapter switched off")


@notice
def always_chunked(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    keys = [
        f"{role}.{name}"
        for role in (ACTOR, REF)
        for name in ("entropy_from_logits_with_chunking", "entropy_checkpointing")
    ]
    yield from unread(
        config, keys, is_given, "entropy and log-probs are always computed in chunks and recomputed in backward"
    )


@notice
def always_from_hidden_states(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    model, key = config.actor_rollout_ref.model, "actor_rollout_ref.model.use_fused_kernels"
    why = "log-probs and entropy are computed from hidden states in chunks either way"
    if not model.use_fused_kernels or model.fused_kernel_options.impl_backend == "torch":
        yield from unread(config, [key], is_given, why)
    decides = f"{key}={show(model.use_fused_kernels)} decides"
    yield from unread(config, [f"{ACTOR}.use_fused_kernels"], is_given, decides)
    if not model.use_fused_kernels:
        backend = "actor_rollout_ref.model.fused_kernel_options.impl_backend"
        yield from unread(config, [backend], is_given, f"{key}=false")


@notice
def entropy_is_not_the_kernels(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    shared = config.actor_rollout_ref
    model, entropy = shared.model, shared.actor.entropy_coeff
    if model.use_fused_kernels and model.fused_kernel_options.impl_backend == "triton" and entropy:
        yield (
            f"actor_rollout_ref.model.fused_kernel_options.impl_backend=triton with {ACTOR}.entropy_coeff={entropy}: "
            "the kernel gives no entropy, so updates of the actor run on torch"
        )


@notice
def nothing_is_compiled_on_cpu(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.trainer.device == "cpu":
        keys = [f"{role}.use_torch_compile" for role in (ACTOR, REF) if get_path(config, role).use_torch_compile]
        yield from unread(config, keys, is_given, "the head is compiled on CUDA only")


@notice
def one_worker_implementation(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    yield from unread(config, ["trainer.use_legacy_worker_impl"], is_given, "there is one implementation")


@notice
def fsdp_runs_on_fsdp2(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    roles = [role for role in sharded(config) if is_given(f"{role}.strategy")]
    named = [f"{role}.strategy=fsdp" for role in roles if get_path(config, role).strategy == "fsdp"]
    if named:
        yield f"{', '.join(named)} is FSDP2 (fully_shard), with the same results; fsdp1 names the older implementation"


@notice
def local_does_not_shard(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
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
            yield from unread(config, keys, is_given, f"{role}.strategy=local does not shard")


@notice
def deepspeed_is_not_fsdp(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
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
            yield from unread(config, keys, is_given, f"{role}.strategy=deepspeed shards as {role}.deepspeed says")


@notice
def deepspeed_section_is_not_read(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    stage3 = ("offload_param", "zero_hpz_partition_size")
    for role in sharded(config):
        section, keys = get_path(config, role), given_below(f"{role}.deepspeed", config, is_given)
        stage = section.deepspeed.zero_stage
        keys = [key for key in keys if not key.endswith(".zero_stage") or section.strategy != "deepspeed"]
        if section.strategy != "deepspeed":
            yield from unread(config, keys, is_given, f"{role}.strategy={section.strategy}")
        elif role in (REF, RM) and stage < 3:
            yield from unread(config, keys, is_given, "below zero_stage=3 what only scores is whole on every rank")
        elif stage == 0:
            keys = [key for key in keys if not key.endswith(".reduce_bucket_size")]
            yield from unread(config, keys, is_given, f"{role}.deepspeed.zero_stage=0 shards nothing")
        elif stage < 3:
            names = [key for key in keys if key.rpartition(".")[2].startswith(("stage3_", *stage3))]
            yield from unread(config, names, is_given, f"{role}.deepspeed.zero_stage={stage} keeps weights whole")


@notice
def buffers_keep_their_format(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    keys = [f"{place}.mixed_precision.buffer_dtype" for place in sharded(config).values()]
    yield from unread(config, keys, is_given, "buffers keep the format the model gives them")


@notice
def reference_is_kept_as_it_computes(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    keys = [f"{REF}.fsdp_config.model_dtype"] if config.uses_reference else []
    keys += [f"{RM}.model.fsdp_config.model_dtype"] if config.reward_model.enable else []
    why = "weights that are not trained are kept in mixed_precision.param_dtype"
    yield from unread(config, keys, is_given, why)


@notice
def nothing_to_offload(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.trainer.device == "cpu":
        names = ("param_offload", "optimizer_offload", "offload_policy")
        switches = [f"{place}.{name}" for place in sharded(config).values() for name in names]
        switches += ["actor_rollout_ref.model.enable_activation_offload"]
        switches += ["critic.model.enable_activation_offload"] * config.uses_critic
        switches += [f"{role}.deepspeed.offload_{name}" for role in sharded(config) for name in ("param", "optimizer")]
        keys = [key for key in switches if get_path(config, key)]
        yield from unread(config, keys, is_given, "with trainer.device=cpu all is in host memory")
        return
    if config.uses_reference:
        yield from unread(config, [f"{REF}.fsdp_config.optimizer_offload"], is_given, "the reference is not trained")
    for role, place in sharded(config).items():
        if get_path(config, place).offload_policy and get_path(config, role).strategy != "local":
            keys = [key for key in (f"{place}.param_offload", f"{place}.optimizer_offload") if get_path(config, key)]
            yield from unread(config, keys, is_given, f"{place}.offload_policy keeps both in host memory for good")
    if config.reward_model.enable:
        keys = [f"{RM}.model.fsdp_config.optimizer_offload"]
        yield from unread(config, keys, is_given, "the reward model is not trained")
