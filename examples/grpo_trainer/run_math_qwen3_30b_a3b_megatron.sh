#!/usr/bin/env bash
# GRPO on MATH with Megatron: Qwen3-30B-A3B, a mixture of 128 experts, tensor parallel 2 x pipeline 2 x data 8 and for
# experts expert parallel 8 x pipeline 2 x data 2, 4 nodes of 8 GPUs with 80 GB each.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-30B-A3B}
DATA=${DATA:-$HOME/data/math}                   # python examples/data_preprocess/math_dataset.py --local_dir $DATA
NODES=${NODES:-4}
GPUS=${GPUS:-8}
OVERRIDE=actor_rollout_ref.actor.megatron.override_transformer_config

options=(
    algorithm.adv_estimator=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=512
    data.max_prompt_length=1024
    data.max_response_length=4096
    data.filter_overlong_prompts=true
    data.truncation=error
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.param_offload=true
    actor_rollout_ref.actor.megatron.grad_offload=true
    actor_rollout_ref.actor.megatron.optimizer_offload=true
    $OVERRIDE.recompute_granularity=full
    $OVERRIDE.recompute_method=uniform
    $OVERRIDE.recompute_num_layers=1
    actor_rollout_ref.actor.ppo_mini_batch_size=128
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.use_kl_loss=true
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.ref.megatron.param_offload=true
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.n=5
    actor_rollout_ref.rollout.calculate_log_probs=true
    trainer.device=cuda
    trainer.nnodes="$NODES"
    trainer.n_gpus_per_node="$GPUS"
    trainer.project_name=math
    trainer.experiment_name=grpo-qwen3-30b-a3b-megatron
    trainer.logger="[console,wandb]"
    trainer.total_epochs=15
    trainer.test_freq=5
    trainer.save_freq=20
)
exec python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer "${options[@]}" "$@"
