#!/usr/bin/env bash
# LoRA on conversations with tools (columns `messages` and `tools`), two ranks to a sequence, 8 GPUs.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
DATA=${DATA:-$HOME/data/multiturn}
RUN=${RUN:-runs/sft-multiturn}

torchrun --standalone --nnodes=1 --nproc_per_node="${GPUS:-8}" -m verl.trainer.fsdp_sft_trainer \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.format=messages \
    data.train_batch_size=64 \
    data.max_length=8192 \
    data.truncation=right \
    model.path="$MODEL" \
    model.lora_rank=32 \
    model.lora_alpha=64 \
    model.target_modules=all-linear \
    engine.strategy=fsdp2 \
    engine.ulysses_sequence_parallel_size=2 \
    optim.lr=1e-4 \
    trainer.project_name=multiturn-sft \
    trainer.experiment_name=qwen2.5-7b-lora \
    trainer.logger=[console,tensorboard] \
    trainer.total_epochs=2 \
    trainer.save_freq=200 \
    trainer.default_local_dir="$RUN" "$@"
