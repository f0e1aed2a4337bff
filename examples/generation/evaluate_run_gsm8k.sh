#!/usr/bin/env bash
# The newest checkpoint of a run on GSM8K's test split, greedy, as the run's own validation would sample: one GPU.
set -euo pipefail

RUN=${RUN:-checkpoints/gsm8k/grpo-qwen2.5-0.5b}
DATA=${DATA:-$HOME/data/gsm8k}

options=(
    data.path="$DATA/test.parquet"
    data.output_path="${OUTPUT:-responses/gsm8k-run.parquet}"
    rollout.name=vllm
    rollout.prompt_length=512
    rollout.response_length=512
    trainer.device=cuda
    trainer.nnodes=1
    trainer.n_gpus_per_node=1
)
exec python3 -m verl.trainer.main_eval model.path="$RUN" "${options[@]}" "$@"
