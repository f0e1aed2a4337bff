#!/usr/bin/env bash
# Four responses of Qwen2.5-0.5B-Instruct to each problem of GSM8K's test split, one GPU; then their figures.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}      # or the folder of a run: its newest checkpoint
DATA=${DATA:-$HOME/data/gsm8k}                  # python examples/data_preprocess/gsm8k.py --local_dir $DATA
OUTPUT=${OUTPUT:-responses/gsm8k-qwen2.5-0.5b.parquet}

options=(
    model.path="$MODEL"
    data.path="$DATA/test.parquet"
    data.prompt_key=prompt
    data.n_samples=4
    data.batch_size=256
    data.output_path="$OUTPUT"
    rollout.name=vllm
    rollout.temperature=0.8
    rollout.top_p=0.95
    rollout.top_k=-1
    rollout.prompt_length=512
    rollout.response_length=512
    rollout.gpu_memory_utilization=0.8
    trainer.device=cuda
    trainer.nnodes=1
    trainer.n_gpus_per_node=1
)
python3 -m verl.trainer.main_generation "${options[@]}" "$@"
python3 -m verl.trainer.main_eval data.path="$OUTPUT"
