#!/usr/bin/env bash
# DAPO (Yu et al. 2025, arXiv:2503.14476) at the size of the paper: Qwen2.5-32B on mathematics, 16 nodes of 8 GPUs with
# 80 GB.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-32B}
DATA=${DATA:-$HOME/data/dapo-math-17k}          # train.parquet; columns as in docs/data_format.md
TEST=${TEST:-$HOME/data/aime-2024}              # test.parquet
NODES=${NODES:-16}
GPUS=${GPUS:-8}
PROMPT=2048
RESPONSE=20480                                  # 16384 to answer in, and a buffer of 4096

options=(
    algorithm.adv_estimator=grpo
    algorithm.filter_groups.enable=true
    algorithm.filter_groups.metric=acc
    algorithm.filter_groups.max_num_gen_batches=10
    algorithm.reward_shaping.overlong_buffer.enable=true
    algorithm.reward_shaping.overlong_buffer.len=4096
    algorithm.reward_shaping.overlong_buffer.penalty_factor=1.0
    algorithm.use_kl_in_reward=false
    data.train_files="$DATA/train.parquet"
    data.val_files="$TEST/test.parquet"
    data.train_batch_size=512
    data.gen_batch_size=1536
    data.max_prompt_length="$PROMPT"
    data.max_response_length="$RESPONSE"
    data.truncation=left
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((PROMPT + RESPONSE))
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8
    actor_rollout_ref.actor.fsdp_config.param_offload=true
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.actor.grad_clip=1.0
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0
    actor_rollout_ref.rollout.val_kwargs.do_sample=true
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7
    actor_rollout_ref.rollout.val_kwargs.n=32
    trainer.device=cuda
    trainer.nnodes="$NODES"
    trainer.n_gpus_per_node="$GPUS"
    trainer.project_name=dapo
    trainer.experiment_name=dapo-qwen2.5-32b
    trainer.logger="[console,wandb]"
    trainer.total_epochs=1
    trainer.test_freq=5
    trainer.save_freq=5
)
exec python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
