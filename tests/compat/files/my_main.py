"""A project's entry point, built the way verl's own is: hydra, Ray, a task runner, roles, pools, a trainer."""

import os
import socket
import sys

import hydra
import ray
from omegaconf import OmegaConf


@hydra.main(config_path="config", config_name="my_trainer", version_base=None)
def main(config):
    run_ppo(config)


def run_ppo(config):
    if not ray.is_initialized():
        ray.init(
            runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN"}},
            num_cpus=config.ray_init.num_cpus,
        )
    runner = TaskRunner.remote()
    ray.get(runner.run.remote(config))


@ray.remote(num_cpus=1)
class TaskRunner:
    def run(self, config):
        from verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role
        from verl.trainer.ppo.reward import load_reward_manager
        from verl.utils import hf_processor, hf_tokenizer
        from verl.utils.dataset.rl_dataset import collate_fn
        from verl.utils.fs import copy_to_local

        print(f"TaskRunner on {socket.gethostname()}, PID {os.getpid()}")
        OmegaConf.resolve(config)
        local_path = copy_to_local(
            config.actor_rollout_ref.model.path, use_shm=config.actor_rollout_ref.model.get("use_shm", False)
        )
        trust_remote_code = config.data.get("trust_remote_code", False)
        tokenizer = hf_tokenizer(local_path, trust_remote_code=trust_remote_code)
        processor = hf_processor(local_path, trust_remote_code=trust_remote_code, use_fast=True)

        from my_worker import MyActor, Scorer

        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
        from verl.workers.fsdp_workers import ActorRolloutRefWorker, AsyncActorRolloutRefWorker, CriticWorker

        assert issubclass(MyActor, AsyncActorRolloutRefWorker)
        role_worker_mapping = {
            Role.ActorRollout: ray.remote(MyActor),
            Role.Critic: ray.remote(CriticWorker),
        }
        resource_pool_spec = {"global_pool": [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
        mapping = {Role.ActorRollout: "global_pool", Role.Critic: "global_pool"}
        if config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss:
            role_worker_mapping[Role.RefPolicy] = ray.remote(ActorRolloutRefWorker)
            mapping[Role.RefPolicy] = "global_pool"
        reward_kwargs = config.reward_model.get("reward_kwargs", {})
        train_dataset = create_rl_dataset(config.data.train_files, config.data, tokenizer, processor)
        trainer = RayPPOTrainer(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=role_worker_mapping,
            resource_pool_manager=ResourcePoolManager(resource_pool_spec=resource_pool_spec, mapping=mapping),
            ray_worker_group_cls=RayWorkerGroup,
            reward_fn=load_reward_manager(config, tokenizer, num_examine=0, **reward_kwargs),
            val_reward_fn=load_reward_manager(config, tokenizer, num_examine=1, **reward_kwargs),
            train_dataset=train_dataset,
            val_dataset=create_rl_dataset(config.data.val_files, config.data, tokenizer, processor),
            collate_fn=collate_fn,
            train_sampler=create_rl_sampler(config.data, train_dataset),
            device_name=config.trainer.device,
        )
        trainer.init_workers()
        trainer.fit()
        print("TRAINED", trainer.global_steps, trainer.metrics["actor/my_updates"], trainer.metrics["actor/my_ratio"])
        print("NOTE", trainer.config.my_project.note)

        pool = RayResourcePool([1], use_gpu=False, name_prefix="scorers", max_colocate_count=1)
        scorer_cls = RayClassWithInitArgs(cls=ray.remote(Scorer), config={"bias": 0.5}, role="scorer")
        scorer_wg = RayWorkerGroup(pool, scorer_cls)
        scorer_wg.init_model()
        print("SCORED", score(scorer_wg))


def score(group):
    import numpy as np
    import torch

    from verl import DataProto

    data = DataProto.from_dict(
        tensors={"values": torch.arange(3.0)}, non_tensors={"name": np.array(list("abc"), dtype=object)}
    )
    later = group.score_later(data)
    return group.score(data).batch["scores"].tolist(), later.get().batch["scores"].tolist(), group.rank_of("x")


if __name__ == "__main__":
    sys.exit(main())
