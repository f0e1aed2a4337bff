#!/usr/bin/env bash
# Supervised fine-tuning of Qwen2.5-0.5B-Instruct on the worked answers of GSM8K, 8 GPUs.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}    # python examples/data_preprocess/gsm8k.py --local_dir $DATA
RUN=${RUN:-runs/sft-gsm8k}

torchrun --standalone --nnodes=1 --nproc_per_node="${GPUS:-8}" -m verl.trainer.fsdp_sft_trainer \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.prompt_key=extra_info \
    data.response_key=extra_info \
    data.prompt_dict_keys=[question] \
    data.response_dict_keys=[answer] \
    data.train_batch_size=64 \
    data.max_length=1024 \
    data.max_token_len_per_gpu=16384 \
    model.path="$MODEL" \
    engine.strategy=fsdp2 \
    optim.lr=1e-5 \
    trainer.project_name=gsm8k-sft \
    trainer.experiment_name=qwen2.5-0.5b \
    trainer.logger=[console,tensorboard] \
    trainer.total_epochs=3 \
    trainer.test_freq=100 \
    trainer.save_freq=100 \
    trainer.max_ckpt_to_keep=2 \
    trainer.default_local_dir="$RUN" "$@"
