"""What an old name may have become, and the names that verl's releases from v0.6 on, and its Megatron trainer, have.

Tables only; ``legacy.py`` applies them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Moved(NamedTuple):
    """An option that has another name now. ``convert`` gives the new value; None means: leave the new key alone."""

    old: str
    new: tuple[str, ...]
    convert: Callable[[Any], Any] = lambda value: value
    is_alias: bool = False
    """Not old: a second way to write the key, of which nothing is said."""


class Gone(NamedTuple):
    """An option or section without successor. ``harmless`` values are dropped with a warning, any other is an error."""

    old: str
    why: str
    harmless: tuple = (None, False)


def _if_true(value: Any) -> bool | None:
    return True if value in (True, "true", "True") else None


def _if_positive(value: Any) -> Any:
    return value if isinstance(value, int | float) and value > 0 else None


_A, _O, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_R = "actor_rollout_ref.ref"
_CORRECTION = "algorithm.rollout_correction"
_NSYS = "global_profiler.global_tool_config.nsys"
_OFF = (None, False, 0, 1)

_OF_ENGINES = tuple(
    move
    for role, fsdp in ((_A, f"{_A}.fsdp_config"), (_R, f"{_R}.fsdp_config"), ("critic", "critic.model.fsdp_config"))
    for move in (
        Moved(f"{fsdp}.dtype", (f"{fsdp}.mixed_precision.param_dtype",)),
        Moved(f"{fsdp}.ulysses_sequence_parallel_size", (f"{role}.ulysses_sequence_parallel_size",)),
        Moved(f"{fsdp}.strategy", (f"{role}.strategy",)),
    )
)

LATER_MOVED: tuple[Moved, ...] = (
    # v0.6: Ray and profilers
    Moved("ray_kwargs.timeline_json_file", ("ray_init.timeline_json_file",)),
    *(
        Moved(f"ray_kwargs.ray_init.{name}", (f"ray_init.{name}",))
        for name in ("num_cpus", "runtime_env", "include_dashboard")
    ),
    Moved("global_profiler.steps", ("trainer.profile_steps",)),
    Moved("global_profiler.profile_continuous_steps", ("trainer.profile_continuous_steps",)),
    Moved(f"{_NSYS}.controller_nsight_options", ("trainer.controller_nsight_options",)),
    Moved(f"{_NSYS}.worker_nsight_options", ("trainer.worker_nsight_options",)),
    Moved(f"{_A}.use_rollout_log_probs", (f"{_CORRECTION}.bypass_mode",), _if_true),
    # v0.6 and later: one engine of training, one of rollout
    *_OF_ENGINES,
    *(Moved(f"{place}.optim.clip_grad", (f"{place}.grad_clip",)) for place in (_A, "critic")),
    *(Moved(f"{place}.optim.lr_decay_style", (f"{place}.optim.warmup_style",)) for place in (_A, "critic")),
    *(
        Moved(f"{place}.optim.lr_decay_steps", (f"{place}.optim.total_training_steps",), _if_positive)
        for place in (_A, "critic")
    ),
    Moved(f"{_A}.fsdp_config.use_torch_compile", (f"{_A}.use_torch_compile",)),
    Moved(f"{_A}.ppo_infer_micro_batch_size_per_gpu", (f"{_O}.log_prob_micro_batch_size_per_gpu",), _if_positive),
    Moved(f"{_A}.ppo_infer_max_token_len_per_gpu", (f"{_O}.log_prob_max_token_len_per_gpu",), _if_positive),
    Moved(f"{_A}.use_prefix_grouper", (f"{_M}.use_prefix_sharing",), _if_true),
    Moved(f"{_O}.cudagraph_capture_sizes", (f"{_O}.engine_kwargs.vllm.cudagraph_capture_sizes",)),
    Moved(f"{_O}.enable_prefix_caching", (f"{_O}.engine_kwargs.vllm.enable_prefix_caching",)),
    Moved(f"{_O}.skip.enable", (f"{_O}.skip_rollout",)),
    Moved(f"{_O}.skip.dump_dir", (f"{_O}.skip_dump_dir",)),
    Moved(f"{_O}.checkpoint_engine.update_weights_bucket_megabytes", (f"{_O}.update_weights_bucket_megabytes",)),
    *(Moved(f"{_M}.lora.{name}", (f"{_M}.lora_{name}",)) for name in ("rank", "alpha", "adapter_path")),
    *(Moved(f"{_M}.lora.{name}", (f"{_M}.{name}",)) for name in ("target_modules", "exclude_modules")),
    Moved(f"{_M}.tokenizer_path", ("data.tokenizer",)),
    *(Moved(f"{role}.nccl_timeout", ("actor_rollout_ref.nccl_timeout",)) for role in ("critic", "reward_model")),
    # v0.7: one section of rewards
    *(
        Moved(f"reward.custom_reward_function.{name}", (f"custom_reward_function.{name}",))
        for name in ("path", "name", "reward_kwargs")
    ),
    Moved("reward.reward_manager.name", ("reward_model.reward_manager",)),
    Moved("reward.reward_kwargs", ("reward_model.reward_kwargs",)),
    Moved("reward.reward_model.enable", ("reward_model.enable",)),
    Moved("reward.reward_model.model_path", ("reward_model.model.path",)),
    *(
        Moved(f"reward.sandbox_fusion.{name}", (f"reward_model.sandbox_fusion.{name}",))
        for name in ("url", "max_concurrent", "memory_limit_mb")
    ),
    # guides of other trainers
    Moved("trainer.rpc_timeout", ("trainer.worker_timeout",), is_alias=True),
    Moved("trainer.logger_kwargs", ("trainer.tracker_kwargs",), is_alias=True),
)

_MEGATRON = "Megatron is not built; strategy=fsdp2 shards the same model over the same devices"
_PROFILERS = "no profiler is built in; timing_s/* metrics are logged at every step"
_REWARD_LOOP = "reward functions run in processes of their own, reward_model.sandbox.workers of them"

LATER_GONE: tuple[Gone, ...] = (
    *(
        Gone(f"{role}.megatron", _MEGATRON, (*_OFF, True, "", 42, "selective", {}, ["core_attn"]))
        for role in (_A, _R, "critic", "reward_model")
    ),
    Gone(f"{_O}.layer_name_map", "weights travel by their checkpoint names", (None, "qkv", "gate_up")),
    *(
        Gone(f"{role}.load_weight", "models are loaded with their weights", (None, True))
        for role in (_A, _R, "critic", "reward_model")
    ),
    *(Gone(f"{role}.data_loader_seed", "trainer.seed seeds everything", (None, 1, 42)) for role in (_A, "critic")),
    *(Gone(f"{role}.profile", _PROFILERS, (None, False, -1, ".")) for role in (_A, _R, "critic", "reward_model")),
    *(
        Gone(f"{place}.optim.{name}", why, harmless)
        for place in (_A, "critic")
        for name, why, harmless in (
            ("lr_warmup_init", "the rate warms up from optim.min_lr_ratio x lr", (None, 0, 0.0)),
            ("min_lr", "set optim.min_lr_ratio, a share of lr", (None, 0, 0.0)),
            ("weight_decay_incr_style", "weight decay is constant", (None, "constant")),
            ("use_checkpoint_opt_param_scheduler", "a checkpoint brings its schedule back", (None, False, True)),
            ("override_optimizer_config", "set optim.betas, optim.eps and optim.optimizer", (None,)),
            ("zero_indexed_step", "steps count from 1", (None, False, True)),
        )
    ),
    *(
        Gone(f"{place}.profiler.{name}", _PROFILERS, (None, False, "outputs/profile", {}))
        for place in (_A, _R, _O, "critic", "reward_model")
        for name in ("enable", "tool", "save_path")
    ),
    *(
        Gone(
            f"{place}.profiler.tool_config",
            "no profiler is built in, so its settings are not read",
            (None, False, True, 0, "level1", "level0", 100000, 32, [], {}, "all"),
        )
        for place in (_A, _R, _O, "critic", "reward_model")
    ),
    *(Gone(f"global_profiler.{name}", _PROFILERS, (None, "outputs/profile")) for name in ("tool", "save_path")),
    Gone(f"{_NSYS}.discrete", _PROFILERS),
    Gone(
        "global_profiler.global_tool_config.torch_memory",
        "trainer.memory_ledger tells what each phase takes",
        (None, 100000, 32, "all", {}),
    ),
    *(
        Gone(f"{place}.fsdp_config.{name}", why, harmless)
        for place in (_A, _R, "critic.model")
        for name, why, harmless in (
            ("forward_only", "the role says whether it is trained", (None, False, True)),
            ("full_determinism", "runs on a CPU are; on CUDA set CUBLAS_WORKSPACE_CONFIG", _OFF),
            ("seed", "trainer.seed seeds everything", (None, 1, 42)),
            ("qat", "quantization-aware training is not built", _OFF),
        )
    ),
    Gone(f"{_A}.calculate_entropy", "entropy is always logged", (None, False, True)),
    Gone(f"{_A}.router_replay", "routing of experts is not replayed", (None, False, "disabled")),
    Gone(f"{_O}.enable_rollout_routing_replay", "routing of experts is not replayed"),
    Gone(f"{_O}.quantization", "set actor_rollout_ref.rollout.engine_kwargs.vllm.quantization"),
    Gone(f"{_O}.quantization_config_file", "set it below actor_rollout_ref.rollout.engine_kwargs.vllm"),
    Gone(f"{_O}.prometheus", "servers of rollout.mode=async answer /metrics by themselves", (None, False, 9090, "")),
    *(
        Gone(f"{_O}.{name}", "more copies of the engine share out the work by themselves", (None, 1))
        for name in ("data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size")
    ),
    Gone(f"{_O}.checkpoint_engine.backend", "weights go over by the way the processes allow", (None, "naive", "nccl")),
    Gone(f"{_O}.disaggregation", "prefill and decoding run in one engine", _OFF),
    Gone(f"{_O}.agent.agent_loop_manager_class", "derive from verl.agent_loop.AgentLoopManager in a trainer of yours"),
    Gone(f"{_M}.tiled_mlp", "actor_rollout_ref.model.enable_gradient_checkpointing bounds what a layer keeps", _OFF),
    Gone(f"{_M}.mtp", "heads that predict several tokens are not trained", _OFF),
    Gone(f"{_M}.hf_config_path", "the configuration is read from model.path; model.override_config changes it"),
    Gone(f"{_M}.lora.merge", "set actor_rollout_ref.rollout.lora_sync=merge", (None, False)),
    *(
        Gone(name, _REWARD_LOOP, (None, False, True, 1, 8))
        for name in ("reward.num_workers", "reward_model.num_workers", "reward_model.use_reward_loop")
    ),
    *(
        Gone(f"{place}.{name}", "the reward model shares the devices of trainer", (None, False, 0, 1, 8))
        for place in ("reward.reward_model", "reward_model")
        for name in ("enable_resource_pool", "n_gpus_per_node", "nnodes")
    ),
    Gone("trainer.use_v1", "there is one trainer", (None, False, True)),
    Gone("trainer.v1", "there is one trainer; rollout.async_ratio=1 draws ahead", (None, False)),
    Gone("trainer.checkpoint_callback_class", "override save_checkpoint in a trainer of yours (docs/extend.md)"),
    Gone("transfer_queue", "batches travel packed, through shared memory or Ray's object store", (None, False)),
)
