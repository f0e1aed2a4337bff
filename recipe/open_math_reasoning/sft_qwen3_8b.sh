#!/usr/bin/env bash
# Supervised fine-tuning of Qwen3-8B-Base on solutions of OpenMathReasoning of up to 24k tokens: 8 GPUs with 80 GB.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-8B-Base}
DATA=${DATA:-data/open_math_reasoning}          # python recipe/open_math_reasoning/prepare_sft.py --local_dir $DATA
RUN=${RUN:-runs/open-math-reasoning-sft}
GPUS=${GPUS:-8}

torchrun --standalone --nnodes=1 --nproc_per_node="$GPUS" -m verl.trainer.fsdp_sft_trainer \
    data.train_files="$DATA/train.parquet" \
    data.format=messages \
    data.train_batch_size=128 \
    data.max_length=24576 \
    data.truncation=right \
    data.max_token_len_per_gpu=24576 \
    model.path="$MODEL" \
    model.enable_gradient_checkpointing=true \
    engine.strategy=fsdp2 \
    engine.optimizer_offload=true \
    optim.lr=2e-5 \
    optim.lr_warmup_steps=200 \
    optim.warmup_style=cosine \
    optim.min_lr_ratio=0.1 \
    optim.weight_decay=0.1 \
    trainer.project_name=open-math-reasoning \
    trainer.experiment_name=sft-qwen3-8b \
    trainer.logger=[console,tensorboard] \
    trainer.total_epochs=1 \
    trainer.save_freq=2000 \
    trainer.max_ckpt_to_keep=2 \
    trainer.default_local_dir="$RUN" "$@"
