#!/usr/bin/env bash
# A tiny model from random weights learns to call a tool and to tell what it answers, on a CPU, in two minutes:
# the reward rises from 0.0 to 1.0. Who asks and does not read the answer stays at 0.7.
# Numbers are fp32 in actor and rollout: with bf16 the two disagree about tokens of a policy this small.
set -euo pipefail

STEPS=${STEPS:-80}
DATA=${DATA:-data/ask_a_tool}                  # python examples/agentic/ask_a_tool/prepare.py data/ask_a_tool
MODEL=${MODEL:-$DATA/model}
RUN=${RUN:-runs/ask-a-tool}
HERE=examples/agentic/ask_a_tool

options=(
    algorithm.adv_estimator=reinforce_plus_plus
    custom_reward_function.path=$HERE/reward.py
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=24
    data.max_prompt_length=32
    data.max_response_length=48
    data.shuffle=false                              # each letter equally often in every step
    data.dataloader_num_workers=0
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.custom_chat_template=$HERE/chat_template.jinja
    actor_rollout_ref.model.enable_gradient_checkpointing=false
    actor_rollout_ref.actor.strategy=local
    actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
    actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
    actor_rollout_ref.actor.ppo_mini_batch_size=24
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=192
    actor_rollout_ref.actor.optim.lr=4e-3
    actor_rollout_ref.actor.optim.weight_decay=0
    "actor_rollout_ref.actor.optim.betas=[0.9,0.99]"
    actor_rollout_ref.actor.entropy_coeff=0.01
    actor_rollout_ref.rollout.name=hf
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.dtype=float32
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=192
    actor_rollout_ref.rollout.multi_turn.enable=true
    actor_rollout_ref.rollout.multi_turn.function_tool_path=$HERE/tools.py
    actor_rollout_ref.rollout.multi_turn.format=$HERE/question_format.py:QuestionParser
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2
    actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=1
    trainer.device=cpu
    trainer.n_gpus_per_node=1
    trainer.controller=local
    trainer.project_name=agentic
    trainer.experiment_name=ask-a-tool
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
