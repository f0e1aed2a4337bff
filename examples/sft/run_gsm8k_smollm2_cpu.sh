#!/usr/bin/env bash
# Supervised fine-tuning of SmolLM2-135M on 640 worked answers of GSM8K, on a CPU; GRPO goes on from its result:
#   bash examples/sft/run_gsm8k_smollm2_cpu.sh
#   MODEL=runs/sft-gsm8k-smollm2/huggingface bash examples/grpo_trainer/run_gsm8k_smollm2_cpu.sh
set -euo pipefail

STEPS=${STEPS:-40}
MODEL=${MODEL:-models/SmolLM2-135M-Instruct}    # python scripts/prepare_smollm2.py
DATA=${DATA:-data/gsm8k}                        # python examples/data_preprocess/gsm8k.py --local_save_dir $DATA
RUN=${RUN:-runs/sft-gsm8k-smollm2}

options=(
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    # the rows of reinforcement learning: the worked answer stands in extra_info.answer
    data.prompt_key=prompt
    data.response_key=extra_info
    data.response_dict_keys="[answer]"
    data.train_batch_size=16
    data.max_length=512
    data.max_token_len_per_gpu=2048
    data.val_max_samples=100
    model.path="$MODEL"
    model.enable_gradient_checkpointing=false
    engine.strategy=fsdp2
    optim.lr=1e-4
    trainer.device=cpu
    trainer.n_gpus_per_node=1
    trainer.project_name=gsm8k
    trainer.experiment_name=sft-smollm2
    trainer.logger="[file,tensorboard]"
    trainer.tracker_kwargs.tensorboard.log_dir="$RUN/tensorboard"
    trainer.total_training_steps="$STEPS"
    trainer.default_local_dir="$RUN"
)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"  # spinning threads slow each other
exec python3 -m verl.trainer.sft_trainer "${options[@]}" "$@"
