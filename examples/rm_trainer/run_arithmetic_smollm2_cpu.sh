#!/usr/bin/env bash
# A reward model of SmolLM2-135M that tells right from wrong answers to one-digit arithmetic, on a CPU.
#   TASK=add1 bash examples/rm_trainer/run_arithmetic_smollm2_cpu.sh
set -euo pipefail

TASK=${TASK:-add1}                              # add1, mul1, max3 or even
STEPS=${STEPS:-30}
MODEL=${MODEL:-models/SmolLM2-135M-Instruct}    # python scripts/prepare_smollm2.py
DATA=${DATA:-data/$TASK-pairs}                  # python examples/data_preprocess/arithmetic.py --task $TASK --pairs --local_save_dir $DATA
RUN=${RUN:-runs/rm-$TASK}

options=(
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=16
    data.max_length=128
    model.path="$MODEL"
    model.enable_gradient_checkpointing=false
    engine.strategy=fsdp2
    algorithm.center_rewards_coefficient=0.01
    optim.lr=5e-5
    trainer.device=cpu
    trainer.n_gpus_per_node=1
    trainer.project_name=arithmetic
    trainer.experiment_name="rm-$TASK"
    trainer.logger="[file,tensorboard]"
    trainer.tracker_kwargs.tensorboard.log_dir="$RUN/tensorboard"
    trainer.total_training_steps="$STEPS"
    trainer.save_freq="$STEPS"
    trainer.default_local_dir="$RUN"
)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"  # spinning threads slow each other
exec python3 -m verl.trainer.rm_trainer "${options[@]}" "$@"
