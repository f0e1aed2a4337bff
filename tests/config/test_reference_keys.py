"""The tree is verl's tree: every option, default and interpolation."""

from pathlib import Path

import pytest
import yaml

from verl.config.algorithm import GiGPOConfig, RolloutCorrectionConfig
from verl.config.base import leaves
from verl.config.command_line import all_keys, locate
from verl.config.compose import CONFIG_DIR, compose
from verl.config.distillation import DistillationConfig
from verl.config.engine import DeepSpeedConfig
from verl.config.env import EnvConfig
from verl.config.megatron import RECOMPUTE, MegatronConfig
from verl.config.ppo import PPOConfig
from verl.config.profiler import GlobalProfilerConfig, ProfilerConfig
from verl.config.reward import JudgeConfig, RewardRouterConfig, RewardSandboxConfig
from verl.config.trainer import DeadlinesConfig, HealthConfig
from verl.config.tree import flatten

HERE = Path(__file__).parent

NEW_KEYS = """
algorithm.advantage.clip algorithm.advantage.whiten
algorithm.reward_shaping.clip algorithm.reward_shaping.norm.mean algorithm.reward_shaping.norm.std
algorithm.reward_shaping.overlong_buffer.enable algorithm.reward_shaping.overlong_buffer.len
algorithm.reward_shaping.overlong_buffer.penalty_factor algorithm.reward_shaping.scale
algorithm.reward_shaping.shift algorithm.reward_shaping.whiten
algorithm.sample_mask.difficulty algorithm.sample_mask.drop_truncated
actor_rollout_ref.rollout.n_gpus_per_node actor_rollout_ref.rollout.nnodes
actor_rollout_ref.actor.calculate_sum_pi_squared actor_rollout_ref.actor.loss_scale_factor
actor_rollout_ref.actor.policy_loss.dro_beta actor_rollout_ref.actor.policy_loss.kimi15_tau
actor_rollout_ref.actor.policy_loss.sppo_eta
actor_rollout_ref.actor.difficulty_loss_weight actor_rollout_ref.actor.l2_coef
actor_rollout_ref.actor.length_loss_weight
actor_rollout_ref.actor.rl_loss_coef actor_rollout_ref.actor.sft_loss_coef
actor_rollout_ref.actor.policy_loss.tis_lower_bound actor_rollout_ref.actor.policy_loss.tis_upper_bound
actor_rollout_ref.actor.policy_loss.topr_neg_weight actor_rollout_ref.actor.policy_loss.topr_pos_weight
actor_rollout_ref.actor.policy_loss.topr_ratio
actor_rollout_ref.actor.freeze_vision_tower actor_rollout_ref.actor.skip_old_log_probs
actor_rollout_ref.actor.tau_neg actor_rollout_ref.actor.tau_pos
algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches algorithm.filter_groups.metric
algorithm.gdpo_reward_keys algorithm.gdpo_reward_weights algorithm.step_gamma
actor_rollout_ref.actor.fsdp_config.mixed_precision actor_rollout_ref.actor.fsdp_config.model_dtype
actor_rollout_ref.actor.fsdp_config.reduce_once actor_rollout_ref.ref.fsdp_config.reduce_once
critic.model.fsdp_config.reduce_once reward_model.model.fsdp_config.reduce_once
actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap
actor_rollout_ref.actor.optim.betas actor_rollout_ref.actor.optim.eps actor_rollout_ref.actor.optim.optimizer
actor_rollout_ref.actor.optim.lr_wsd_decay_steps actor_rollout_ref.actor.optim.lr_wsd_decay_style
actor_rollout_ref.ref.fsdp_config.fsdp_size actor_rollout_ref.ref.fsdp_config.mixed_precision
actor_rollout_ref.ref.fsdp_config.model_dtype actor_rollout_ref.ref.fsdp_config.offload_policy
actor_rollout_ref.ref.fsdp_config.optimizer_offload
actor_rollout_ref.ref.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap
actor_rollout_ref.rollout.limit_images actor_rollout_ref.rollout.use_fire_sampling
actor_rollout_ref.rollout.mismatch_threshold actor_rollout_ref.rollout.stall_timeout_s
actor_rollout_ref.rollout.trace.dir trainer.memory_ledger trainer.dry_run trainer.resume_allow_changes
actor_rollout_ref.rollout.max_postponements actor_rollout_ref.rollout.max_staleness
actor_rollout_ref.rollout.over_sample_rate actor_rollout_ref.rollout.partial_rollout
actor_rollout_ref.rollout.fire_temperature actor_rollout_ref.rollout.fire_top_k
actor_rollout_ref.rollout.min_p actor_rollout_ref.rollout.repetition_penalty actor_rollout_ref.rollout.stop
actor_rollout_ref.rollout.stop_token_ids actor_rollout_ref.rollout.sampling_kwargs
actor_rollout_ref.rollout.val_kwargs.min_p actor_rollout_ref.rollout.val_kwargs.repetition_penalty
actor_rollout_ref.rollout.val_kwargs.stop actor_rollout_ref.rollout.val_kwargs.stop_token_ids
actor_rollout_ref.rollout.val_kwargs.sampling_kwargs
actor_rollout_ref.rollout.agent.default_agent_loop actor_rollout_ref.rollout.max_running_requests
actor_rollout_ref.rollout.server_host
critic.model.fsdp_config.mixed_precision critic.model.fsdp_config.model_dtype
critic.model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap
critic.optim.betas critic.optim.eps critic.optim.num_cycles critic.optim.optimizer
critic.optim.lr_wsd_decay_steps critic.optim.lr_wsd_decay_style
custom_reward_function.reward_kwargs data.apply_chat_template_kwargs data.cache_dir data.gen_batch_size data.seed
data.bad_rows data.max_prompt_id_length data.messages_key data.mixture data.prompt_id_key data.train_max_samples
data.val_max_samples data.domains data.tool_config_path data.function_tool_path data.need_tools_kwargs
ray_init.env ray_init.include_dashboard ray_init.object_store_memory_mb
reward_model.model.fsdp_config.mixed_precision reward_model.model.fsdp_config.model_dtype
reward_model.model.fsdp_config.offload_policy reward_model.model.fsdp_config.optimizer_offload
reward_model.model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap
reward_model.server_host reward_model.server_urls reward_model.enable_resource_pool reward_model.nnodes
reward_model.n_gpus_per_node reward_model.rollout reward_model.use_reward_loop
reward_model.on_error reward_model.reward_kwargs reward_model.by_source reward_model.max_errors reward_model.self_test
actor_rollout_ref.model.lora_adapter_path actor_rollout_ref.rollout.lora_sync critic.model.exclude_modules
critic.model.lora_adapter_path
actor_rollout_ref.model.compile_layers actor_rollout_ref.model.use_prefix_sharing critic.model.use_prefix_sharing
trainer.controller trainer.log_freq trainer.nonfinite_tolerance trainer.progress_bar trainer.seed
trainer.max_restarts trainer.restart_wait
trainer.show_samples trainer.tracker_kwargs trainer.tracker_timeout trainer.worker_timeout
trainer.halt_on trainer.checkpoint_callback_class
ray_init.runtime_env trainer.log_dir trainer.unread_keys trainer.weight_sync_freq
""".split()
NEW_KEYS += [
    f"{role}.fsdp_config.{name}"
    for name in ("full_determinism", "gather_once")
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic.model", "reward_model.model")
]
_FREE = "teacher.megatron.override_transformer_config"
NEW_KEYS += [f"distillation.{name}" for name, _ in leaves(DistillationConfig()) if name != _FREE]
NEW_KEYS += [f"distillation.{_FREE}.{name}" for name in RECOMPUTE]
NEW_KEYS += [f"distillation.teacher.{name}._target_" for name in ("fsdp_config", "megatron")]
NEW_KEYS += [f"trainer.health.{name}" for name in HealthConfig()]
NEW_KEYS += [f"algorithm.filter_groups.{name}" for name in ("low", "high", "min_std")]
NEW_KEYS += ["algorithm.reward_shaping.clip_range", "algorithm.sample_mask.error_max_len"]
NEW_KEYS += [f"algorithm.gigpo.{name}" for name in GiGPOConfig()]
NEW_KEYS += [
    f"{place}.rollout_correction.{name}"
    for place in ("algorithm", "actor_rollout_ref.actor.policy_loss")
    for name in ("_target_", *RolloutCorrectionConfig())
]
NEW_KEYS += [f"reward_model.sandbox.{name}" for name in RewardSandboxConfig()]
NEW_KEYS += [
    f"{role}.deepspeed.{name}"
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model")
    for name in DeepSpeedConfig()
]
NEW_KEYS += [
    f"{role}.megatron.{name}"
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model")
    for name in ("_target_", *(key for key in MegatronConfig() if key != "override_transformer_config"))
]
NEW_KEYS += [
    f"{role}.megatron.override_transformer_config.{name}"
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model")
    for name in RECOMPUTE
]
NEW_KEYS += [
    f"{role}.optim.{name}"
    for role in ("actor_rollout_ref.actor", "critic")
    for name in (
        "lr_warmup_init",
        "min_lr",
        "override_optimizer_config",
        "use_checkpoint_opt_param_scheduler",
        "weight_decay_incr_style",
    )
]
NEW_KEYS += [f"trainer.{name}" for name in ("on_nonfinite", "dump_steps", "rollout_data_tokens")]
NEW_KEYS += [f"actor_rollout_ref.rollout.canary_{name}" for name in ("prompts", "tolerance")]
NEW_KEYS += [f"reward_model.judge.{name}" for name in JudgeConfig()]
NEW_KEYS += [f"reward_model.router.{name}" for name in RewardRouterConfig()]
NEW_KEYS += [
    f"actor_rollout_ref.rollout.multi_turn.{name}"
    for name in (
        "max_tool_calls",
        "max_tokens_per_turn",
        "tool_timeout",
        "function_tool_path",
        "tool_num_workers",
        "tool_memory_mb",
    )
]
NEW_KEYS += [f"env.{name}" for name, _ in leaves(EnvConfig())]
NEW_KEYS += [f"actor_rollout_ref.rollout.agent.openai_agent.{name}" for name in ("function", "runs_in", "command")]
NEW_KEYS += [f"global_profiler.{name}" for name, _ in leaves(GlobalProfilerConfig())]
NEW_KEYS += [f"actor_rollout_ref.{role}.profiler.{name}" for role in ("ref", "rollout") for name in ProfilerConfig()]
NEW_KEYS += [f"{section}.profiler.enable" for section in ("actor_rollout_ref", "critic", "reward_model")]
NEW_KEYS += ["trainer.max_time", *(f"trainer.deadlines.{name}" for name in DeadlinesConfig())]
"""Options that verl's YAML does not have. A change here is a change of the public surface."""


