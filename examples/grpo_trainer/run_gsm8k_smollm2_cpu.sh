#!/usr/bin/env bash
# GRPO (Shao et al. 2024, arXiv:2402.03300) on GSM8K with SmolLM2-135M on a CPU. A model of this size needs to be taught
# first: examples/sft/run_gsm8k_smollm2_cpu.sh, or both with scripts/quickstart.sh --task gsm8k --sft.
set -euo pipefail

STEPS=${STEPS:-6}
MODEL=${MODEL:-runs/sft-gsm8k-smollm2/huggingface}
DATA=${DATA:-data/gsm8k}                        # python examples/data_preprocess/gsm8k.py --local_save_dir $DATA
RUN=${RUN:-runs/grpo-gsm8k-smollm2}

options=(
    algorithm.adv_estimator=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=4
    data.val_max_samples=100
    data.max_prompt_length=320
    data.max_response_length=200
    data.dataloader_num_workers=0
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.enable_gradient_checkpointing=false
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.ppo_mini_batch_size=4
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048
    # weights stay fp32: at this rate bf16 would round the updates away
    actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
    actor_rollout_ref.actor.optim.lr=2e-5
    actor_rollout_ref.actor.optim.weight_decay=0
    actor_rollout_ref.actor.optim.betas="[0.9,0.99]"
    actor_rollout_ref.rollout.name=hf
    actor_rollout_ref.rollout.n=8
    # a right answer is rare at this size: a wrong one after #### counts a little, so that groups differ
    reward_model.reward_kwargs.format_score=0.1
    trainer.device=cpu
    trainer.n_gpus_per_node=1
    trainer.project_name=gsm8k
    trainer.experiment_name=grpo-smollm2
    trainer.logger="[file,tensorboard]"
    trainer.tracker_kwargs.tensorboard.log_dir="$RUN/tensorboard"
    trainer.total_training_steps="$STEPS"
    trainer.test_freq="$STEPS"
    trainer.save_freq="$STEPS"
    trainer.default_local_dir="$RUN"
    trainer.rollout_data_dir="$RUN/samples"
    trainer.validation_data_dir="$RUN/validation"
)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"  # spinning threads slow each other
exec python3 -m verl.trainer.main_ppo "${options[@]}" "$@"
