#!/usr/bin/env bash
# GRPO on counting letters, from the model that sft_smollm2.sh has taught to spell: one GPU with 24 GB.
set -euo pipefail

MODEL=${MODEL:-runs/char-count-sft/huggingface}
DATA=${DATA:-data/char_count/rl}                # python recipe/char_count/create_dataset.py --local_dir data/char_count
NODES=${NODES:-1}
GPUS=${GPUS:-1}

options=(
    algorithm.adv_estimator=grpo
    custom_reward_function.path=recipe/char_count/reward_function.py
    custom_reward_function.name=char_count_reward_function
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=256
    data.max_prompt_length=128
    data.max_response_length=256
    data.filter_overlong_prompts=true
    data.truncation=error
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.optim.lr=5e-6
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4
    actor_rollout_ref.rollout.n=8
    trainer.device=cuda
    trainer.nnodes="$NODES"
    trainer.n_gpus_per_node="$GPUS"
    trainer.project_name=char-count
    trainer.experiment_name=grpo-smollm2-135m
    trainer.logger="[console,wandb]"
    trainer.total_epochs=2
    trainer.test_freq=5
    trainer.save_freq=20
)
exec python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
