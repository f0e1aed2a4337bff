"""Files of the shapes that ROLL's examples have: the RLVR file of five domains, and what others change in it."""

import copy
from typing import Any

from verl.config.tree import put_key

_WORKERS = "roll.pipeline.rlvr.rewards"


def rule(name: str, tags: list[str], **more: Any) -> dict[str, Any]:
    return {
        "worker_cls": f"{_WORKERS}.some_module.{name}",
        "model_args": {"model_name_or_path": "${reward_pretrain}"},
        "data_args": {"template": "qwen2_5"},
        "tag_included": tags,
        "world_size": 8,
        "infer_batch_size": 1,
        **more,
    }


JUDGE = {
    "worker_cls": f"{_WORKERS}.llm_judge_reward_worker.LLMJudgeRewardWorker",
    "judge_prompt": "a-prompt",
    "judge_model_type": "inference",
    "tag_included": ["RLVR"],
    "model_args": {"model_name_or_path": "judge/7B", "dtype": "bf16", "model_type": "trl"},
    "generating_args": {"max_new_tokens": 100, "top_p": 0.8, "top_k": 50, "temperature": 0.8},
    "data_args": {"template": "qwen2_5"},
    "strategy_args": {"strategy_name": "hf_infer", "strategy_config": None},
    "device_mapping": "list(range(12,16))",
    "infer_batch_size": 4,
}
MEGATRON = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "use_distributed_optimizer": True,
    "recompute_granularity": "full",
}
SHARES = {"math_rule": 0.4, "code_sandbox": 0.3, "llm_judge": 0.1, "crossthinkqa": 0.1, "ifeval": 0.1}
BASE: dict[str, Any] = {
    "hydra": {"run": {"dir": "."}, "output_subdir": None},
    "exp_name": "rlvr",
    "seed": 42,
    "logging_dir": "./output/logs",
    "output_dir": "./output",
    "system_envs": {"USE_MODELSCOPE": "1"},
    "checkpoint_config": {"type": "file_system", "output_dir": "/data/${exp_name}"},
    "track_with": "tensorboard",
    "tracker_kwargs": {"log_dir": "/data/tensorboard"},
    "num_gpus_per_node": 8,
    "max_steps": 500,
    "save_steps": 100,
    "logging_steps": 1,
    "eval_steps": 10,
    "resume_from_checkpoint": False,
    "rollout_batch_size": 64,
    "prompt_length": 2048,
    "response_length": 4096,
    "num_return_sequences_in_group": 8,
    "ppo_epochs": 1,
    "adv_estimator": "reinforce",
    "value_clip": 0.5,
    "reward_clip": 10,
    "advantage_clip": 2.0,
    "dual_clip_loss": True,
    "norm_mean_type": None,
    "norm_std_type": "None",
    "max_len_mask": True,
    "difficulty_mask": True,
    "difficulty_low_threshold": 0.1,
    "difficulty_high_threshold": 0.95,
    "error_max_len_clip": False,
    "add_token_level_kl": False,
    "whiten_advantages": True,
    "pretrain": "some/7B",
    "reward_pretrain": "some/7B",
    "validation": {
        "data_args": {"template": "qwen2_5", "file_name": ["data/benchmarks.jsonl"]},
        "generating_args": {"max_new_tokens": "${response_length}", "top_p": 0.6, "top_k": 50, "num_beams": 1,
                            "temperature": 0.6, "num_return_sequences": 1},
        "eval_steps": 10,
    },
    "actor_train": {
        "model_args": {"disable_gradient_checkpointing": False, "dtype": "bf16", "model_type": None},
        "training_args": {"learning_rate": 1e-6, "weight_decay": 0, "per_device_train_batch_size": 1,
                          "gradient_accumulation_steps": 32, "warmup_steps": 20, "num_train_epochs": 50},
        "data_args": {"template": "qwen2_5", "file_name": ["data/code.jsonl", "data/math.jsonl"],
                      "domain_interleave_probs": SHARES, "dataset_dir": "data", "messages": "messages",
                      "interleave_probs": "1.0", "preprocessing_num_workers": 16},
        "strategy_args": {"strategy_name": "megatron_train", "strategy_config": MEGATRON},
        "device_mapping": "list(range(0,16))",
        "infer_batch_size": 4,
    },
    "actor_infer": {
        "model_args": {"disable_gradient_checkpointing": True, "dtype": "bf16"},
        "generating_args": {"max_new_tokens": "${response_length}", "top_p": 0.99, "top_k": 100, "num_beams": 1,
                            "temperature": 0.99, "num_return_sequences": "${num_return_sequences_in_group}"},
        "data_args": {"template": "qwen2_5"},
        "strategy_args": {"strategy_name": "vllm", "strategy_config": {
            "gpu_memory_utilization": 0.8, "block_size": 16, "max_model_len": 8000, "sleep_level": 2}},
        "device_mapping": "list(range(0,12))",
        "infer_batch_size": 1,
    },
    "reference": {
        "model_args": {"disable_gradient_checkpointing": True, "dtype": "bf16", "model_type": None},
        "data_args": {"template": "qwen2_5"},
        "strategy_args": {"strategy_name": "megatron_infer", "strategy_config": {"tensor_model_parallel_size": 1}},
        "device_mapping": "list(range(0,16))",
        "infer_batch_size": 8,
    },
    "rewards": {
        "crossthinkqa": rule("CrossThinkQARuleRewardWorker", ["crossthinkqa"], reward_type="soft",
                             response_length_penalty_coef=0.0),
        "ifeval": rule("GeneralRuleRewardWorker", ["ifeval"], reward_type="soft"),
        "math_rule": rule("MathRuleRewardWorker", ["deepmath_103k", "aime"]),
        "code_sandbox": rule("CodeSandboxRewardWorker", ["KodCode"], use_local=True),
        "llm_judge": JUDGE,
    },
}  # fmt: skip

