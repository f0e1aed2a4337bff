#!/usr/bin/env bash
# DAPO at the size of the paper (Yu et al. 2025, arXiv:2503.14476): Qwen2.5-32B on mathematics, 16 nodes of 8 GPUs
# with 80 GB. The settings of the algorithm are those of config/dapo_trainer.yaml.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-32B}
DATA=${DATA:-$HOME/data/dapo17k}                # python examples/data_preprocess/dapo17k.py --local_dir $DATA
TEST=${TEST:-$HOME/data/aime2024}               # python examples/data_preprocess/aime.py --local_dir $TEST
NODES=${NODES:-16}
GPUS=${GPUS:-8}

options=(
    algorithm.reward_shaping.overlong_buffer.enable=true
    algorithm.reward_shaping.overlong_buffer.len=4096
    data.train_files="$DATA/train.parquet"
    data.val_files="$TEST/test.parquet"
    data.train_batch_size=512
    data.max_prompt_length=2048
    data.max_response_length=20480
    data.filter_overlong_prompts=true
    data.truncation=error
    data.gen_batch_size=1536
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22528
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8
    actor_rollout_ref.actor.fsdp_config.param_offload=true
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8
    actor_rollout_ref.rollout.val_kwargs.do_sample=true
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7
    actor_rollout_ref.rollout.val_kwargs.n=32
    trainer.device=cuda
    trainer.nnodes="$NODES"
    trainer.n_gpus_per_node="$GPUS"
    trainer.project_name=verl-dapo
    trainer.experiment_name=dapo-qwen2.5-32b
    trainer.logger="[console,wandb]"
    trainer.total_epochs=1
    trainer.test_freq=5
    trainer.save_freq=5
)
exec python3 -m recipe.dapo.main_dapo "${options[@]}" "$@"
