#!/usr/bin/env bash
# DPO of SmolLM2-135M on one-digit arithmetic, on a CPU: the right answer is chosen, another one rejected.
#   TASK=mul1 bash examples/dpo_trainer/run_arithmetic_smollm2_cpu.sh
set -euo pipefail

TASK=${TASK:-mul1}                              # add1, mul1, max3 or even
STEPS=${STEPS:-12}
MODEL=${MODEL:-models/SmolLM2-135M-Instruct}    # python scripts/prepare_smollm2.py
DATA=${DATA:-data/$TASK-pairs}                  # python examples/data_preprocess/arithmetic.py --task $TASK --pairs --local_save_dir $DATA
RUN=${RUN:-runs/dpo-$TASK}

options=(
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=16
    data.max_length=128
    model.path="$MODEL"
    model.enable_gradient_checkpointing=false
    engine.strategy=fsdp2
    algorithm.beta=0.1
    algorithm.rpo_alpha=1.0
    algorithm.precompute_ref=true
    optim.lr=1e-5
    trainer.device=cpu
    trainer.n_gpus_per_node=1
    trainer.project_name=arithmetic
    trainer.experiment_name="dpo-$TASK"
    trainer.logger="[file,tensorboard]"
    trainer.tracker_kwargs.tensorboard.log_dir="$RUN/tensorboard"
    trainer.total_training_steps="$STEPS"
    trainer.save_freq="$STEPS"
    trainer.default_local_dir="$RUN"
)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"  # spinning threads slow each other
exec python3 -m verl.trainer.dpo_trainer "${options[@]}" "$@"
