#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-0.5B-Instruct, one GPU with 24 GB or more.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}                  # python examples/data_preprocess/gsm8k.py --local_dir $DATA
GPUS=${GPUS:-1}

options=(
    algorithm.adv_estimator=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=128
    data.max_prompt_length=512
    data.max_response_length=512
    data.filter_overlong_prompts=true
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.use_kl_loss=true
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.rollout.name=vllm             # bash scripts/install_engines.sh vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
    actor_rollout_ref.rollout.n=8
    trainer.device=cuda
    trainer.n_gpus_per_node="$GPUS"
    trainer.nnodes=1
    trainer.project_name=gsm8k
    trainer.experiment_name=grpo-qwen2.5-0.5b
    trainer.logger="[console,wandb]"
    trainer.total_epochs=3
    trainer.test_freq=10
    trainer.save_freq=50
)
exec python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
