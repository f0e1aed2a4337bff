#!/usr/bin/env bash
# GiGPO on Sokoban and FrozenLake together with Qwen2.5-0.5B-Instruct, one node of GPUs, responses from vLLM.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
RUN=${RUN:-runs/sokoban-gigpo}

options=(
    env.train.tags=[SimpleSokoban,FrozenLake]
    env.train.n_groups=16
    env.train.group_size=8
    env.train.format_penalty=-0.15
    env.val.n_groups=128
    env.registry.SimpleSokoban.type=Sokoban
    env.registry.SimpleSokoban.kwargs.dim_room=[6,6]
    env.registry.SimpleSokoban.kwargs.num_boxes=1
    env.registry.SimpleSokoban.max_steps=10
    env.registry.SimpleSokoban.max_tokens_per_step=128
    env.registry.FrozenLake.kwargs.size=4
    env.registry.FrozenLake.max_steps=10
    env.registry.FrozenLake.max_tokens_per_step=128
    env.num_workers=4
    algorithm.adv_estimator=gigpo
    data.max_prompt_length=1024
    data.max_response_length=4096
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.use_kl_loss=true
    actor_rollout_ref.actor.kl_loss_coef=0.01
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    trainer.n_gpus_per_node=8
    trainer.project_name=sokoban
    trainer.experiment_name=gigpo
    trainer.logger=[console,file]
    trainer.total_training_steps=200
    trainer.test_freq=10
    trainer.save_freq=50
    trainer.default_local_dir="$RUN"
    trainer.validation_data_dir="$RUN/validation"
)
exec python3 -m verl.trainer.main_agentic "${options[@]}" "$@"
