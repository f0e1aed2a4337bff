#!/usr/bin/env bash
# Eight responses of DeepSeek-R1-Distill-Qwen-1.5B to each problem, sampled as it was published (temperature 0.6, 32k
# tokens), on 8 GPUs with 80 GB; then the figures of each data source.
set -euo pipefail

MODEL=${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B}
DATA=${DATA:-data/r1}                           # python recipe/r1/data_process.py --local_dir $DATA
OUTPUT=${OUTPUT:-responses/r1-distill-qwen-1.5b.parquet}
GPUS=${GPUS:-8}

options=(
    model.path="$MODEL"
    data.path="$DATA/test.parquet"
    data.prompt_key=prompt
    data.n_samples=8
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=34816
    data.batch_size=256
    data.output_path="$OUTPUT"
    rollout.name=vllm
    rollout.temperature=0.6
    rollout.top_p=0.95
    rollout.top_k=-1
    rollout.prompt_length=2048
    rollout.response_length=32768
    rollout.tensor_model_parallel_size=1
    rollout.gpu_memory_utilization=0.9
    trainer.device=cuda
    trainer.nnodes=1
    trainer.n_gpus_per_node="$GPUS"
)
python3 -m verl.trainer.main_generation "${options[@]}" "$@"
python3 -m recipe.r1.main_eval data.path="$OUTPUT"
