#!/usr/bin/env bash
# DPO of Qwen2.5-7B-Instruct on UltraFeedback, 8 GPUs; the reference is read once, before training.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
DATA=${DATA:-$HOME/data/ultrafeedback}    # python examples/data_preprocess/ultrafeedback.py --local_save_dir $DATA
RUN=${RUN:-runs/dpo-ultrafeedback}

torchrun --standalone --nnodes=1 --nproc_per_node="${GPUS:-8}" -m verl.trainer.dpo_trainer \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=128 \
    data.max_length=2048 \
    data.truncation=drop \
    data.max_token_len_per_gpu=16384 \
    model.path="$MODEL" \
    model.use_prefix_sharing=true \
    engine.strategy=fsdp2 \
    algorithm.loss_type=sigmoid \
    algorithm.beta=0.1 \
    algorithm.precompute_ref=true \
    optim.lr=5e-7 \
    trainer.project_name=ultrafeedback \
    trainer.experiment_name=dpo-qwen2.5-7b \
    trainer.logger=[console,tensorboard] \
    trainer.total_epochs=1 \
    trainer.test_freq=100 \
    trainer.save_freq=100 \
    trainer.max_ckpt_to_keep=2 \
    trainer.default_local_dir="$RUN" "$@"
