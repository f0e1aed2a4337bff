#!/usr/bin/env bash
# GMPO (Zhao et al. 2025, arXiv:2507.20673) on MATH: Qwen2.5-7B, 8 GPUs with 80 GB each.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B}
DATA=${DATA:-$HOME/data/math}                   # python examples/data_preprocess/math_dataset.py --local_dir $DATA
NODES=${NODES:-1}
GPUS=${GPUS:-8}

options=(
    algorithm.adv_estimator=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=512
    data.max_prompt_length=1024
    data.max_response_length=2048
    data.filter_overlong_prompts=true
    data.truncation=error
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean
    actor_rollout_ref.actor.clip_ratio_low=0.4
    actor_rollout_ref.actor.clip_ratio_high=0.4
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=8
    trainer.device=cuda
    trainer.nnodes="$NODES"
    trainer.n_gpus_per_node="$GPUS"
    trainer.project_name=math
    trainer.experiment_name=gmpo-qwen2.5-7b
    trainer.logger="[console,wandb]"
    trainer.total_epochs=15
    trainer.test_freq=5
    trainer.save_freq=20
)
exec python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
