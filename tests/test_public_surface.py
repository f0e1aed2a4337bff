"""The names user code imports, and what importing verl costs."""

import importlib
import subprocess
import sys

import pytest

SURFACE = {
    "verl": "DataProto __version__",
    "verl.protocol": "DataProto DataProtoItem DataProtoFuture pad_dataproto_to_divisor unpad_dataproto collate_fn "
    "union_tensor_dict union_numpy_dict list_of_dict_to_dict_of_list fold_batch_dim unfold_batch_dim DataProtoConfig",
    "verl.base_config": "BaseConfig",
    "verl.single_controller.base": "Worker",
    "verl.single_controller.base.decorator": "register Dispatch Execute register_dispatch_mode "
    "get_predefined_dispatch_fn get_predefined_execute_fn make_nd_compute_dataproto_dispatch_fn",
    "verl.trainer.config": "AlgoConfig KLControlConfig CheckpointConfig",
    "verl.trainer.main_ppo": "main run_ppo create_rl_dataset create_rl_sampler",
    "verl.trainer.ppo.core_algos": "agg_loss kl_penalty compute_gae_advantage_return AdvantageEstimator "
    "compute_grpo_outcome_advantage compute_policy_loss compute_value_loss get_kl_controller register_adv_est "
    "get_adv_estimator_fn register_policy_loss get_policy_loss_fn AdaptiveKLController FixedKLController",
    "verl.trainer.ppo.metric_utils": "compute_throughout_metrics compute_timing_metrics compute_data_metrics",
    "verl.trainer.ppo.ray_trainer": "ResourcePoolManager Role RayPPOTrainer apply_kl_penalty compute_response_mask "
    "compute_advantage AdvantageEstimator",
    "verl.trainer.ppo.reward": "compute_reward load_reward_manager get_custom_reward_fn",
    "verl.trainer.ppo.utils": "need_reference_policy need_critic WorkerType Role",
    "verl.utils": "hf_tokenizer hf_processor",
    "verl.utils.checkpoint.fsdp_checkpoint_manager": "FSDPCheckpointManager",
    "verl.utils.config": "omega_conf_to_dataclass validate_config",
    "verl.utils.dataset.rl_dataset": "collate_fn RLHFDataset",
    "verl.utils.debug": "marked_timer log_gpu_memory_usage",
    "verl.utils.device": "get_device_name get_device_id get_torch_device is_cuda_available get_nccl_backend",
    "verl.utils.flops_counter": "FlopsCounter",
    "verl.utils.fs": "copy_to_local",
    "verl.utils.hdfs_io": "copy makedirs",
    "verl.utils.metric": "reduce_metrics",
    "verl.utils.model": "compute_position_id_with_mask",
    "verl.utils.profiler": "marked_timer log_gpu_memory_usage",
    "verl.utils.reward_score": "default_compute_score",
    "verl.utils.seqlen_balancing": "rearrange_micro_batches get_reverse_idx get_seqlen_balanced_partitions "
    "log_seqlen_unbalance",
    "verl.utils.torch_functional": "masked_mean masked_whiten logprobs_from_logits entropy_from_logits "
    "pad_sequence_to_length get_cosine_schedule_with_warmup get_constant_schedule_with_warmup",
    "verl.utils.tracking": "Tracking ValidationGenerationsLogger",
    "verl.workers.config": "FSDPActorConfig FSDPCriticConfig FSDPEngineConfig FSDPOptimizerConfig PolicyLossConfig",
    "verl.workers.fsdp_workers": "ActorRolloutRefWorker AsyncActorRolloutRefWorker CriticWorker RewardModelWorker",
    "verl.workers.megatron_workers": "ActorRolloutRefWorker AsyncActorRolloutRefWorker CriticWorker RewardModelWorker",
    "verl.workers.reward_manager": "NaiveRewardManager BatchRewardManager register get_reward_manager_cls",
    "verl.experimental.dataset.sampler": "AbstractSampler AbstractCurriculumSampler",
}

RAY_SURFACE = {
    "verl.single_controller.ray": "RayWorkerGroup RayClassWithInitArgs RayResourcePool",
    "verl.single_controller.ray.base": "create_colocated_worker_cls RayResourcePool merge_resource_pool",
}


@pytest.mark.parametrize("module", SURFACE | RAY_SURFACE)
def test_public_names_stand_at_their_address(module):
    loaded = importlib.import_module(module)
    missing = [name for name in (SURFACE | RAY_SURFACE)[module].split() if not hasattr(loaded, name)]
    assert not missing, f"{module} lacks {missing}"


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_verl_imports_nothing_heavy():
    assert not modules_after("import verl") & {"torch", "ray", "transformers", "tensordict", "hydra", "numpy"}


def test_the_config_is_read_without_torch_or_ray():
    loaded = modules_after("import verl.trainer.main_ppo")
    assert not loaded & {"torch", "ray", "transformers", "tensordict", "hydra"}


def test_the_local_controller_never_imports_ray():
    assert "ray" not in modules_after("from verl.single_controller import get_controller; get_controller('local')")
