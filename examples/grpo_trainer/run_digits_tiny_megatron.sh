#!/usr/bin/env bash
# GRPO from random weights with Megatron on one GPU of any size: a 2.5M model learns to write digits. Shows that the
# installation works. GPUS=2 TP=2 splits each layer over two.
set -euo pipefail

STEPS=${STEPS:-20}
MODEL=${MODEL:-models/tiny-qwen2-2.5M}          # python -m verl.utils.tiny_model $MODEL --size 2.5M
DATA=${DATA:-data/digits}                       # python examples/data_preprocess/arithmetic.py --task digits --local_dir $DATA
RUN=${RUN:-runs/grpo-digits-megatron}
GPUS=${GPUS:-1}
TP=${TP:-1}

options=(
    algorithm.adv_estimator=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=8
    data.max_prompt_length=64
    data.max_response_length=16
    data.dataloader_num_workers=0
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size="$TP"
    actor_rollout_ref.actor.ppo_mini_batch_size=8
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
    actor_rollout_ref.actor.optim.lr=1e-4
    actor_rollout_ref.actor.optim.lr_warmup_steps=3
    actor_rollout_ref.actor.optim.weight_decay=0
    actor_rollout_ref.actor.optim.betas="[0.9,0.99]"
    actor_rollout_ref.rollout.name=hf
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.ignore_eos=true       # sixteen characters each: these answers have no end to find
    trainer.device=cuda
    trainer.n_gpus_per_node="$GPUS"
    trainer.project_name=digits
    trainer.experiment_name=grpo-digits-megatron
    trainer.logger=file
    trainer.total_training_steps="$STEPS"
    trainer.test_freq="$STEPS"
    trainer.save_freq="$STEPS"
    trainer.default_local_dir="$RUN"
    trainer.rollout_data_dir="$RUN/samples"
    trainer.validation_data_dir="$RUN/validation"
)
exec python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer "${options[@]}" "$@"
