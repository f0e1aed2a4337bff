#!/usr/bin/env bash
# AIME 2024 and 2025 sixteen times with a model that sft_qwen3_8b.sh has trained, 8 GPUs with 80 GB; then the figures.
set -euo pipefail

MODEL=${MODEL:-runs/open-math-reasoning-sft/huggingface}
DATA=${DATA:-data/open_math_eval}               # python recipe/r1/data_process.py --tasks aime2024,aime2025 --local_dir $DATA
OUTPUT=${OUTPUT:-responses/open-math-reasoning.parquet}
GPUS=${GPUS:-8}

options=(
    model.path="$MODEL"
    data.path="$DATA/test.parquet"
    data.prompt_key=prompt
    data.n_samples=16
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=26624
    data.batch_size=256
    data.output_path="$OUTPUT"
    rollout.name=vllm
    rollout.temperature=0.7
    rollout.top_p=0.8
    rollout.top_k=-1
    rollout.prompt_length=2048
    rollout.response_length=24576
    rollout.tensor_model_parallel_size=1
    rollout.gpu_memory_utilization=0.9
    trainer.device=cuda
    trainer.nnodes=1
    trainer.n_gpus_per_node="$GPUS"
)
python3 -m verl.trainer.main_generation "${options[@]}" "$@"
python3 -m verl.trainer.main_eval data.path="$OUTPUT"