CHANGED = {
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.enforce_eager": False,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "actor_rollout_ref.model.use_liger": None,
}
"""The default of v0.5.0, before and after which verl asks for a name; that of v0.6.0 and later; the driver's own event
loop, which is enough for most runs; and liger where it can be."""


def _value(text):
    if text.startswith("${"):
        return text
    value = yaml.safe_load(text)
    return float(value) if isinstance(value, str) and value.replace("e-", "").isdigit() else value  # YAML 1.1: 1e-06


def _reference():
    """key -> (raw default, default after interpolation)."""
    table = {}
    for line in (HERE / "reference_keys.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            key, default = line.split(": ", 1)
            raw, _, resolved = default.partition("  # => ")
            table[key] = (CHANGED[key],) * 2 if key in CHANGED else (_value(raw), _value(resolved or raw))
    return table


@pytest.fixture(scope="module")
def composed():
    return dict(flatten(compose([], [CONFIG_DIR], "ppo_trainer", PPOConfig)[1]))


def test_the_reference_has_327_keys():
    assert len(_reference()) == 327


def test_every_reference_key_has_its_default_and_interpolation(composed):
    for key, (raw, _) in _reference().items():
        assert key in composed, f"{key} is missing"
        assert composed[key] == raw and type(composed[key]) is type(raw), f"{key}: {composed[key]!r} is not {raw!r}"


def test_only_the_listed_keys_are_new(composed):
    assert sorted(set(composed) - set(_reference())) == sorted(NEW_KEYS)


def test_dataclass_defaults_are_what_interpolations_resolve_to():
    reference = _reference()
    for key, default in leaves(PPOConfig()):
        if key in reference and not isinstance(default, dict):
            assert default == reference[key][1], key


def test_every_reference_key_is_reachable_on_the_command_line():
    for key in _reference():
        assert locate(PPOConfig, key).kind != "unknown", key


def test_class_paths_in_the_tree_can_be_imported(composed):
    import importlib

    for key, target in composed.items():
        if key.endswith("_target_"):
            module, _, name = target.rpartition(".")
            assert hasattr(importlib.import_module(module), name), f"{key}={target}"


def test_there_is_no_option_in_yaml_that_the_classes_do_not_have(composed):
    known = set(all_keys(PPOConfig))
    for key in composed:
        assert key in known or key.endswith("_target_") or locate(PPOConfig, key).kind == "free", key
