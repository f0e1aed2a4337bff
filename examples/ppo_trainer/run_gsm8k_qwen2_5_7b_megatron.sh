#!/usr/bin/env bash
# PPO on GSM8K with Megatron: Qwen2.5-7B-Instruct as policy and critic, tensor parallel 4 x data 2, whole layers
# recomputed in the backward pass, 8 GPUs with 80 GB each.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}                  # python examples/data_preprocess/gsm8k.py --local_dir $DATA
NODES=${NODES:-1}
GPUS=${GPUS:-8}
OVERRIDE=actor_rollout_ref.actor.megatron.override_transformer_config

options=(
    algorithm.adv_estimator=gae
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=1024
    data.max_prompt_length=512
    data.max_response_length=1024
    data.filter_overlong_prompts=true
    data.truncation=error
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4
    actor_rollout_ref.actor.megatron.param_offload=true
    actor_rollout_ref.actor.megatron.grad_offload=true
    actor_rollout_ref.actor.megatron.optimizer_offload=true
    $OVERRIDE.recompute_granularity=full
    $OVERRIDE.recompute_method=uniform
    $OVERRIDE.recompute_num_layers=1
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=1
    critic.model.path="$MODEL"                  # its sizes, and what it recomputes, are the actor's
    critic.model.use_remove_padding=true
    critic.megatron.param_offload=true
    critic.megatron.grad_offload=true
    critic.megatron.optimizer_offload=true
    critic.optim.lr=1e-5
    critic.ppo_max_token_len_per_gpu=32768
    trainer.device=cuda
    trainer.nnodes="$NODES"
    trainer.n_gpus_per_node="$GPUS"
    trainer.project_name=gsm8k
    trainer.experiment_name=ppo-qwen2.5-7b-instruct-megatron
    trainer.logger="[console,wandb]"
    trainer.total_epochs=15
    trainer.test_freq=5
    trainer.save_freq=20
    trainer.critic_warmup=0
)
exec python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer "${options[@]}" "$@"
