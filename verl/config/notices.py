"""Settings that have no effect: what the user gave and nothing reads, each said once.

A notice is no error. Values that would need something that is not built are errors and stand in ``support.py``.
"""

from collections.abc import Callable, Iterator

from verl.config.base import get_path, leaves
from verl.config.build import show
from verl.config.ppo import PPOConfig

IsGiven = Callable[[str], bool]

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"


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
        "gpu_memory_utilization",
        "enforce_eager",
        "disable_log_stats",
        "enable_chunked_prefill",
        "load_format",
        "engine_kwargs",
    ]
    if rollout.tensor_model_parallel_size != 1:
        knobs.append("tensor_model_parallel_size")
    yield from _unread(
        config, [f"{_ROLLOUT}.{knob}" for knob in knobs], is_given, f"{_ROLLOUT}.name=hf has no such knob"
    )


def _always_woken_in_stages(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    yield from _unread(
        config, [f"{_ROLLOUT}.multi_stage_wake_up"], is_given, "weights are always brought back first, the cache later"
    )


def _vllm_on_cpu_is_eager(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "vllm" and config.trainer.device == "cpu" and not rollout.enforce_eager:
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


def _nothing_is_compiled(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    keys = [f"{role}.use_torch_compile" for role in (_ACTOR, _REF) if get_path(config, role).use_torch_compile]
    yield from _unread(config, keys, is_given, "the chunked head runs without torch.compile")


def _one_worker_implementation(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    yield from _unread(config, ["trainer.use_legacy_worker_impl"], is_given, "there is one implementation")


def _text_only(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    yield from _unread(config, ["data.return_multi_modal_inputs"], is_given, "prompts are text")


def _fsdp_runs_on_fsdp2(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    roles = [role for role in (_ACTOR, "critic") if is_given(f"{role}.strategy")]
    named = [f"{role}.strategy=fsdp" for role in roles if get_path(config, role).strategy == "fsdp"]
    if named:
        yield f"{', '.join(named)} runs on the fsdp2 machinery; the results are the same"


def _local_does_not_shard(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    for role, place in ((_ACTOR, f"{_ACTOR}.fsdp_config"), ("critic", "critic.model.fsdp_config")):
        if get_path(config, role).strategy == "local":
            keys = [
                f"{place}.{name}"
                for name in (
                    "param_offload",
                    "optimizer_offload",
                    "reshard_after_forward",
                    "fsdp_size",
                    "wrap_policy.min_num_params",
                    "wrap_policy.transformer_layer_cls_to_wrap",
                )
            ]
            yield from _unread(config, keys, is_given, f"{role}.strategy=local does not shard")


def _critic_is_not_there(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.uses_critic:
        keys = [key for key in _given_below("critic", config, is_given) if key not in ("critic.enable",)]
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
            for key, section in ((_ROLLOUT, shared.rollout), *([(_REF, shared.ref)] if config.uses_reference else []))
        ),
        *(
            (critic.use_dynamic_bsz, f"critic.{kind}_micro_batch_size_per_gpu", f"critic.{kind}_max_token_len_per_gpu")
            for kind in (("ppo", "forward") if config.uses_critic else ())
        ),
    ]
    by_tokens = [size for dynamic, size, _ in cuts if dynamic]
    leader = f"{_ACTOR}.ppo_max_token_len_per_gpu"  # others follow it: it is read if any of them is
    by_count = [budget for dynamic, _, budget in cuts if not dynamic and budget != leader]
    if not any(dynamic for dynamic, _, _ in cuts):
        by_count.append(leader)
    yield from _unread(config, by_tokens, is_given, "micro-batches are cut by tokens (use_dynamic_bsz)")
    yield from _unread(config, by_count, is_given, "micro-batches are cut by count (use_dynamic_bsz=false)")


def _constant_schedule_has_no_floor(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    for key in (f"{_ACTOR}.optim", *(["critic.optim"] if config.uses_critic else [])):
        optim = get_path(config, key)
        if optim.warmup_style == "constant":
            yield from _unread(
                config, [f"{key}.min_lr_ratio", f"{key}.num_cycles"], is_given, f"{key}.warmup_style=constant"
            )
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
        keys = ["trainer.max_actor_ckpt_to_keep", f"{_ACTOR}.checkpoint.save_contents"]
        yield from _unread(config, keys, is_given, f"trainer.save_freq={config.trainer.save_freq} writes no checkpoint")


def _only_gae_has_a_lambda(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.algorithm.adv_estimator != "gae":
        yield from _unread(
            config,
            ["algorithm.lam"],
            is_given,
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} does not read it",
        )


def _ray_is_not_started(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.trainer.controller == "local":
        keys = [key for key in _given_below("ray_init", config, is_given) if key != "ray_init.env"]
        yield from _unread(
            config,
            [*keys, "trainer.ray_wait_register_center_timeout"],
            is_given,
            "trainer.controller=local starts no Ray",
        )


def _response_window_is_the_rollouts(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    length = config.actor_rollout_ref.rollout.response_length
    if length != config.data.max_response_length:
        yield from _unread(
            config, ["data.max_response_length"], is_given, f"{_ROLLOUT}.response_length={length} decides"
        )


def _given_below(key: str, config: PPOConfig, is_given: IsGiven) -> list[str]:
    return [name for name, _ in leaves(get_path(config, key), f"{key}.") if is_given(name)]


_CHECKS = (
    _hf_has_no_engine_knobs,
    _always_woken_in_stages,
    _vllm_on_cpu_is_eager,
    _always_chunked,
    _nothing_is_compiled,
    _one_worker_implementation,
    _text_only,
    _fsdp_runs_on_fsdp2,
    _local_does_not_shard,
    _critic_is_not_there,
    _reference_is_not_there,
    _kl_in_reward_is_off,
    _kl_loss_is_off,
    _kl_counts_twice,
    _micro_batches_are_cut_by_tokens,
    _constant_schedule_has_no_floor,
    _resume_path_is_not_read,
    _reward_function_is_built_in,
    _no_checkpoint_is_written,
    _only_gae_has_a_lambda,
    _ray_is_not_started,
    _response_window_is_the_rollouts,
)
