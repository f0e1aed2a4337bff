#!/usr/bin/env bash
# A LangGraph agent with a calculator, trained by GRPO. One node of 2 GPUs or more; pip install langgraph langchain-openai.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
DATA=${DATA:-data/math_expression}      # python recipe/langgraph_agent/example/create_dataset.py --folder $DATA
GPUS=${GPUS:-2}

options=(
    algorithm.adv_estimator=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.return_raw_chat=true
    data.train_batch_size=128
    data.max_prompt_length=1024
    data.max_response_length=2048
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.multi_turn.format=hermes
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8
    actor_rollout_ref.rollout.agent.agent_loop_config_path=recipe/langgraph_agent/example/agent.yaml
    env.episode_timeout=300
    trainer.n_gpus_per_node="$GPUS"
    trainer.project_name=math_expression
    trainer.experiment_name=langgraph-qwen2.5-3b
    trainer.test_freq=5
    trainer.save_freq=20
    trainer.total_epochs=1
)
exec python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
