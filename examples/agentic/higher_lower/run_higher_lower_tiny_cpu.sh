#!/usr/bin/env bash
# A simulated user thinks of a number from 1 to 3; a tiny model from random weights learns to guess, and to read the
# answer: success of two guesses rises from 0.1 to 1.0 in minutes. Who does not read stays at 2/3.
# Numbers are fp32 in actor and rollout: with bf16 the two disagree about tokens of a policy this small.
set -euo pipefail

STEPS=${STEPS:-150}
MODEL=${MODEL:-data/higher_lower/model}        # python examples/agentic/higher_lower/prepare.py data/higher_lower
DATA=${DATA:-data/higher_lower}
RUN=${RUN:-runs/higher-lower}

options=(
    algorithm.adv_estimator=grpo
    env.reward=environment                          # the user's scores of the turns, no reward function
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=24
    data.max_prompt_length=64
    data.max_response_length=48
    data.shuffle=false                              # each number equally often in every step
    data.dataloader_num_workers=0
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.custom_chat_template=examples/agentic/higher_lower/chat_template.jinja
    actor_rollout_ref.model.enable_gradient_checkpointing=false
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.actor.strategy=local
    actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
    actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
    actor_rollout_ref.actor.ppo_mini_batch_size=24
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
    actor_rollout_ref.actor.optim.lr=4e-3
    actor_rollout_ref.actor.optim.weight_decay=0
    actor_rollout_ref.rollout.name=hf
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.dtype=float32
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.multi_turn.enable=true
    actor_rollout_ref.rollout.multi_turn.interaction_config_path=examples/agentic/higher_lower/users.yaml
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2
    actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=1
    trainer.device=cpu
    trainer.n_gpus_per_node=1
    trainer.controller=local
    trainer.project_name=agentic
    trainer.experiment_name=higher-lower
    trainer.logger=file
    trainer.total_training_steps="$STEPS"
    trainer.val_before_train=true
    trainer.test_freq="$STEPS"
    trainer.save_freq="$STEPS"
    trainer.default_local_dir="$RUN"
    trainer.rollout_data_dir="$RUN/samples"
)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
