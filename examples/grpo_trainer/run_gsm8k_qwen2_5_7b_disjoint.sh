#!/usr/bin/env bash
# GRPO on GSM8K with four GPUs that train and four that sample one step ahead: Qwen2.5-7B-Instruct, 4 GPUs with 80 GB
# each.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}                  # python examples/data_preprocess/gsm8k.py --local_dir $DATA
NODES=${NODES:-1}
GPUS=${GPUS:-4}

options=(
    algorithm.adv_estimator=grpo
    algorithm.rollout_correction.rollout_is=token
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=1024
    data.max_prompt_length=512
    data.max_response_length=1024
    data.filter_overlong_prompts=true
    data.truncation=error
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.use_kl_loss=true
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=5
    actor_rollout_ref.rollout.max_staleness=1
    actor_rollout_ref.rollout.calculate_log_probs=true
    actor_rollout_ref.rollout.nnodes=1
    actor_rollout_ref.rollout.n_gpus_per_node=4
    actor_rollout_ref.hybrid_engine=false
    trainer.device=cuda
    trainer.nnodes="$NODES"
    trainer.n_gpus_per_node="$GPUS"
    trainer.project_name=gsm8k
    trainer.experiment_name=grpo-qwen2.5-7b-instruct
    trainer.logger="[console,wandb]"
    trainer.total_epochs=15
    trainer.test_freq=5
    trainer.save_freq=20
)
exec python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
