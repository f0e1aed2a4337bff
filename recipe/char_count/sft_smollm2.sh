#!/usr/bin/env bash
# Supervised fine-tuning of SmolLM2-135M on answers that spell the word: one GPU with 24 GB.
set -euo pipefail

MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
DATA=${DATA:-data/char_count/sft}               # python recipe/char_count/create_dataset.py --local_dir data/char_count
RUN=${RUN:-runs/char-count-sft}
GPUS=${GPUS:-1}

options=(
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.prompt_key=prompt
    data.response_key=response
    data.train_batch_size=256
    data.max_length=384
    model.path="$MODEL"
    engine.strategy=fsdp2
    optim.lr=1e-4
    trainer.device=cuda
    trainer.n_gpus_per_node="$GPUS"
    trainer.project_name=char-count
    trainer.experiment_name=sft-smollm2-135m
    trainer.logger="[console,file]"
    trainer.total_epochs=3
    trainer.default_local_dir="$RUN"
)
exec python3 -m verl.trainer.sft_trainer "${options[@]}" "$@"
