#!/usr/bin/env bash
# GRPO with images from random weights in a minute: a tiny Qwen2.5-VL learns to answer bright images with digits and
# dark ones with letters. A response that is the same for all images scores one half at most.
set -euo pipefail

STEPS=${STEPS:-30}
MODEL=${MODEL:-models/tiny-vl}                  # python -m verl.utils.tiny_vl_model $MODEL
DATA=${DATA:-data/brightness}                   # python examples/data_preprocess/brightness.py --local_save_dir $DATA
RUN=${RUN:-runs/grpo-brightness}

options=(
    algorithm.adv_estimator=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=8
    data.max_prompt_length=96
    data.max_response_length=4
    data.dataloader_num_workers=0
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.enable_gradient_checkpointing=false
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=8
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
    actor_rollout_ref.actor.optim.lr=2e-3
    actor_rollout_ref.actor.optim.weight_decay=0
    actor_rollout_ref.actor.optim.betas="[0.9,0.99]"
    actor_rollout_ref.rollout.name=hf
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.ignore_eos=true
    actor_rollout_ref.rollout.calculate_log_probs=true
    trainer.device=cpu
    trainer.n_gpus_per_node=1
    trainer.project_name=brightness
    trainer.experiment_name=grpo-brightness
    trainer.logger=file
    trainer.total_training_steps="$STEPS"
    trainer.test_freq="$STEPS"
    trainer.save_freq="$STEPS"
    trainer.default_local_dir="$RUN"
    trainer.rollout_data_dir="$RUN/samples"
    trainer.validation_data_dir="$RUN/validation"
)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
