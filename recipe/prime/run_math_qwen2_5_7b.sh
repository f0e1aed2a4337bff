#!/usr/bin/env bash
# PRIME on MATH: Qwen2.5-7B-Instruct as policy and as process reward model, one node of 8 GPUs with 80 GB.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
DATA=${DATA:-$HOME/data/math}                   # python examples/data_preprocess/math_dataset.py --local_dir $DATA
NODES=${NODES:-1}
GPUS=${GPUS:-8}

options=(
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=256
    data.max_prompt_length=1024
    data.max_response_length=3072
    data.filter_overlong_prompts=true
    data.truncation=error
    data.gen_batch_size=512
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.fsdp_config.param_offload=true
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
    critic.model.use_remove_padding=true
    critic.model.enable_gradient_checkpointing=true
    critic.strategy=fsdp2
    critic.model.fsdp_config.param_offload=true
    critic.model.fsdp_config.optimizer_offload=true
    trainer.device=cuda
    trainer.nnodes="$NODES"
    trainer.n_gpus_per_node="$GPUS"
    trainer.project_name=verl-prime
    trainer.experiment_name=prime-qwen2.5-7b
    trainer.logger="[console,wandb]"
    trainer.total_epochs=15
    trainer.test_freq=5
    trainer.save_freq=20
)
exec python3 -m recipe.prime.main_prime "${options[@]}" "$@"
