#!/usr/bin/env bash
# Clip-Cov (Cui et al. 2025, arXiv:2505.22617): Qwen2.5-7B on mathematics, 4 nodes of 8 GPUs with 80 GB. Everything
# else of the algorithm is in config/entropy_trainer.yaml.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B}
DATA=${DATA:-$HOME/data/dapo17k}                # python examples/data_preprocess/dapo17k.py --local_dir $DATA
TEST=${TEST:-$HOME/data/aime2024}               # python examples/data_preprocess/aime.py --local_dir $TEST
NODES=${NODES:-4}
GPUS=${GPUS:-8}

options=(
    data.train_files="$DATA/train.parquet"
    data.val_files="$TEST/test.parquet"
    data.train_batch_size=256
    data.max_prompt_length=2048
    data.max_response_length=8192
    data.filter_overlong_prompts=true
    data.truncation=error
    data.gen_batch_size=768
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480
    actor_rollout_ref.actor.optim.lr=5e-7
    actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov
    actor_rollout_ref.actor.policy_loss.clip_cov_ratio=2e-4
    actor_rollout_ref.actor.optim.weight_decay=0
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8
    actor_rollout_ref.rollout.val_kwargs.do_sample=true
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7
    actor_rollout_ref.rollout.val_kwargs.n=8
    trainer.device=cuda
    trainer.nnodes="$NODES"
    trainer.n_gpus_per_node="$GPUS"
    trainer.project_name=verl-entropy
    trainer.experiment_name=clip-cov-qwen2.5-7b
    trainer.logger="[console,wandb]"
    trainer.total_epochs=1
    trainer.test_freq=5
    trainer.save_freq=20
)
exec python3 -m recipe.entropy.main_entropy "${options[@]}" "$@"
