#!/usr/bin/env bash
# Search-R1 (Jin et al. 2025, arXiv:2503.09516): questions answered with a search tool. One node of 8 GPUs, and a
# retrieval service at RETRIEVAL_SERVICE_URL.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
DATA=${DATA:-$HOME/data/search_r1}
# python examples/data_preprocess/preprocess_search_r1_dataset.py --local_save_dir $DATA
GPUS=${GPUS:-8}

options=(
    algorithm.adv_estimator=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=512
    data.max_prompt_length=4096
    data.max_response_length=3000
    data.filter_overlong_prompts=true
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.use_kl_loss=true
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.rollout.name=sglang
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.n=5
    actor_rollout_ref.rollout.multi_turn.enable=true
    actor_rollout_ref.rollout.multi_turn.tool_config_path=examples/sglang_multiturn/config/tool_config/search_tool_config.yaml
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2
    actor_rollout_ref.rollout.multi_turn.max_tool_response_length=2048
    trainer.device=cuda
    trainer.n_gpus_per_node="$GPUS"
    trainer.nnodes=1
    trainer.project_name=search_r1
    trainer.experiment_name=qwen2.5-3b-search
    trainer.logger="[console,wandb]"
    trainer.total_epochs=1
    trainer.test_freq=20
    trainer.save_freq=20
)
exec python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
