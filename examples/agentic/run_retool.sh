#!/usr/bin/env bash
# ReTool (Feng et al. 2025, arXiv:2504.11536): mathematics with a code interpreter. One node of 8 GPUs. Programs run on
# this machine; sandbox_fusion_tool_config.yaml asks a service instead.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
DATA=${DATA:-$HOME/data/dapo17k}
# python examples/data_preprocess/dapo17k.py --local_save_dir $DATA
GPUS=${GPUS:-8}

options=(
    algorithm.adv_estimator=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=512
    data.max_prompt_length=2048
    data.max_response_length=16384
    custom_reward_function.path=recipe/retool/retool.py
    custom_reward_function.name=compute_score
    data.custom_cls.path=recipe/retool/retool.py
    data.custom_cls.name=CustomRLHFDataset
    data.filter_overlong_prompts=true
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=512
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=36864
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.use_kl_loss=true
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.rollout.name=sglang
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.multi_turn.enable=true
    actor_rollout_ref.rollout.multi_turn.tool_config_path=recipe/retool/python_tool_config.yaml
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8
    actor_rollout_ref.rollout.multi_turn.max_tool_response_length=2048
    trainer.device=cuda
    trainer.n_gpus_per_node="$GPUS"
    trainer.nnodes=1
    trainer.project_name=retool
    trainer.experiment_name=qwen2.5-7b-retool
    trainer.logger="[console,wandb]"
    trainer.total_epochs=1
    trainer.test_freq=20
    trainer.save_freq=50
)
exec python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
