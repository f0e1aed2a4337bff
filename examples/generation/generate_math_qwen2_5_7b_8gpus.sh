#!/usr/bin/env bash
# Sixteen responses of Qwen2.5-Math-7B-Instruct to each problem of MATH-500, eight GPUs, two to an engine.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-Math-7B-Instruct}
DATA=${DATA:-$HOME/data/math500}                # python examples/data_preprocess/math_dataset.py --only_500 --local_dir $DATA
OUTPUT=${OUTPUT:-responses/math500-qwen2.5-math-7b.parquet}

options=(
    model.path="$MODEL"
    data.path="$DATA/test.parquet"
    data.n_samples=16
    data.batch_size=500
    data.output_path="$OUTPUT"
    rollout.name=vllm
    rollout.tensor_model_parallel_size=2
    rollout.temperature=0.7
    rollout.top_p=0.95
    rollout.top_k=-1
    rollout.prompt_length=1024
    rollout.response_length=3072
    rollout.gpu_memory_utilization=0.85
    trainer.device=cuda
    trainer.nnodes=1
    trainer.n_gpus_per_node=8
)
python3 -m verl.trainer.main_generation "${options[@]}" "$@"
python3 -m verl.trainer.main_eval data.path="$OUTPUT"
