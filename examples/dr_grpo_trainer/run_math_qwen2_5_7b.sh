#!/usr/bin/env bash
# Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) at the size of the paper: Qwen2.5-Math-7B on MATH, one node of 8 GPUs
# with 80 GB.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-Math-7B}
DATA=${DATA:-$HOME/data/math}                   # train.parquet, test.parquet; columns as in docs/data_format.md
GPUS=${GPUS:-8}

options=(
    algorithm.adv_estimator=grpo
    algorithm.norm_adv_by_std_in_grpo=false
    algorithm.use_kl_in_reward=false
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=128
    data.max_prompt_length=1024
    data.max_response_length=3000
    data.filter_overlong_prompts=true
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm
    actor_rollout_ref.actor.loss_scale_factor=3000
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.weight_decay=0
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.temperature=1.0
    trainer.device=cuda
    trainer.nnodes=1
    trainer.n_gpus_per_node="$GPUS"
    trainer.project_name=dr-grpo
    trainer.experiment_name=dr-grpo-qwen2.5-math-7b
    trainer.logger="[console,wandb]"
    trainer.total_epochs=3
    trainer.test_freq=16
    trainer.save_freq=64
)
exec python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
