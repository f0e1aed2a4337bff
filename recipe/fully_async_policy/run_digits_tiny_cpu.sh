#!/usr/bin/env bash
# Fully asynchronous GRPO from random weights: one CPU process trains a 2.5M model to write digits, another generates
# all the time, at most two steps behind.
set -euo pipefail

STEPS=${STEPS:-40}
MODEL=${MODEL:-models/tiny-qwen2-2.5M}          # python -m verl.utils.tiny_model $MODEL --size 2.5M
DATA=${DATA:-data/digits}                       # python examples/data_preprocess/arithmetic.py --task digits --local_dir $DATA
RUN=${RUN:-runs/fully-async-digits}

options=(
    algorithm.adv_estimator=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=8
    data.max_prompt_length=64
    data.max_response_length=16
    data.dataloader_num_workers=0
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.enable_gradient_checkpointing=false
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=8
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
    actor_rollout_ref.actor.optim.lr=3e-4
    actor_rollout_ref.actor.optim.lr_warmup_steps=3
    actor_rollout_ref.actor.optim.weight_decay=0
    actor_rollout_ref.actor.optim.betas="[0.9,0.99]"
    actor_rollout_ref.rollout.name=hf
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.max_staleness=2
    algorithm.rollout_correction.rollout_is=token
    trainer.device=cpu
    trainer.n_gpus_per_node=1
    actor_rollout_ref.rollout.n_gpus_per_node=1
    trainer.project_name=digits
    trainer.experiment_name=fully-async-digits
    trainer.logger=file
    trainer.total_training_steps="$STEPS"
    trainer.test_freq="$STEPS"
    trainer.save_freq="$STEPS"
    trainer.default_local_dir="$RUN"
    trainer.rollout_data_dir="$RUN/samples"
    trainer.validation_data_dir="$RUN/validation"
)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python3 -m recipe.fully_async_policy.fully_async_main "${options[@]}" "$@"
