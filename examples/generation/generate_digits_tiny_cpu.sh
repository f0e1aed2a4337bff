#!/usr/bin/env bash
# Responses of the quickstart's tiny model on a CPU, in seconds: bash scripts/quickstart.sh --task digits makes its files.
set -euo pipefail

MODEL=${MODEL:-models/tiny-qwen2-2.5M}
DATA=${DATA:-data/digits}
OUTPUT=${OUTPUT:-responses/digits-tiny.parquet}

options=(
    model.path="$MODEL"
    data.path="$DATA/test.parquet"
    data.n_samples=4
    data.output_path="$OUTPUT"
    rollout.name=hf
    rollout.dtype=float32
    rollout.top_p=1.0
    rollout.top_k=-1
    rollout.prompt_length=64
    rollout.response_length=12
    trainer.device=cpu
    trainer.controller=local
    trainer.n_gpus_per_node=1
)
python3 -m verl.trainer.main_generation "${options[@]}" "$@"
python3 -m verl.trainer.main_eval data.path="$OUTPUT"
