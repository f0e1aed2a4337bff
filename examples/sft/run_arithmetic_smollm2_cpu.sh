#!/usr/bin/env bash
# Supervised fine-tuning of SmolLM2-135M on one-digit arithmetic, on a CPU; reinforcement learning goes on from its result:
#   TASK=mul1 bash examples/sft/run_arithmetic_smollm2_cpu.sh
#   TASK=mul1 MODEL=runs/sft-mul1/huggingface bash examples/grpo_trainer/run_arithmetic_smollm2_cpu.sh
set -euo pipefail

TASK=${TASK:-mul1}                              # add1, mul1, max3 or even
STEPS=${STEPS:-12}
MODEL=${MODEL:-models/SmolLM2-135M-Instruct}    # python scripts/prepare_smollm2.py
DATA=${DATA:-data/$TASK}                        # python examples/data_preprocess/arithmetic.py --task $TASK --local_dir $DATA
RUN=${RUN:-runs/sft-$TASK}

options=(
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    # the rows of reinforcement learning: the right answer stands in reward_model.ground_truth
    data.prompt_key=prompt
    data.response_key=reward_model
    data.response_dict_keys="[ground_truth]"
    data.train_batch_size=16
    data.max_length=128
    model.path="$MODEL"
    model.enable_gradient_checkpointing=false
    engine.strategy=fsdp2
    optim.lr=2e-5
    trainer.device=cpu
    trainer.n_gpus_per_node=1
    trainer.project_name=arithmetic
    trainer.experiment_name="sft-$TASK"
    trainer.logger="[file,tensorboard]"
    trainer.tracker_kwargs.tensorboard.log_dir="$RUN/tensorboard"
    trainer.total_training_steps="$STEPS"
    trainer.save_freq="$STEPS"
    trainer.default_local_dir="$RUN"
)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"  # spinning threads slow each other
exec python3 -m verl.trainer.sft_trainer "${options[@]}" "$@"