_ONE_DOMAIN = {
    "rewards": {"math_rule": BASE["rewards"]["math_rule"]},
    "actor_train.data_args.domain_interleave_probs": {"math_rule": 1},
}
_JUDGE = "reward_model.judge.url=http://localhost:8001/v1"
_SETTINGS = "actor_train.strategy_args.strategy_config"
_ZERO3 = {"defaults": ["../config/deepspeed_zero3@_here_"], "actor_train.strategy_args": {
    "strategy_name": "deepspeed_train", "strategy_config": "${deepspeed_zero3}"}}  # fmt: skip
_MOE = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 8,
    "expert_model_parallel_size": 4, "context_parallel_size": 4, "sequence_parallel": True,
    "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True, "moe_layer_recompute": True,
    "additional_configs": {"moe_permute_fusion": True}, "recompute_granularity": "selective",
}  # fmt: skip

SHAPES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "five domains": ({}, [_JUDGE]),
    "one domain": (_ONE_DOMAIN, []),
    "a domain without a share": (
        {"actor_train.data_args.domain_interleave_probs": {k: v for k, v in SHARES.items() if k != "llm_judge"}},
        [],
    ),
    "mixture of experts": (
        {"actor_train.strategy_args.strategy_config": _MOE, "actor_train.device_mapping": "list(range(0,32))",
         "actor_infer.num_gpus_per_worker": 2, "actor_infer.device_mapping": "list(range(0,24))", **_ONE_DOMAIN},
        [f"{_SETTINGS}.moe_grouped_gemm=null", f"{_SETTINGS}.additional_configs.moe_permute_fusion=null"],
    ),
    "sglang": (
        {"actor_infer.strategy_args": {"strategy_name": "sglang", "strategy_config": {
            "mem_fraction_static": 0.7, "load_format": "dummy"}}, **_ONE_DOMAIN},
        [],
    ),
    "grpo with a reference": (
        {"adv_estimator": "grpo", "use_kl_loss": True, "kl_loss_coef": 0.001, **_ONE_DOMAIN}, [],
    ),
    "deepspeed": ({**_ZERO3, **_ONE_DOMAIN, "actor_train.model_args.ulysses_size": 2}, []),
    "devices apart, of two nodes": (
        {"actor_train.device_mapping": "list([0,1,2,3,8,9,10,11])", "actor_infer.device_mapping": "list([4,5,12,13])",
         **_ZERO3, **_ONE_DOMAIN},
        [],
    ),
    "sampling ahead": (
        {"async_generation_ratio": 1, "actor_infer.device_mapping": "list(range(16,24))", **_ONE_DOMAIN}, [],
    ),
    "dynamic sampling": (
        {"is_use_additional_prompts": True, "max_running_requests": 256, **_ONE_DOMAIN,
         "rewards.math_rule.query_filter_config": {"type": "mean_filter", "filter_args": {
             "threshold_up": 0.9, "threshold_down": 0.1}}},
        [],
    ),
    "topr": (
        {"rl_loss_coef": 0.0, "positive_loss_coef": "x_1", "use_topr_neg_loss_coef": 0.5, **_ONE_DOMAIN},
        ["positive_loss_coef=1.0"],
    ),
    "gae without a critic section": ({"adv_estimator": "gae", **_ONE_DOMAIN, **_ZERO3}, []),
    "lora and a key of wandb": (
        {"track_with": "wandb", "tracker_kwargs": {"api_key": "secret", "project": "p"}, **_ZERO3, **_ONE_DOMAIN,
         "actor_train.model_args.lora_rank": 8, "actor_train.model_args.lora_target": "all",
         "actor_train.model_args.lora_alpha": 32, "actor_train.model_args.lora_dropout": 0.05},
        [],
    ),
    "a batch that ROLL would cut": (
        {"rollout_batch_size": 60, **_ZERO3, **_ONE_DOMAIN}, ["actor_rollout_ref.actor.ppo_mini_batch_size=60"],
    ),
    "a reward worker of one's own": (
        {"rewards": {"mine": rule("DetectionRewardWorker", ["v3det"])}, **_ZERO3,
         "actor_train.data_args.domain_interleave_probs": {"mine": 1}},
        ["custom_reward_function.path=my_reward.py"],
    ),
    "keys of a fork": (
        {"polarity_mask_enable": False, "lambd_actor": 0.95, "entropy_top_ratio": 0.2, "adv_estimator": "reinforce",
         **_ZERO3, **_ONE_DOMAIN},
        ["lambd_actor=null", "entropy_top_ratio=null"],
    ),
    "the newest release": (
        {"async_generation_ratio": 0, "enable_reference": True, "enable_old_logprobs_recompute": True,
         "user_defined_rollout_loop_cls": "roll.x.Y", "model_update_buffer_size_mb": 64, "rollout_dump_dir": "d",
         "train_infer_correction": {"is_weight": {"enabled": True, "weight_type": "token"}, "filters": [
             {"enabled": True, "agg_type": "token", "ratio_low": 0.5, "ratio_high": 1.5}]},
         "actor_train.strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": {
             "fsdp_size": 4, "param_dtype": "bf16", "reduce_dtype": "fp32", "offload_policy": False}},
         "actor_train.use_dynamic_batching_in_train": True, "actor_train.max_tokens_per_microbatch_in_train": 16384,
         **_ONE_DOMAIN},
        [],
    ),
}  # fmt: skip
"""Name -> what the file changes, and the words that its refusal must ask for."""


def shape(changes: dict[str, Any]) -> dict[str, Any]:
    """The file with other values at dotted keys."""
    tree = copy.deepcopy(BASE)
    for key, value in changes.items():
        put_key(tree, key, copy.deepcopy(value))
    return tree
