#!/usr/bin/env bash
# On-policy distillation of Qwen2.5-7B-Instruct into Qwen2.5-0.5B-Instruct on GSM8K, without rewards: 1 GPU, 80 GB.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
TEACHER=${TEACHER:-Qwen/Qwen2.5-7B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}                   # python examples/data_preprocess/gsm8k.py --local_dir $DATA
NODES=${NODES:-1}
GPUS=${GPUS:-1}

options=(
    algorithm.adv_estimator=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=128
    data.max_prompt_length=1024
    data.max_response_length=1024
    data.filter_overlong_prompts=true
    data.truncation=error
    distillation.enabled=true
    distillation.teacher_models.teacher_model.model_path="$TEACHER"
    distillation.teacher.fsdp_config.param_offload=true
    distillation.distillation_loss.loss_mode=forward_kl_topk
    distillation.distillation_loss.topk=64
    distillation.distillation_loss.use_task_rewards=false
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=128
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
    trainer.project_name=distillation
    trainer.experiment_name=gsm8k-qwen2.5-0.5b
    trainer.logger="[console,wandb]"
    trainer.total_epochs=3
    trainer.test_freq=10
    trainer.save_freq=50
)
exec python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
