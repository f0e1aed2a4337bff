"""Every key that ROLL's two configuration guides name becomes an option that is read, or is refused with the reason."""

import copy

import pytest

from verl.config.base import ConfigError
from verl.config.command_line import locate
from verl.config.ppo import PPOConfig
from verl.config.roll.table import word
from verl.config.roll.translate import translate
from verl.config.tree import at_key, overlay, put_key
from verl.config.unused_options import readers

A, E, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref", "actor_rollout_ref.model"
SHAPING = "algorithm.reward_shaping"
KL_LOSS = {"use_kl_loss": True}
GAE = {"adv_estimator": "gae", "critic": {"infer_batch_size": 2}}
AGENTIC = {"rollout_batch_size": 64, "train_env_manager": {"env_groups": 8, "group_size": 8}}
MEGATRON = {"strategy_name": "megatron_train"}
SETTINGS, OVERRIDE = "actor_train.strategy_args.strategy_config", f"{A}.megatron.override_transformer_config"

# key of ROLL, a value, what else the file says, what it becomes (options) or why it is refused (a sentence's words)
KEYS = [
    ("exp_name", "sokoban", {}, {"trainer.experiment_name": "sokoban"}),
    ("seed", 7, {}, {"trainer.seed": 7}),
    ("rpc_timeout", 3600, {}, {"trainer.worker_timeout": 3600}),
    ("output_dir", "./output", {}, {"trainer.default_local_dir": "./output"}),
    ("logging_dir", "./logs", {"track_with": "wandb"},
     {"trainer.log_dir": "./logs", "trainer.logger": ["console", "wandb", "file"]}),
    ("track_with", "stdout", {}, {"trainer.logger": ["console"]}),
    ("track_with", "wandb", {}, {"trainer.logger": ["console", "wandb"]}),
    ("tracker_kwargs", {"log_dir": "/tb"}, {}, {"trainer.tracker_kwargs.tensorboard.log_dir": "/tb"}),
    ("tracker_kwargs", {"project": "p", "notes": "n"}, {"track_with": "wandb"},
     {"trainer.project_name": "p", "trainer.tracker_kwargs.wandb.notes": "n"}),
    ("tracker_kwargs", {"api_key": "secret"}, {"track_with": "wandb"}, {}),
    ("max_steps", 1024, {}, {"trainer.total_training_steps": 1024}),
    ("save_steps", 100, {}, {"trainer.save_freq": 100}),
    ("logging_steps", 5, {}, {"trainer.log_freq": 5}),
    ("eval_steps", 10, {"validation": {"data_args": {"file_name": "v.jsonl"}}}, {"trainer.test_freq": 10}),
    ("eval_steps", 0, {"validation": {"data_args": {"file_name": "v.jsonl"}}}, {"trainer.test_freq": -1}),
    ("resume_from_checkpoint", False, {}, {"trainer.resume_mode": "disable"}),
    ("resume_from_checkpoint", True, {}, {"trainer.resume_mode": "auto"}),
    ("resume_from_checkpoint", "/c/global_step_5", {},
     {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "/c/global_step_5"}),
    ("checkpoint_config", {"type": "file_system", "output_dir": "/c", "async_upload": True}, {},
     {"trainer.default_local_dir": "/c", f"{A}.checkpoint.async_save": True}),
    ("render_save_dir", "/render", {}, {}),
    ("render_save_dir", None, {}, {}),
    ("system_envs", {"NCCL_DEBUG": 1}, {}, {"ray_init.env.NCCL_DEBUG": "1"}),
    ("system_envs", {"USE_MODELSCOPE": "1"}, {}, {}),
    ("rollout_batch_size", 64, {}, {"data.train_batch_size": 64}),
    ("val_batch_size", 32, {}, {"data.val_batch_size": 32}),
    ("prompt_length", 2048, {}, {"data.max_prompt_length": 2048, "data.truncation": "left"}),
    ("response_length", 4096, {}, {"data.max_response_length": 4096}),
    ("sequence_length", 3072, {"prompt_length": 1024},
     {f"{E}.max_model_len": 3072, "data.max_response_length": 2048}),
    ("sequence_length", 100, {"response_length": 4096}, "prompt_length + response_length"),
    ("local_rank", -1, {}, {}),
    ("local_rank", 0, {}, {}),
    ("num_nodes", 2, {}, {}),
    ("num_gpus_per_node", 4, {"actor_train": {"device_mapping": "list(range(0,8))"}},
     {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 4}),
    ("generate_opt_level", 0, {}, {f"{E}.mode": "sync"}),
    ("generate_opt_level", 1, {}, {f"{E}.mode": "async"}),
    ("is_num_return_sequences_expand", True, {}, {}),
    ("max_running_requests", 128, {"generate_opt_level": 1}, {f"{E}.max_running_requests": 128}),
    ("max_running_requests", 128, {}, {f"{E}.max_num_seqs": 128}),
    ("is_use_additional_prompts", True, {"max_additional_running_prompts": 16, "rollout_batch_size": 64},
     {f"{E}.over_sample_rate": 0.25, f"{E}.mode": "async"}),
    ("max_additional_running_prompts", 32, {"is_use_additional_prompts": True, "rollout_batch_size": 64},
     {f"{E}.over_sample_rate": 0.5}),
    ("num_return_sequences_in_group", 8, {}, {f"{E}.n": 8}),
    ("ppo_epochs", 2, {}, {f"{A}.ppo_epochs": 2}),
    ("max_grad_norm", 0.5, GAE, {f"{A}.grad_clip": 0.5, "critic.grad_clip": 0.5}),
    ("l2", 0.01, {}, {f"{A}.l2_coef": 0.01}),
    ("lambd", 0.9, {}, {"algorithm.lam": 0.9}),
    ("gamma", 0.9, {}, {"algorithm.gamma": 0.9}),
    ("kl_penalty", "mse", {"add_token_level_kl": True}, {"algorithm.kl_penalty": "mse"}),
    ("kl_penalty", "full", KL_LOSS, {f"{A}.kl_loss_type": "full"}),
    ("kl_penalty", "full", {"add_token_level_kl": True}, "knows sampled tokens only"),
    ("init_kl_coef", 0.1, {}, {"algorithm.kl_ctrl.kl_coef": 0.1}),
    ("kl_horizon", 5000, {}, {"algorithm.kl_ctrl.horizon": 5000}),
    ("target_kl", 0.2, {}, {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": 0.2}),
    ("use_reward_scaling", True, {}, {f"{SHAPING}.norm.std": "running"}),
    ("use_reward_norm", True, {"use_reward_scaling": True}, {f"{SHAPING}.norm.mean": "running"}),
    ("add_len_reward", False, {}, {}),
    ("add_len_reward", True, {}, "overlong_buffer"),
    ("reward_clip", 10, {}, {f"{SHAPING}.clip": 10}),
    ("difficulty_loss_weight", True, {}, {f"{A}.difficulty_loss_weight": True}),
    ("length_loss_weight", True, {}, {f"{A}.length_loss_weight": True}),
    ("whiten_rewards", True, {}, {f"{SHAPING}.whiten": True}),
    ("whiten_advantages", True, {}, {"algorithm.advantage.whiten": True}),
    ("advantage_clip", 2.0, {}, {"algorithm.advantage.clip": 2.0}),
    ("adv_estimator", "gae", {}, {"algorithm.adv_estimator": "gae"}),
    ("adv_estimator", "reinforce", {}, {"algorithm.adv_estimator": "reinforce"}),
    ("adv_estimator", "grpo", {}, {"algorithm.adv_estimator": "grpo"}),
    ("reward_norm", "batch", {}, {f"{SHAPING}.norm.mean": "batch", f"{SHAPING}.norm.std": "batch"}),
    ("reward_norm", "running", {}, {f"{SHAPING}.norm.mean": "running", f"{SHAPING}.norm.std": "running"}),
    ("reward_norm", "group", {"adv_estimator": "grpo"}, {"algorithm.adv_estimator": "grpo"}),
    ("reward_norm", None, {}, {}),
    ("reward_shift", True, {"reward_norm": "batch"}, {f"{SHAPING}.norm.mean": "batch", f"{SHAPING}.norm.std": None}),
    ("reward_shift", True, {"reward_norm": "group", "adv_estimator": "grpo"},
     {"algorithm.norm_adv_by_std_in_grpo": False}),
    ("reward_scale", True, {"reward_norm": "batch"}, {f"{SHAPING}.norm.std": "batch", f"{SHAPING}.norm.mean": None}),
    ("add_token_level_kl", True, {}, {"algorithm.use_kl_in_reward": True}),
    ("critic_warmup", 3, {}, {"trainer.critic_warmup": 3}),
    ("use_kl_loss", True, {}, {f"{A}.use_kl_loss": True}),
    ("kl_loss_coef", 0.01, {}, {f"{A}.kl_loss_coef": 0.01}),
    ("entropy_loss_coef", 0.01, {}, {f"{A}.entropy_coeff": 0.01}),
    ("sft_loss_coef", 0.1, {}, {f"{A}.sft_loss_coef": 0.1}),
    ("use_topr_loss", True, {}, {f"{A}.policy_loss.loss_mode": "topr"}),
    ("rl_loss_coef", 0.5, {}, {f"{A}.rl_loss_coef": 0.5}),
    ("dual_clip_loss", True, {}, {f"{A}.clip_ratio_c": 1.4}),
    ("dual_clip_loss", False, {}, {f"{A}.clip_ratio_c": None}),
    *(("loss_agg_mode", mode, {}, {f"{A}.loss_agg_mode": mode})
      for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")),
    # environments
    ("reward_normalization.grouping", "tags", {**AGENTIC, "reward_normalization": {"method": "mean"}},
     {"env.reward_normalization.grouping": "inductive", "env.reward_normalization.method": "mean"}),
    ("reward_normalization.method", "asym_clip", AGENTIC,
     {"env.reward_normalization.method": "asym_clip", "env.reward_normalization.grouping": "state"}),
    ("train_env_manager.env_groups", 8, AGENTIC, {"env.train.n_groups": 8}),
    ("train_env_manager.group_size", 8, {"rollout_batch_size": 64}, {f"{E}.n": 8, "data.train_batch_size": 8}),
    ("train_env_manager.tags", ["SimpleSokoban"], AGENTIC,
     {"env.train.tags": ["SimpleSokoban"], "env.registry.SimpleSokoban.type": "Sokoban"}),
    ("train_env_manager.n_groups", [6, 2], {**AGENTIC, "train_env_manager": {
        "tags": ["SimpleSokoban", "FrozenLake"], "env_groups": 8, "group_size": 8}},
     {"env.train.groups_per_tag": [6, 2], "env.registry.FrozenLake.type": "FrozenLake"}),
    ("train_env_manager.max_traj_per_env", -1, {**AGENTIC, "rollout_batch_size": 128},
     {"env.train.max_traj_per_env": 2}),
    ("train_env_manager.max_traj_per_env", 1, {**AGENTIC, "rollout_batch_size": 128}, "takes 2 episodes of each"),
    ("train_env_manager.format_penalty", -0.1, AGENTIC, {"env.train.format_penalty": -0.1}),
    ("train_env_manager.worker_cls", "roll.x.Y", AGENTIC, {}),
    ("train_env_manager.worker_cls", "my.Worker", AGENTIC, "is written anew, as an environment"),
    ("train_env_manager.group_size_redundancy", 2, AGENTIC, "whole groups are started"),
    ("custom_envs.W.env_type", "webshop", {**AGENTIC, "train_env_manager": {"tags": ["W"]}}, "register yours"),
    # workers
    ("actor_train.world_size", 2, {}, {"trainer.n_gpus_per_node": 2, "trainer.device": "cpu"}),
    ("actor_train.device_mapping", "list(range(0,16))", {}, {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 8}),
    ("actor_train.device_mapping", "__import__('os').system('true')", {}, "no list of device ids"),
    ("actor_infer.device_mapping", "list(range(8,16))", {"actor_train": {"device_mapping": "list(range(0,8))"}},
     {"actor_rollout_ref.hybrid_engine": False, f"{E}.nnodes": 1, f"{E}.n_gpus_per_node": 8}),
    ("reference.device_mapping", "[9]", {"actor_train": {"device_mapping": [0, 1]}, **KL_LOSS}, {}),
    ("actor_infer.num_gpus_per_worker", 2, {}, {f"{E}.tensor_model_parallel_size": 2}),
    ("actor_train.model_update_frequency", 4, {}, {"trainer.weight_sync_freq": 4}),
    ("actor_train.infer_batch_size", 4, {}, {f"{E}.log_prob_micro_batch_size_per_gpu": 4}),
    ("reference.infer_batch_size", 4, KL_LOSS, {f"{R}.log_prob_micro_batch_size_per_gpu": 4}),
    ("critic.infer_batch_size", 4, {"adv_estimator": "gae"}, {"critic.forward_micro_batch_size_per_gpu": 4}),
    ("actor_train.model_args.dtype", "fp16", {}, {f"{A}.fsdp_config.mixed_precision.param_dtype": "fp16"}),
    ("actor_infer.model_args.dtype", "bf16", {}, {f"{E}.dtype": "bf16"}),
    ("actor_train.model_args.disable_gradient_checkpointing", True, {}, {f"{M}.enable_gradient_checkpointing": False}),
    ("actor_train.data_args.template", "native", {}, {}),
    ("actor_train.data_args.template", "longCOT_7", {}, "custom_chat_template"),
    ("actor_train.data_args.file_name", "xxx/train.json", {}, {"data.train_files": "xxx/train.json"}),
    ("actor_train.data_args.prompt", "instruction", {}, {"data.prompt_key": "instruction"}),
    ("actor_train.data_args.messages", "chat", {"actor_train": {"data_args": {"prompt": "p"}}}, "keep one of them"),
    ("actor_infer.generating_args.max_new_tokens", 512, {}, {"data.max_response_length": 512}),
    ("actor_infer.generating_args.temperature", 0.99, {}, {f"{E}.temperature": 0.99}),
    ("actor_train.strategy_args.strategy_name", "deepspeed_train", {}, {f"{A}.strategy": "deepspeed"}),
    ("actor_train.strategy_args.strategy_name", "megatron_train", {}, {f"{A}.strategy": "megatron"}),
    ("reference.strategy_args.strategy_name", "megatron_infer", KL_LOSS, {f"{R}.strategy": "megatron"}),
    *(("actor_infer.strategy_args.strategy_name", name, {}, {f"{E}.name": ours})
      for name, ours in (("vllm", "vllm"), ("sglang", "sglang"), ("hf_infer", "hf"))),
    *((f"{SETTINGS}.{name}_parallel_size", 2, MEGATRON, {f"{A}.megatron.{name}_parallel_size": 2})
      for name in ("tensor_model", "pipeline_model", "expert_model", "virtual_pipeline_model", "context",
                   "expert_tensor")),
    (f"{SETTINGS}.sequence_parallel", True, MEGATRON, {f"{A}.megatron.sequence_parallel": True}),
    (f"{SETTINGS}.recompute_granularity", "full", MEGATRON,
     {f"{OVERRIDE}.recompute_granularity": "full", f"{OVERRIDE}.recompute_method": "uniform",
      f"{OVERRIDE}.recompute_num_layers": 1}),
    (f"{SETTINGS}.recompute_granularity", "selective", MEGATRON, {f"{OVERRIDE}.recompute_granularity": "selective"}),
    (f"{SETTINGS}.recompute_granularity", "whole", MEGATRON, "full or selective"),
    (f"{SETTINGS}.recompute_modules", "core_attn, mlp", {**MEGATRON, "strategy_config": {
        "recompute_granularity": "selective", "moe_layer_recompute": True}},
     {f"{OVERRIDE}.recompute_modules": ["core_attn", "mlp", "moe"]}),
    (f"{SETTINGS}.recompute_method", "recompute", {**MEGATRON, "strategy_config": {"recompute_granularity": "full"}},
     "uniform or block"),
    (f"{SETTINGS}.moe_layer_recompute", True, MEGATRON,
     {f"{OVERRIDE}.recompute_granularity": "selective", f"{OVERRIDE}.recompute_modules": ["moe"]}),
    *((f"{SETTINGS}.{name}", value, MEGATRON, {f"{OVERRIDE}.{name}": value})
      for name, value in (("moe_token_dispatcher_type", "alltoall"), ("moe_shared_expert_overlap", True),
                          ("account_for_loss_in_pipeline_split", True), ("moe_router_dtype", "fp32"))),
    (f"{SETTINGS}.moe_grouped_gemm", True, MEGATRON, "needs Transformer Engine"),
    (f"{SETTINGS}.optimizer_cpu_offload", True, MEGATRON, f"{A}.megatron.optimizer_offload=true"),
    (f"{SETTINGS}.additional_configs", {"num_layers_in_first_pipeline_stage": 3}, MEGATRON,
     {f"{OVERRIDE}.num_layers_in_first_pipeline_stage": 3}),
    (f"{SETTINGS}.additional_configs", "more.json", MEGATRON, "in the file itself"),
    (f"{SETTINGS}.overlap_p2p_comm", True, {**MEGATRON, "strategy_config": {
        "virtual_pipeline_model_parallel_size": 2}},
     {f"{OVERRIDE}.overlap_p2p_comm": True, f"{OVERRIDE}.batch_p2p_comm": False}),
    (f"{SETTINGS}.overlap_p2p_comm", True, MEGATRON, {}),
    (f"{SETTINGS}.overlap_grad_reduce", True, MEGATRON,
     {f"{A}.megatron.override_ddp_config.overlap_grad_reduce": True}),
    (f"{SETTINGS}.ddp_bucket_size", 1000, MEGATRON, {f"{A}.megatron.override_ddp_config.bucket_size": 1000}),
    (f"{SETTINGS}.use_distributed_optimizer", False, MEGATRON, {f"{A}.megatron.use_distributed_optimizer": False}),
    (f"{SETTINGS}.mtp_num_layers", 1, MEGATRON, "several tokens"),
    (f"{SETTINGS}.moe_aux_loss_coeff", 0.01, MEGATRON, "no auxiliary loss"),
    (f"{SETTINGS}.optimizer", "sgd", MEGATRON, "AdamW"),
    (f"{SETTINGS}.tensor_model_parallel_sise", 2, MEGATRON, "did you mean 'tensor_model_parallel_size'"),
    *((f"actor_infer.strategy_args.strategy_config.{name}", value, {"strategy_name": "vllm"}, {option: value})
      for name, value, option in (
          ("gpu_memory_utilization", 0.6, f"{E}.gpu_memory_utilization"),
          ("block_size", 16, f"{E}.engine_kwargs.vllm.block_size"),
          ("max_model_len", 8000, f"{E}.max_model_len"),
          ("load_format", "dummy", f"{E}.load_format"))),
    *((f"actor_infer.strategy_args.strategy_config.{name}", value, {"strategy_name": "sglang"}, {option: value})
      for name, value, option in (
          ("mem_fraction_static", 0.6, f"{E}.gpu_memory_utilization"),
          ("load_format", "dummy", f"{E}.load_format"))),
    ("actor_train.training_args.learning_rate", 1e-6, {}, {f"{A}.optim.lr": 1e-6}),
    ("actor_train.training_args.weight_decay", 0.1, {}, {f"{A}.optim.weight_decay": 0.1}),
    ("actor_train.training_args.warmup_steps", 20, {}, {f"{A}.optim.lr_warmup_steps": 20}),
    ("actor_train.training_args.per_device_train_batch_size", 2, {}, {f"{A}.ppo_micro_batch_size_per_gpu": 2}),
    ("actor_train.training_args.gradient_accumulation_steps", 4, {},
     {f"{A}.ppo_mini_batch_size": 32, f"{A}.ppo_micro_batch_size_per_gpu": 8}),
]  # fmt: skip


def translation(key, value, others):
    """What a file says that has ``key`` and little else."""
    role = key.partition(".")[0]
    tree = {"actor_infer": {}, "adv_estimator": "reinforce", "rollout_batch_size": 128,
            "actor_train": {"training_args": {"gradient_accumulation_steps": 16}}}  # fmt: skip
    if role.endswith("_env_manager"):
        put_key(tree, "actor_train.training_args.gradient_accumulation_steps", 1)
    if "strategy_name" in others:
        put_key(tree, f"{role}.strategy_args", copy.deepcopy(others))
    else:
        overlay(tree, {name: dict(item) if isinstance(item, dict) else item for name, item in others.items()})
    if at_key(tree, key) is None:
        put_key(tree, key, value)
    put_key(tree, key, value)
    return translate(tree)


@pytest.mark.parametrize(("key", "value", "others", "expected"), KEYS, ids=lambda item: str(item)[:40])
def test_a_key_of_the_guides_does_what_it_says_or_says_why_not(key, value, others, expected):
    found = translation(key, value, others)
    if isinstance(expected, str):
        assert any(text.startswith(key) and expected in text for text in found.refusals), found.refusals
        return
    of_this_key = [text for text in found.refusals if text.startswith(f"{key}=") or "no key of" in text]
    assert not of_this_key, found.refusals
    words = dict(text.split("=", 1) for text in found.words)
    for option, becomes in expected.items():
        if becomes is None and option not in words:
            continue
        assert words.get(option) == word(option, becomes).partition("=")[2], (option, words.get(option))
        assert locate(PPOConfig, option).kind in ("option", "free")
        assert locate(PPOConfig, option).kind == "free" or readers(option), f"nothing reads {option}"


def test_every_word_that_any_key_becomes_is_an_option():
    for key, value, others, _ in KEYS:
        for text in translation(key, value, others).words:
            assert locate(PPOConfig, text.partition("=")[0]).kind != "unknown", text


def test_an_unknown_key_is_refused_with_the_nearest():
    (refusal,) = (text for text in translate({"max_stepz": 3}).refusals if "max_stepz" in text)
    assert "no key of ROLL; did you mean 'max_steps'" in refusal


def test_settings_of_megatron_count_with_another_engine_where_that_has_them():
    settings = {"context_parallel_size": 2, "recompute_granularity": "full", "moe_grouped_gemm": True,
                "optimizer_cpu_offload": True}  # fmt: skip
    tree = {"actor_train": {"strategy_args": {"strategy_name": "megatron_train", "strategy_config": settings}}}
    found = translate(tree, words=[f"{A}.strategy=fsdp2"])
    expected = {f"{A}.ulysses_sequence_parallel_size=2", f"{M}.use_remove_padding=true",
                f"{M}.enable_gradient_checkpointing=true", f"{A}.fsdp_config.optimizer_offload=true"}  # fmt: skip
    assert expected <= {*found.words} and any("no effect have moe_grouped_gemm" in note for note in found.notes)


def test_roles_on_megatron_have_the_ranks_of_the_policy_and_its_formats():
    strategy = {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 2}}
    scoring = {"strategy_name": "megatron_infer", "strategy_config": {"tensor_model_parallel_size": 1,
                                                                      "sequence_parallel": False}}  # fmt: skip
    worker = {"model_args": {"dtype": "bf16", "disable_gradient_checkpointing": False}}
    tree = {**KL_LOSS, "is_offload_states": True, "adv_estimator": "reinforce",
            "actor_train": {"strategy_args": strategy, **worker},
            "reference": {"strategy_args": scoring, **worker}}  # fmt: skip
    found = translate(tree)
    expected = {f"{R}.megatron.sequence_parallel=false", f"{R}.megatron.dtype=bf16", f"{A}.megatron.dtype=bf16",
                f"{A}.megatron.param_offload=true", f"{A}.megatron.optimizer_offload=true"}  # fmt: skip
    assert expected <= {*found.words}
    assert not [word for word in found.words if "fsdp_config" in word or "enable_gradient_checkpointing" in word]
    assert any("reference: its ranks are those of actor_train; no effect have tensor" in note for note in found.notes)


def test_words_behind_the_file_settle_a_refusal_and_win():
    tree = {"actor_train": {"strategy_args": {"strategy_name": "megatron_train"}}, "seed": 3}
    words = ["actor_rollout_ref.actor.strategy=fsdp2", "trainer.seed=5"]
    found = translate(tree, words=words)
    assert not [text for text in found.refusals if "Megatron" in text]
    assert [text for text in found.words if text.startswith("trainer.seed=")] == ["trainer.seed=5"]
    assert found.words[-2:] == words


def test_nothing_of_a_file_is_evaluated(tmp_path):
    from verl.config.roll.translate import read_roll

    file = tmp_path / "a.yaml"
    file.write_text("pretrain: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(ConfigError, match="no YAML"):
        read_roll(str(file))
