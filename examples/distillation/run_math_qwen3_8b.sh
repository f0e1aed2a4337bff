#!/usr/bin/env bash
# Qwen3-8B on MATH with rewards and Qwen3-32B as a teacher, whose log-ratio is an advantage: 8 GPUs, 80 GB each.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-8B}
TEACHER=${TEACHER:-Qwen/Qwen3-32B}
DATA=${DATA:-$HOME/data/math}                   # python examples/data_preprocess/math_dataset.py --local_dir $DATA
NODES=${NODES:-1}
GPUS=${GPUS:-8}

options=(
    algorithm.adv_estimator=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=256
    data.max_prompt_length=1024
    data.max_response_length=4096
    data.filter_overlong_prompts=true
    data.truncation=error
    distillation.enabled=true
    distillation.teacher_models.teacher_model.model_path="$TEACHER"
    distillation.teacher.fsdp_config.param_offload=true
    distillation.distillation_loss.loss_mode=k1
    distillation.distillation_loss.use_policy_gradient=true
    distillation.distillation_loss.distillation_loss_coef=0.5
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
    actor_rollout_ref.rollout.n=8
    trainer.device=cuda
    trainer.nnodes="$NODES"
    trainer.n_gpus_per_node="$GPUS"
    trainer.project_name=distillation
    trainer.experiment_name=math-qwen3-8b
    trainer.logger="[console,wandb]"
    trainer.total_epochs=3
    trainer.test_freq=10
    trainer.save_freq=50
)
exec python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
