#!/usr/bin/env bash
# GKD (Agarwal et al. 2023, arXiv:2306.13649): Qwen2.5-1.5B-Instruct from Qwen2.5-32B-Instruct on MATH, 8 GPUs, 80 GB each.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
TEACHER=${TEACHER:-Qwen/Qwen2.5-32B-Instruct}
DATA=${DATA:-$HOME/data/math}                   # python examples/data_preprocess/math_dataset.py --local_dir $DATA
NODES=${NODES:-1}
GPUS=${GPUS:-8}

options=(
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=256
    data.max_prompt_length=1024
    data.max_response_length=2048
    data.filter_overlong_prompts=true
    data.truncation=error
    distillation.teacher_models.teacher_model.model_path="$TEACHER"
    distillation.teacher.fsdp_config.param_offload=true
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.optim.lr=1e-5
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
    actor_rollout_ref.rollout.n=4
    trainer.device=cuda
    trainer.nnodes="$NODES"
    trainer.n_gpus_per_node="$GPUS"
    trainer.project_name=verl-gkd
    trainer.experiment_name=gkd-qwen2.5-1.5b
    trainer.logger="[console,wandb]"
    trainer.total_epochs=3
    trainer.test_freq=10
    trainer.save_freq=50
)
exec python3 -m recipe.gkd.main_gkd "${options[@]}" "$@"
