#!/usr/bin/env bash
# GRPO (Shao et al. 2024, arXiv:2402.03300) on one-digit arithmetic: SmolLM2-135M on a CPU, about 8 CPU seconds a step.
# scripts/quickstart.sh prepares model and data and calls this. On a GPU: RUN=runs/gpu, trainer.device=cuda,
# actor_rollout_ref.model.use_remove_padding=true.
set -euo pipefail

TASK=${TASK:-add1}                              # add1, mul1, max3 or even
STEPS=${STEPS:-25}
MODEL=${MODEL:-models/SmolLM2-135M-Instruct}    # python scripts/prepare_smollm2.py
DATA=${DATA:-data/$TASK}                        # python examples/data_preprocess/arithmetic.py --task $TASK --local_dir $DATA
RUN=${RUN:-runs/grpo-$TASK}

options=(
    algorithm.adv_estimator=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=4
    data.max_prompt_length=64
    data.max_response_length=10
    data.dataloader_num_workers=0
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.enable_gradient_checkpointing=false
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=4
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024
    # weights stay fp32: at this rate bf16 would round the updates away
    actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
    actor_rollout_ref.actor.optim.lr=2e-5
    actor_rollout_ref.actor.optim.lr_warmup_steps=3
    actor_rollout_ref.actor.optim.weight_decay=0
    actor_rollout_ref.actor.optim.betas="[0.9,0.99]"
    actor_rollout_ref.rollout.name=hf
    actor_rollout_ref.rollout.n=8
    trainer.device=cpu
    trainer.n_gpus_per_node=1
    trainer.project_name=arithmetic
    trainer.experiment_name="grpo-$TASK"
    trainer.logger="[file,tensorboard]"
    trainer.tracker_kwargs.tensorboard.log_dir="$RUN/tensorboard"
    trainer.total_training_steps="$STEPS"
    trainer.test_freq="$STEPS"
    trainer.save_freq="$STEPS"
    trainer.default_local_dir="$RUN"
    trainer.rollout_data_dir="$RUN/samples"
    trainer.validation_data_dir="$RUN/validation"
)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"  # spinning threads slow each other
exec python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
