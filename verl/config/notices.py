"""Settings that have no effect: what the user gave and nothing reads, each said once.

A notice is no error. Values that would need something that is not built are errors and stand in ``support.py``.
"""

from collections.abc import Callable, Iterator

from verl.config.base import get_path, leaves
from verl.config.build import show
from verl.config.ppo import PPOConfig
from verl.config.rules import SHAPING, runs_fsdp1, shapes_scores, sharded, trained_roles
from verl.config.sampling_names import RESHAPE
from verl.config.support import built_names

IsGiven = Callable[[str], bool]

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_RM = "reward_model"
_CORRECTION = "algorithm.rollout_correction"
_CLIPPING = ("vanilla", "gspo", "geo_mean", "cispo", "clip_cov", "dppo_tv", "dppo_kl", "bypass_mode")
_READ_BY_LOSS: dict[str, tuple[str, ...]] = {
    "clip_ratio": _CLIPPING,
    "clip_ratio_low": _CLIPPING,
    "clip_ratio_high": _CLIPPING,
    "clip_ratio_c": ("vanilla", "dppo_tv", "dppo_kl", "bypass_mode"),
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
    **{f"policy_loss.{name}": ("clip_cov",) for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")},
    **{f"policy_loss.{name}": ("kl_cov",) for name in ("kl_cov_ratio", "ppo_kl_coef")},
    **{f"policy_loss.{name}": ("tis",) for name in ("tis_lower_bound", "tis_upper_bound")},
    **{f"policy_loss.{name}": ("topr",) for name in ("topr_pos_weight", "topr_neg_weight", "topr_ratio")},
    "policy_loss.kimi15_tau": ("kimi15",),
    "policy_loss.dro_beta": ("dro",),
}
"""Options of the actor -> the built-in losses that read them."""

_READ_BY_ESTIMATOR: dict[str, tuple[str, ...]] = {
    "algorithm.lam": ("gae",),
    "algorithm.gamma": ("gae", "reinforce_plus_plus", "reinforce", "step_reinforce", "agentic_reinforce"),
    "algorithm.step_gamma": ("step_reinforce", "gigpo"),
    **{f"algorithm.gigpo.{name}": ("gigpo",) for name in ("episode_weight", "step_weight", "mode")},
    "algorithm.norm_adv_by_std_in_grpo": ("grpo", "grpo_passk"),
    "algorithm.gdpo_reward_keys": ("gdpo",),
    "algorithm.gdpo_reward_weights": ("gdpo",),
    f"{_ACTOR}.calculate_sum_pi_squared": ("optimal_token_baseline", "tir_optimal_token_baseline"),
}
"""Options -> the built-in estimators that read them."""

_CENTRES_GROUPS = ("grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg")
"""Built-in estimators that see only how a score differs from those of its siblings."""

_WHITENS = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
"""Built-in estimators that whiten advantages unless told otherwise."""

_PUBLISHED_WITH = {
    "gspo": "seq-mean-token-mean",
    "geo_mean": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "kimi15": "seq-mean-token-sum",
}
"""loss_mode -> the loss_agg_mode of its paper, where that matters."""


def notices(config: PPOConfig, is_given: IsGiven) -> list[str]:
    """One sentence per setting without effect."""
    found = [sentence for check in _CHECKS for sentence in check(config, is_given)]
    return list(dict.fromkeys(found))


def _unread(config: PPOConfig, keys: list[str], is_given: IsGiven, why: str) -> Iterator[str]:
    given = [f"{key}={show(get_path(config, key))}" for key in keys if is_given(key)]
    if given:
        yield f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect: {why}"


def _hf_has_no_engine_knobs(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "hf":
        return
    knobs = [
        "enforce_eager",
        "disable_log_stats",
        "enable_chunked_prefill",
        "load_format",
        "max_model_len",
        "engine_kwargs",
    ]
    if rollout.tensor_model_parallel_size != 1:
        knobs.append("tensor_model_parallel_size")
    yield from _unread(
        config, [f"{_ROLLOUT}.{knob}" for knob in knobs], is_given, f"{_ROLLOUT}.name=hf has no such knob"
    )


def _nothing_is_compared(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        why = f"{_ROLLOUT}.calculate_log_probs=false keeps no probabilities to compare"
        yield from _unread(config, [f"{_ROLLOUT}.mismatch_threshold"], is_given, why)
    elif config.algorithm.rollout_correction.bypass_mode:
        why = f"{_CORRECTION}.bypass_mode=true computes no probabilities to compare with"
        yield from _unread(config, [f"{_ROLLOUT}.mismatch_threshold"], is_given, why)


def _nothing_is_corrected(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    options = config.algorithm.rollout_correction
    of_weights = ["rollout_is_threshold_lower", "rollout_is_mode", "rollout_is_batch_normalize"]
    if options.rollout_rs is None or options.rollout_rs_threshold is not None:
        of_weights.append("rollout_is_threshold")
    unread = {"rollout_is": of_weights, "rollout_rs": ["rollout_rs_threshold", "rollout_rs_threshold_lower"]}
    for switch, names in unread.items():
        if options[switch] is None:
            why = f"{_CORRECTION}.{switch}=null"
            yield from _unread(config, [f"{_CORRECTION}.{name}" for name in names], is_given, why)


def _kl_in_reward_is_the_samplers(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.algorithm.rollout_correction.bypass_mode and config.algorithm.use_kl_in_reward:
        yield (
            f"{_CORRECTION}.bypass_mode=true with algorithm.use_kl_in_reward=true: the reward is charged for the "
            "sampler's distance from the reference, rounding of its kernels included; false measures the policy's"
        )


def _nothing_is_traced(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    backend = config.actor_rollout_ref.rollout.trace.backend
    keys = [] if backend == "file" else [f"{_ROLLOUT}.trace.dir"]
    keys += [] if backend else [f"{_ROLLOUT}.trace.token2text"]
    yield from _unread(config, keys, is_given, f"{_ROLLOUT}.trace.backend={show(backend)} does not read it")


def _nothing_is_reused(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.actor_rollout_ref.rollout.skip_rollout:
        yield from _unread(config, [f"{_ROLLOUT}.skip_dump_dir"], is_given, f"{_ROLLOUT}.skip_rollout=false")


def _there_is_no_adapter(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    models = ["actor_rollout_ref.model", *(["critic.model"] if config.uses_critic else [])]
    for model in models:
        if not get_path(config, model).lora_rank:
            keys = [f"{model}.{name}" for name in ("lora_alpha", "target_modules", "exclude_modules")]
            keys += [f"{_ROLLOUT}.lora_sync"] * (model == models[0])
            yield from _unread(config, keys, is_given, f"{model}.lora_rank=0 trains all weights")


def _reference_is_the_actor_without_its_adapter(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    shared = config.actor_rollout_ref
    if config.uses_reference and shared.model.lora_rank and not (shared.ref.model or {}).get("path"):
        keys = [key for key in _given_below(_REF, config, is_given) if "log_prob" not in key]
        yield from _unread(config, keys, is_given, "the reference is the actor with its LoRA adapter switched off")


def _always_woken_in_stages(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    yield from _unread(
        config, [f"{_ROLLOUT}.multi_stage_wake_up"], is_given, "weights are always brought back first, the cache later"
    )


def _one_call_has_no_agents(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.actor_rollout_ref.rollout.mode == "sync":
        keys = [f"{_ROLLOUT}.server_host", f"{_ROLLOUT}.max_running_requests"]
        keys += _given_below(f"{_ROLLOUT}.agent", config, is_given)
        yield from _unread(config, keys, is_given, f"{_ROLLOUT}.mode=sync samples a batch in one call, without servers")


def _engines_on_cpu_are_eager(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name in ("vllm", "sglang") and config.trainer.device == "cpu" and not rollout.enforce_eager:
        yield from _unread(config, [f"{_ROLLOUT}.enforce_eager"], is_given, "there are no CUDA graphs on a CPU")


def _always_chunked(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    keys = [
        f"{role}.{name}"
        for role in (_ACTOR, _REF)
        for name in ("entropy_from_logits_with_chunking", "entropy_checkpointing")
    ]
    yield from _unread(
        config, keys, is_given, "entropy and log-probs are always computed in chunks and recomputed in backward"
    )


def _always_from_hidden_states(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    model, key = config.actor_rollout_ref.model, "actor_rollout_ref.model.use_fused_kernels"
    why = "log-probs and entropy are computed from hidden states in chunks either way"
    if not model.use_fused_kernels or model.fused_kernel_options.impl_backend == "torch":
        yield from _unread(config, [key], is_given, why)
    decides = f"{key}={show(model.use_fused_kernels)} decides"
    yield from _unread(config, [f"{_ACTOR}.use_fused_kernels"], is_given, decides)
    if not model.use_fused_kernels:
        backend = "actor_rollout_ref.model.fused_kernel_options.impl_backend"
        yield from _unread(config, [backend], is_given, f"{key}=false")


def _entropy_is_not_the_kernels(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    shared = config.actor_rollout_ref
    model, entropy = shared.model, shared.actor.entropy_coeff
    if model.use_fused_kernels and model.fused_kernel_options.impl_backend == "triton" and entropy:
        yield (
            f"actor_rollout_ref.model.fused_kernel_options.impl_backend=triton with {_ACTOR}.entropy_coeff={entropy}: "
            "the kernel gives no entropy, so updates of the actor run on torch"
        )


def _nothing_is_compiled_on_cpu(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.trainer.device == "cpu":
        keys = [f"{role}.use_torch_compile" for role in (_ACTOR, _REF) if get_path(config, role).use_torch_compile]
        yield from _unread(config, keys, is_given, "the head is compiled on CUDA only")


def _one_worker_implementation(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    yield from _unread(config, ["trainer.use_legacy_worker_impl"], is_given, "there is one implementation")


def _fsdp_runs_on_fsdp2(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    roles = [role for role in sharded(config) if is_given(f"{role}.strategy")]
    named = [f"{role}.strategy=fsdp" for role in roles if get_path(config, role).strategy == "fsdp"]
    alone = [role for role in roles if not runs_fsdp1(config, role)]
    named = [name for name in named if name.partition(".strategy")[0] in alone]
    if named:
        yield (
            f"{', '.join(named)} runs on the fsdp2 machinery on a CPU, and where no ranks share a model; the results "
            "are the same"
        )


def _local_does_not_shard(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
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
            yield from _unread(config, keys, is_given, f"{role}.strategy=local does not shard")


def _deepspeed_is_not_fsdp(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
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
            yield from _unread(config, keys, is_given, f"{role}.strategy=deepspeed shards as {role}.deepspeed says")


def _deepspeed_section_is_not_read(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    stage3 = ("offload_param", "zero_hpz_partition_size")
    for role in sharded(config):
        section, keys = get_path(config, role), _given_below(f"{role}.deepspeed", config, is_given)
        stage = section.deepspeed.zero_stage
        keys = [key for key in keys if not key.endswith(".zero_stage") or section.strategy != "deepspeed"]
        if section.strategy != "deepspeed":
            yield from _unread(config, keys, is_given, f"{role}.strategy={section.strategy}")
        elif role in (_REF, _RM) and stage < 3:
            yield from _unread(config, keys, is_given, "below zero_stage=3 what only scores is whole on every rank")
        elif stage == 0:
            keys = [key for key in keys if not key.endswith(".reduce_bucket_size")]
            yield from _unread(config, keys, is_given, f"{role}.deepspeed.zero_stage=0 shards nothing")
        elif stage < 3:
            names = [key for key in keys if key.rpartition(".")[2].startswith(("stage3_", *stage3))]
            yield from _unread(config, names, is_given, f"{role}.deepspeed.zero_stage={stage} keeps weights whole")


def _buffers_keep_their_format(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    keys = [f"{place}.mixed_precision.buffer_dtype" for place in sharded(config).values()]
    yield from _unread(config, keys, is_given, "buffers keep the format the model gives them")


def _reference_is_kept_as_it_computes(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    keys = [f"{_REF}.fsdp_config.model_dtype"] if config.uses_reference else []
    keys += [f"{_RM}.model.fsdp_config.model_dtype"] if config.reward_model.enable else []
    why = "weights that are not trained are kept in mixed_precision.param_dtype"
    yield from _unread(config, keys, is_given, why)


def _nothing_to_offload(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.trainer.device == "cpu":
        names = ("param_offload", "optimizer_offload", "offload_policy")
        switches = [f"{place}.{name}" for place in sharded(config).values() for name in names]
        switches += ["actor_rollout_ref.model.enable_activation_offload"]
        switches += ["critic.model.enable_activation_offload"] * config.uses_critic
        switches += [f"{role}.deepspeed.offload_{name}" for role in sharded(config) for name in ("param", "optimizer")]
        keys = [key for key in switches if get_path(config, key)]
        yield from _unread(config, keys, is_given, "with trainer.device=cpu all is in host memory")
        return
    if config.uses_reference:
        yield from _unread(config, [f"{_REF}.fsdp_config.optimizer_offload"], is_given, "the reference is not trained")
    for role, place in sharded(config).items():
        if get_path(config, place).offload_policy and get_path(config, role).strategy != "local":
            keys = [key for key in (f"{place}.param_offload", f"{place}.optimizer_offload") if get_path(config, key)]
            yield from _unread(config, keys, is_given, f"{place}.offload_policy keeps both in host memory for good")
    if config.reward_model.enable:
        keys = [f"{_RM}.model.fsdp_config.optimizer_offload"]
        yield from _unread(config, keys, is_given, "the reward model is not trained")


def _critic_is_not_there(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.uses_critic:
        read = ["critic.enable"]
        if config.reward_model.enable:  # follows these
            read += ["critic.use_dynamic_bsz", "critic.forward_max_token_len_per_gpu"]
            read += ["critic.ppo_max_token_len_per_gpu"]
        keys = [key for key in _given_below("critic", config, is_given) if key not in read]
        keys += ["trainer.critic_warmup"] if config.trainer.critic_warmup else []
        why = f"there is no critic with algorithm.adv_estimator={config.algorithm.adv_estimator}"
        yield from _unread(config, [*keys, "trainer.max_critic_ckpt_to_keep"], is_given, why)


def _reference_is_not_there(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.uses_reference:
        yield from _unread(
            config,
            _given_below(_REF, config, is_given),
            is_given,
            "there is no reference policy without actor.use_kl_loss or algorithm.use_kl_in_reward",
        )


def _reference_is_not_scored(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.uses_reference and not config.scores_reference:
        keys = [key for key in _given_below(_REF, config, is_given) if key.startswith(f"{_REF}.log_prob_")]
        why = f"with {_ACTOR}.kl_loss_type=full the reference runs in the micro-batches of the actor's update"
        yield from _unread(config, keys, is_given, why)


def _reward_model_is_not_there(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.reward_model.enable:
        return
    of_functions = ("enable", "reward_manager", "reward_kwargs", "on_error", "launch_reward_fn_async", "sandbox_fusion")
    keys = [key for key in _given_below(_RM, config, is_given) if key.split(".")[1] not in of_functions]
    yield from _unread(config, keys, is_given, "there is no reward model with reward_model.enable=false")


def _reward_model_reads_ids_or_texts(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.reward_model.enable:
        return
    yield from _unread(config, [f"{_RM}.model.use_fused_kernels"], is_given, "a score needs no logits over tokens")
    if not config.reward_model.model.input_tokenizer:
        why = f"{_RM}.model.input_tokenizer=null passes token ids on whole"
        yield from _unread(config, [f"{_RM}.max_length"], is_given, why)


def _function_does_not_score_training(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    rm = config.reward_model
    if not rm.enable or rm.reward_manager not in built_names(f"{_RM}.reward_manager"):
        return
    if config.custom_reward_function.path is not None:
        yield (
            f"custom_reward_function.path={config.custom_reward_function.path} scores validation only, rows whose "
            f"reward_model.style is not model: with {_RM}.enable=true the built-in manager {rm.reward_manager} gives "
            f"out the reward model's scores in training. Register a manager of your own to combine both"
        )
    why = f"the built-in manager {rm.reward_manager} gives out the reward model's scores, which are there by then"
    yield from _unread(config, [f"{_RM}.launch_reward_fn_async"] * rm.launch_reward_fn_async, is_given, why)


def _kl_in_reward_is_off(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    control = [f"algorithm.kl_ctrl.{name}" for name in ("type", "kl_coef", "horizon", "target_kl")]
    if not config.algorithm.use_kl_in_reward:
        yield from _unread(config, ["algorithm.kl_penalty", *control], is_given, "algorithm.use_kl_in_reward=false")
    elif config.algorithm.kl_ctrl.type == "fixed":
        yield from _unread(config, control[2:], is_given, "algorithm.kl_ctrl.type=fixed")


def _kl_loss_is_off(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.actor_rollout_ref.actor.use_kl_loss:
        keys = [f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type"]
        yield from _unread(config, keys, is_given, f"{_ACTOR}.use_kl_loss=false")


def _kl_counts_twice(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.algorithm.use_kl_in_reward and config.actor_rollout_ref.actor.use_kl_loss:
        yield f"algorithm.use_kl_in_reward and {_ACTOR}.use_kl_loss are both on: the KL penalty counts twice"


def _micro_batches_are_cut_by_tokens(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    shared, critic = config.actor_rollout_ref, config.critic
    cuts = [
        (shared.actor.use_dynamic_bsz, f"{_ACTOR}.ppo_micro_batch_size_per_gpu", f"{_ACTOR}.ppo_max_token_len_per_gpu"),
        *(
            (
                section.log_prob_use_dynamic_bsz,
                f"{key}.log_prob_micro_batch_size_per_gpu",
                f"{key}.log_prob_max_token_len_per_gpu",
            )
            for key, section in ((_ROLLOUT, shared.rollout), *([(_REF, shared.ref)] if config.scores_reference else []))
        ),
        *(
            (critic.use_dynamic_bsz, f"critic.{kind}_micro_batch_size_per_gpu", f"critic.{kind}_max_token_len_per_gpu")
            for kind in (("ppo", "forward") if config.uses_critic else ())
        ),
    ]
    rm = config.reward_model
    if rm.enable:
        cuts.append((rm.use_dynamic_bsz, f"{_RM}.micro_batch_size_per_gpu", f"{_RM}.forward_max_token_len_per_gpu"))
    by_tokens = [size for dynamic, size, _ in cuts if dynamic]
    leader = f"{_ACTOR}.ppo_max_token_len_per_gpu"  # others follow it: it is read if any of them is
    by_count = [budget for dynamic, _, budget in cuts if not dynamic and budget != leader]
    if not any(dynamic for dynamic, _, _ in cuts):
        by_count.append(leader)
    yield from _unread(config, by_tokens, is_given, "micro-batches are cut by tokens (use_dynamic_bsz)")
    yield from _unread(config, by_count, is_given, "micro-batches are cut by count (use_dynamic_bsz=false)")


def _no_prompt_is_shared(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    """Of one response a prompt there is nothing to share, and in micro-batches of one row none meets another."""
    shared, critic = config.actor_rollout_ref, config.critic
    passes = {
        "actor_rollout_ref.model": [shared.actor.update_split, shared.rollout.log_prob_split],
        "critic.model": [critic.update_split, critic.forward_split] if config.uses_critic else [],
    }
    if config.scores_reference:
        passes["actor_rollout_ref.model"].append(shared.ref.log_prob_split)
    for model, splits in passes.items():
        key = [f"{model}.use_prefix_sharing"] if get_path(config, model).use_prefix_sharing else []
        if shared.rollout.n == 1:
            yield from _unread(config, key, is_given, f"{_ROLLOUT}.n=1 response a prompt has nothing to share with")
        elif splits and all(split.size == 1 for split in splits):
            yield from _unread(config, key, is_given, "micro-batches of one row have nothing to share with")


def _some_ranks_have_no_rows(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    for key, role, n in trained_roles(config):
        rows, ranks = role.ppo_mini_batch_size * n, config.dp_size(role)
        if rows < ranks:
            yield (
                f"{key}.ppo_mini_batch_size={role.ppo_mini_batch_size} x {_ROLLOUT}.n={n} = {rows} responses a "
                f"mini-batch on {ranks} data-parallel ranks: {ranks - rows} of them have nothing to do at each step"
            )


def _schedule_does_not_read_it(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    for key in (f"{_ACTOR}.optim", *(["critic.optim"] if config.uses_critic else [])):
        optim = get_path(config, key)
        readers = {
            "min_lr_ratio": ("cosine", "linear", "wsd"),
            "num_cycles": ("cosine",),
            "lr_wsd_decay_steps": ("wsd",),
            "lr_wsd_decay_style": ("wsd",),
        }
        unread = [f"{key}.{name}" for name, styles in readers.items() if optim.warmup_style not in styles]
        yield from _unread(config, unread, is_given, f"{key}.warmup_style={optim.warmup_style}")
        if optim.lr_warmup_steps is not None and optim.lr_warmup_steps >= 0:
            yield from _unread(
                config,
                [f"{key}.lr_warmup_steps_ratio"],
                is_given,
                f"{key}.lr_warmup_steps={optim.lr_warmup_steps} decides",
            )


def _resume_path_is_not_read(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.trainer.resume_mode != "resume_path" and config.trainer.resume_from_path is not None:
        yield from _unread(
            config, ["trainer.resume_from_path"], is_given, f"trainer.resume_mode={config.trainer.resume_mode}"
        )


def _reward_function_is_built_in(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.custom_reward_function.path is None:
        keys = ["custom_reward_function.name", "custom_reward_function.reward_kwargs"]
        yield from _unread(config, keys, is_given, "custom_reward_function.path=null")


def _no_checkpoint_is_written(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.trainer.save_freq <= 0:
        keys = ["trainer.max_actor_ckpt_to_keep"]
        keys += [f"{_ACTOR}.checkpoint.{name}" for name in ("save_contents", "async_save")]
        if config.uses_critic:
            keys += ["trainer.max_critic_ckpt_to_keep"]
            keys += [f"critic.checkpoint.{name}" for name in ("save_contents", "async_save")]
        yield from _unread(config, keys, is_given, f"trainer.save_freq={config.trainer.save_freq} writes no checkpoint")


def _estimator_does_not_read_it(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    estimator = config.algorithm.adv_estimator
    if estimator in built_names("algorithm.adv_estimator"):
        keys = [key for key, readers in _READ_BY_ESTIMATOR.items() if estimator not in readers]
        yield from _unread(config, keys, is_given, f"algorithm.adv_estimator={estimator} does not read it")


def _loss_does_not_read_it(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if mode in built_names(f"{_ACTOR}.policy_loss.loss_mode"):
        keys = [f"{_ACTOR}.{name}" for name, readers in _READ_BY_LOSS.items() if mode not in readers]
        yield from _unread(config, keys, is_given, f"{_ACTOR}.policy_loss.loss_mode={mode} does not read it")


def _one_step_never_meets_a_bound(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    if actor.ppo_epochs > 1 or actor.ppo_mini_batch_size < config.prompts_per_update:
        return
    if config.algorithm.rollout_correction.bypass_mode:  # then the ratio is that to the sampler
        return
    names = ["clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"]
    names += [f"policy_loss.{name}" for name in ("ppo_kl_coef", "kimi15_tau", "dro_beta")]
    keys = [f"{_ACTOR}.{name}" for name in names if actor.policy_loss.loss_mode in _READ_BY_LOSS[name]]
    why = "with one optimizer step per batch the policy is still the one that sampled, and its ratio is 1"
    yield from _unread(config, keys, is_given, why)


def _loss_was_published_with_another_mean(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    mode = _PUBLISHED_WITH.get(actor.policy_loss.loss_mode, actor.loss_agg_mode)
    if actor.loss_agg_mode != mode:
        yield (
            f"{_ACTOR}.policy_loss.loss_mode={actor.policy_loss.loss_mode} was published with "
            f"{_ACTOR}.loss_agg_mode={mode}, and runs with {actor.loss_agg_mode}"
        )


def _greedy_cuts_nothing(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    for key in (_ROLLOUT, f"{_ROLLOUT}.val_kwargs"):
        sampling = get_path(config, key)
        if not sampling.do_sample:
            names = ["top_k", "top_p", "min_p"]
            names += ["temperature"] * (key != _ROLLOUT)  # log-probs are divided by rollout's
            yield from _unread(config, [f"{key}.{name}" for name in names], is_given, f"{key}.do_sample=false")
        elif sampling.temperature == 0:
            names = ("top_k", "top_p", "min_p", "do_sample")
            yield from _unread(config, [f"{key}.{name}" for name in names], is_given, f"{key}.temperature=0 is greedy")


def _fire_needs_chance(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    fire = [f"{_ROLLOUT}.fire_temperature", f"{_ROLLOUT}.fire_top_k"]
    if not rollout.use_fire_sampling:
        yield from _unread(config, fire, is_given, f"{_ROLLOUT}.use_fire_sampling=false")
    elif not rollout.do_sample:
        yield from _unread(config, [f"{_ROLLOUT}.use_fire_sampling", *fire], is_given, f"{_ROLLOUT}.do_sample=false")
    elif rollout.top_k > 0:
        why = f"{_ROLLOUT}.top_k={rollout.top_k} holds for the first token too"
        yield from _unread(config, fire[1:], is_given, why)


def _nothing_ends_a_response(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.actor_rollout_ref.rollout.ignore_eos:
        keys = [f"{_ROLLOUT}.stop_token_ids", f"{_ROLLOUT}.val_kwargs.stop_token_ids"]
        yield from _unread(config, keys, is_given, f"{_ROLLOUT}.ignore_eos=true goes on after any token")


def _sampled_from_another_policy(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    """Old log-probs are those of softmax(logits / temperature); tokens may be drawn from something else."""
    rollout = config.actor_rollout_ref.rollout
    shapes = {
        "do_sample": not rollout.do_sample,
        "top_p": rollout.do_sample and rollout.top_p < 1,
        "top_k": rollout.do_sample and rollout.top_k > 0,
        "min_p": rollout.do_sample and rollout.min_p > 0,
        "repetition_penalty": rollout.repetition_penalty != 1,
        "use_fire_sampling": rollout.do_sample and rollout.use_fire_sampling,
        **{f"sampling_kwargs.{name}": name in RESHAPE for name, v in rollout.sampling_kwargs.items() if v is not None},
    }
    keys = [f"{_ROLLOUT}.{name}" for name, holds in shapes.items() if holds]
    given = [f"{key}={show(get_path(config, key))}" for key in keys]
    if given:
        yield (
            f"{', '.join(given)} {'makes' if len(given) == 1 else 'make'} the policy that samples another one than the "
            f"policy that is trained: log-probs are computed under softmax(logits / {_ROLLOUT}.temperature), so ratios "
            f"do not see the difference. {_ROLLOUT}.calculate_log_probs=true measures it"
        )


def _weights_go_tensor_by_tensor(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    yield from _unread(
        config, [f"{_ROLLOUT}.layered_summon"], is_given, "weights are always handed over tensor by tensor"
    )


def _nothing_is_validated(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    trainer = config.trainer
    if trainer.test_freq <= 0 and not trainer.val_before_train and not trainer.val_only:
        keys = [
            *_given_below(f"{_ROLLOUT}.val_kwargs", config, is_given),
            "data.val_batch_size",
            "data.validation_shuffle",
            "trainer.validation_data_dir",
            "trainer.log_val_generations",
        ]
        why = "nothing is validated with trainer.test_freq and trainer.val_before_train off"
        yield from _unread(config, keys, is_given, why)


def _steps_go_before_epochs(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    steps = config.trainer.total_training_steps
    if steps is not None:
        why = f"trainer.total_training_steps={steps} decides, over as many epochs as that takes"
        yield from _unread(config, ["trainer.total_epochs"], is_given, why)


def _users_sampler_decides_the_order(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.data.sampler.class_path is not None:
        yield from _unread(config, ["data.shuffle"], is_given, "data.sampler decides the order")


def _nothing_is_filtered(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.data.filter_overlong_prompts:
        keys = ["data.filter_overlong_prompts_workers"]
        yield from _unread(config, keys, is_given, "data.filter_overlong_prompts=false")


def _rollout_shares_devices(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.actor_rollout_ref.hybrid_engine:
        keys = [key for key in (f"{_ROLLOUT}.nnodes", f"{_ROLLOUT}.n_gpus_per_node") if get_path(config, key)]
        yield from _unread(config, keys, is_given, "with actor_rollout_ref.hybrid_engine=true the actor's are used")
    else:
        why = "with actor_rollout_ref.hybrid_engine=false the rollout shares its devices with nobody and stays awake"
        yield from _unread(config, [f"{_ROLLOUT}.free_cache_engine"], is_given, why)


def _one_local_worker_cannot_be_interrupted(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.actor_rollout_ref.hybrid_engine:
        return
    if config.trainer.controller == "local" and config.trainer.world_size == 1:
        yield from _unread(config, ["trainer.worker_timeout"], is_given, "the one worker runs in the driver's process")


def _divisor_is_not_used(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    mode = config.actor_rollout_ref.actor.loss_agg_mode
    if mode != "seq-mean-token-sum-norm":
        yield from _unread(config, [f"{_ACTOR}.loss_scale_factor"], is_given, f"{_ACTOR}.loss_agg_mode={mode}")


def _reward_of_gdpo_has_no_kl(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.adv_estimator == "gdpo" and algorithm.use_kl_in_reward:
        why = f"gdpo reads algorithm.gdpo_reward_keys, not the reward with the KL in it; {_ACTOR}.use_kl_loss works"
        yield from _unread(config, ["algorithm.use_kl_in_reward"], is_given, why)


def _reward_of_gdpo_is_not_shaped(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.algorithm.adv_estimator == "gdpo":
        why = "gdpo reads algorithm.gdpo_reward_keys, and normalises each"
        yield from _unread(config, shapes_scores(config), is_given, why)


def _overlong_responses_cost_nothing(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.algorithm.reward_shaping.overlong_buffer.enable:
        keys = [f"{SHAPING}.overlong_buffer.{name}" for name in ("len", "penalty_factor")]
        yield from _unread(config, keys, is_given, f"{SHAPING}.overlong_buffer.enable=false")


def _estimator_centres_scores_again(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    """A shift or factor common to a group, which the estimator takes out; a bound or a KL between them would show."""
    algorithm, shaping = config.algorithm, config.algorithm.reward_shaping
    compares = algorithm.adv_estimator in _CENTRES_GROUPS and config.actor_rollout_ref.rollout.n > 1
    if not compares or shaping.clip is not None or shaping.clip_range is not None or shaping.whiten:
        return
    keys = [key for key in shapes_scores(config) if key in (f"{SHAPING}.norm.mean", f"{SHAPING}.shift")]
    yield from _unread(config, keys, is_given, f"{algorithm.adv_estimator} compares with siblings, shifted like it")
    divides = algorithm.adv_estimator in ("grpo", "grpo_passk") and algorithm.norm_adv_by_std_in_grpo
    if divides and not algorithm.use_kl_in_reward:
        keys = [key for key in shapes_scores(config) if key in (f"{SHAPING}.norm.std", f"{SHAPING}.scale")]
        why = f"{algorithm.adv_estimator} divides by the std of the group (algorithm.norm_adv_by_std_in_grpo)"
        yield from _unread(config, keys, is_given, why)


def _advantages_are_whitened_or_not_by_themselves(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    estimator, whiten = config.algorithm.adv_estimator, config.algorithm.advantage.whiten
    if estimator in built_names("algorithm.adv_estimator") and whiten is (estimator in _WHITENS):
        habit = "does so" if whiten else "does not"
        yield from _unread(config, ["algorithm.advantage.whiten"], is_given, f"{estimator} {habit} by itself")


def _a_reward_has_no_gradient(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    kind = config.algorithm.kl_penalty
    if config.algorithm.use_kl_in_reward and kind.endswith("+"):
        yield f"algorithm.kl_penalty={kind} is {kind[:-1]}: the + changes a gradient, and a reward has none"


def _ray_is_not_started(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.trainer.controller == "local":
        keys = [key for key in _given_below("ray_init", config, is_given) if key != "ray_init.env"]
        if config.trainer.world_size == 1 and config.actor_rollout_ref.hybrid_engine:
            keys.append("trainer.ray_wait_register_center_timeout")  # forked workers are waited for, too
        yield from _unread(config, keys, is_given, "trainer.controller=local starts no Ray")


def _response_window_is_the_rollouts(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    length = config.actor_rollout_ref.rollout.response_length
    if length != config.data.max_response_length:
        yield from _unread(
            config, ["data.max_response_length"], is_given, f"{_ROLLOUT}.response_length={length} decides"
        )


def _nothing_is_put_off(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    names = [name for name in ("partial_rollout", "max_staleness", "max_postponements") if rollout[name]]
    if rollout.over_sample_rate == 0:
        why = f"with {_ROLLOUT}.over_sample_rate=0 every response is drawn to its end in one step"
        yield from _unread(config, [f"{_ROLLOUT}.{name}" for name in names], is_given, why)
    elif not rollout.partial_rollout:
        why = f"{_ROLLOUT}.partial_rollout=false keeps no tokens for a later step"
        yield from _unread(config, [f"{_ROLLOUT}.max_staleness"], is_given, why)
    elif rollout.max_postponements is not None and rollout.max_postponements > rollout.max_staleness:
        yield (
            f"{_ROLLOUT}.max_postponements={rollout.max_postponements} is more than "
            f"{_ROLLOUT}.max_staleness={rollout.max_staleness}: what a response drew before its last "
            f"{rollout.max_staleness} weight updates is thrown away and drawn anew"
        )


def _given_below(key: str, config: PPOConfig, is_given: IsGiven) -> list[str]:
    return [name for name, _ in leaves(get_path(config, key), f"{key}.") if is_given(name)]


def _all_groups_are_trained_on(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.algorithm.filter_groups.enable:
        names = ("metric", "low", "high", "min_std", "max_num_gen_batches")
        keys = [f"algorithm.filter_groups.{name}" for name in names]
        yield from _unread(config, keys, is_given, "algorithm.filter_groups.enable=false trains on every group")
    elif config.reward_model.launch_reward_fn_async:
        why = "algorithm.filter_groups chooses groups by their rewards before anything else is computed"
        yield from _unread(config, [f"{_RM}.launch_reward_fn_async"], is_given, why)


def _no_response_is_resampled(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    key, algorithm = "algorithm.pf_ppo", config.algorithm
    if not algorithm.use_pf_ppo:
        keys = [f"{key}.reweight_method", f"{key}.weight_pow"]
        yield from _unread(config, keys, is_given, "algorithm.use_pf_ppo=false takes every response once")
    elif algorithm.pf_ppo.reweight_method != "pow":
        why = f"{key}.reweight_method={algorithm.pf_ppo.reweight_method} does not read it"
        yield from _unread(config, [f"{key}.weight_pow"], is_given, why)


def _algorithms(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    """Combinations of estimators, losses and their options in which a setting changes nothing."""
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    if algorithm.adv_estimator == "gigpo" and rollout.mode == "sync":
        yield (
            f"algorithm.adv_estimator=gigpo with {_ROLLOUT}.mode=sync: every response is one turn, so that its "
            "advantages are those of grpo times algorithm.gigpo.episode_weight + step_weight"
        )
    if algorithm.adv_estimator == "gigpo" and not algorithm.gigpo.episode_weight + algorithm.gigpo.step_weight:
        yield "algorithm.gigpo.episode_weight=0 and step_weight=0 make every advantage 0: nothing is learned"
    if rollout.mode == "sync":
        why = f"with {_ROLLOUT}.mode=sync every response is one turn, after which no other comes"
        if algorithm.adv_estimator in ("step_reinforce", "gigpo"):
            yield from _unread(config, ["algorithm.step_gamma"], is_given, why)
        elif algorithm.adv_estimator == "agentic_reinforce":
            yield from _unread(config, ["algorithm.gamma"], is_given, why)
    critic = config.critic
    if config.uses_critic and critic.ppo_epochs == 1 and critic.ppo_mini_batch_size >= config.prompts_per_update:
        why = "with one optimizer step per batch the values are still those the advantages were made with"
        keys = ["critic.cliprange_value"] if critic.cliprange_value is not None else []
        yield from _unread(config, keys, is_given, why)
    buffer = config.reward_model.reward_kwargs.get("overlong_buffer_cfg") or {}
    if buffer.get("enable") and algorithm.reward_shaping.overlong_buffer.enable:
        yield (
            f"{_RM}.reward_kwargs.overlong_buffer_cfg and {SHAPING}.overlong_buffer are both on: a long response is "
            "charged twice"
        )
    correction = algorithm.rollout_correction
    if correction.rollout_is and "_" in str(correction.rollout_is_threshold):
        keys = [f"{_CORRECTION}.rollout_is_threshold_lower", f"{_CORRECTION}.rollout_is_mode"]
        why = f"{_CORRECTION}.rollout_is_threshold={correction.rollout_is_threshold} has both bounds, as IcePop wants"
        yield from _unread(config, keys, is_given, why)
    if correction.rollout_rs and all(kind.endswith(("k2", "k3")) for kind in correction.rollout_rs.split(",")):
        keys = [f"{_CORRECTION}.rollout_rs_threshold_lower"]
        yield from _unread(
            config, keys, is_given, f"{_CORRECTION}.rollout_rs={correction.rollout_rs} has no lower bound"
        )
    if config.actor_rollout_ref.actor.policy_loss.loss_mode == "bypass_mode":
        if correction.loss_type == "ppo_clip":
            keys = [f"{_CORRECTION}.rollout_is"] if correction.rollout_is else []
            why = f"with {_CORRECTION}.loss_type=ppo_clip the clipped ratio is already that to the sampler"
            yield from _unread(config, keys, is_given, why)
        else:
            names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
            why = f"{_CORRECTION}.loss_type=reinforce does not clip"
            yield from _unread(config, [f"{_ACTOR}.{name}" for name in names], is_given, why)


_CHECKS = (
    _hf_has_no_engine_knobs,
    _nothing_is_compared,
    _nothing_is_corrected,
    _kl_in_reward_is_the_samplers,
    _nothing_is_traced,
    _nothing_is_reused,
    _there_is_no_adapter,
    _reference_is_the_actor_without_its_adapter,
    _always_woken_in_stages,
    _one_call_has_no_agents,
    _engines_on_cpu_are_eager,
    _always_chunked,
    _always_from_hidden_states,
    _entropy_is_not_the_kernels,
    _nothing_is_compiled_on_cpu,
    _one_worker_implementation,
    _fsdp_runs_on_fsdp2,
    _local_does_not_shard,
    _deepspeed_is_not_fsdp,
    _deepspeed_section_is_not_read,
    _buffers_keep_their_format,
    _reference_is_kept_as_it_computes,
    _nothing_to_offload,
    _critic_is_not_there,
    _reference_is_not_there,
    _reference_is_not_scored,
    _reward_model_is_not_there,
    _reward_model_reads_ids_or_texts,
    _function_does_not_score_training,
    _kl_in_reward_is_off,
    _kl_loss_is_off,
    _kl_counts_twice,
    _micro_batches_are_cut_by_tokens,
    _no_prompt_is_shared,
    _some_ranks_have_no_rows,
    _schedule_does_not_read_it,
    _resume_path_is_not_read,
    _reward_function_is_built_in,
    _no_checkpoint_is_written,
    _estimator_does_not_read_it,
    _greedy_cuts_nothing,
    _fire_needs_chance,
    _nothing_ends_a_response,
    _sampled_from_another_policy,
    _weights_go_tensor_by_tensor,
    _nothing_is_validated,
    _steps_go_before_epochs,
    _users_sampler_decides_the_order,
    _nothing_is_filtered,
    _rollout_shares_devices,
    _one_local_worker_cannot_be_interrupted,
    _loss_does_not_read_it,
    _one_step_never_meets_a_bound,
    _loss_was_published_with_another_mean,
    _divisor_is_not_used,
    _reward_of_gdpo_has_no_kl,
    _reward_of_gdpo_is_not_shaped,
    _overlong_responses_cost_nothing,
    _estimator_centres_scores_again,
    _advantages_are_whitened_or_not_by_themselves,
    _a_reward_has_no_gradient,
    _ray_is_not_started,
    _response_window_is_the_rollouts,
    _nothing_is_put_off,
    _all_groups_are_trained_on,
    _no_response_is_resampled,
    _algorithms,
)
