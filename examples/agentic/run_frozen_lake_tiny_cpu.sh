#!/usr/bin/env bash
# An agent that learns to cross a frozen lake, from random weights, on a CPU in minutes: 2x2 tiles with a random hole, the
# map as text, a turn is one letter (L, D, R, U). Success goes from < 0.1 to > 0.9 in 120 steps. Who does not read the map
# (env.registry.FrozenLake.kwargs.show_map=false) stays at about one half.
# Actor and rollout are in fp32: at this learning rate a bf16 policy was seen to fall back to chance within one update.
set -euo pipefail

STEPS=${STEPS:-120}
ESTIMATOR=${ESTIMATOR:-grpo}                    # or gigpo, which also compares turns that began on the same map
MODEL=${MODEL:-models/tiny-qwen2-80k}           # python -m verl.utils.tiny_model $MODEL --size tiny
RUN=${RUN:-runs/frozen-lake-$ESTIMATOR}

options=(
    env.train.tags=[FrozenLake]
    env.train.n_groups=8
    env.train.group_size=8
    env.val.n_groups=100
    env.registry.FrozenLake.max_steps=4
    env.registry.FrozenLake.max_tokens_per_step=1
    env.registry.FrozenLake.kwargs.size=2
    env.registry.FrozenLake.kwargs.num_holes=1
    env.registry.FrozenLake.kwargs.prompt=terse
    env.registry.FrozenLake.kwargs.answer=plain
    env.registry.FrozenLake.kwargs.actions=LDRU
    env.registry.FrozenLake.kwargs.invalid_reward=-0.1
    algorithm.adv_estimator="$ESTIMATOR"
    data.max_prompt_length=64
    data.max_response_length=128
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.enable_gradient_checkpointing=false
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=8
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64
    actor_rollout_ref.actor.optim.lr=2e-3
    actor_rollout_ref.actor.optim.weight_decay=0
    actor_rollout_ref.actor.optim.betas="[0.9,0.99]"
    actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
    actor_rollout_ref.rollout.name=hf
    actor_rollout_ref.rollout.dtype=float32
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64
    trainer.device=cpu
    trainer.n_gpus_per_node=1
    trainer.project_name=frozen-lake
    trainer.experiment_name="$ESTIMATOR"
    trainer.logger=file
    trainer.total_training_steps="$STEPS"
    trainer.test_freq="$STEPS"
    trainer.save_freq="$STEPS"
    trainer.default_local_dir="$RUN"
    trainer.rollout_data_dir="$RUN/samples"
    trainer.validation_data_dir="$RUN/validation"
)
# where a group's scores are nearly equal, dividing by their spread makes noise of it
if [ "$ESTIMATOR" = gigpo ]; then options+=(algorithm.gigpo.mode=mean_norm); fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python3 -m verl.trainer.main_agentic "${options[@]}" "$@"
