#!/usr/bin/env bash
# SimPO, which needs no reference, of Qwen2.5-0.5B with LoRA on dialogues of HH-RLHF, one GPU.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-$HOME/data/full_hh_rlhf/rm}    # python examples/data_preprocess/full_hh_rlhf.py --split rm
RUN=${RUN:-runs/simpo-hh}

python3 -m verl.trainer.dpo_trainer \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=64 \
    data.max_length=1024 \
    data.truncation=drop \
    data.bad_rows=skip \
    model.path="$MODEL" \
    model.lora_rank=32 \
    model.lora_alpha=64 \
    algorithm.loss_type=simpo \
    algorithm.beta=2.5 \
    algorithm.simpo_gamma=1.0 \
    optim.lr=2e-5 \
    trainer.n_gpus_per_node=1 \
    trainer.project_name=hh-rlhf \
    trainer.experiment_name=simpo-qwen2.5-0.5b \
    trainer.logger=[console,tensorboard] \
    trainer.total_epochs=1 \
    trainer.test_freq=200 \
    trainer.save_freq=200 \
    trainer.default_local_dir="$RUN" "$@"
