"""A project's driver: a task runner with an actor of its own, a trainer that starts the workers itself."""

from pathlib import Path

from omegaconf import OmegaConf, open_dict

from verl.trainer.main_ppo import TaskRunner
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role, _timer, core_algos, reduce_metrics
from verl.trainer.ppo.utils import need_critic, need_reference_policy, need_reward_model
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, should_save_ckpt_esi
from verl.utils.debug import GPUMemoryLogger, marked_timer
from verl.utils.profiler import DistProfiler, DistProfilerExtension
from verl.utils.rollout_skip import RolloutSkip
from verl.workers.fsdp_workers import ActorRolloutRefWorker


class ProfiledActor(ActorRolloutRefWorker, DistProfilerExtension):
    """An actor whose updates are marked and timed."""

    def __init__(self, config, role, **kwargs):
        super().__init__(config, role, **kwargs)
        DistProfilerExtension.__init__(self, DistProfiler(rank=self.rank))
        self.kl_coef = config.get("my_coef", 0.0)

    @GPUMemoryLogger(role="actor")
    @DistProfiler.annotate(color="red", role="update")
    def my_updates(self):
        return self.kl_coef


class OwnWorkers(RayPPOTrainer):
    """Starts the worker groups as recipes do, from the sections of hydra's tree; the loop is the trainer's."""

    def init_workers(self):
        self.resource_pool_manager.create_resource_pool()
        classes = {pool: {} for pool in self.resource_pool_manager.resource_pool_dict.values()}
        make, controller = self.controller.ClassWithInitArgs, self.controller
        pool = self.resource_pool_manager.get_resource_pool(Role.ActorRollout)
        classes[pool]["actor_rollout"] = make(
            cls=self.role_worker_mapping[Role.ActorRollout],
            config=self.config.actor_rollout_ref,
            role="actor_rollout",
        )
        if self.use_critic:
            pool = self.resource_pool_manager.get_resource_pool(Role.Critic)
            classes[pool]["critic"] = make(cls=self.role_worker_mapping[Role.Critic], config=self.config.critic)
        if self.use_reference_policy:
            pool = self.resource_pool_manager.get_resource_pool(Role.RefPolicy)
            classes[pool]["ref"] = make(
                self.role_worker_mapping[Role.RefPolicy], config=self.config.actor_rollout_ref, role="ref"
            )
        groups = {}
        for pool, class_dict in classes.items():
            worker_dict_cls = controller.create_colocated_worker_cls(class_dict=class_dict)
            group = self.ray_worker_group_cls(
                resource_pool=pool, ray_cls_with_init=worker_dict_cls, device_name=self.device_name
            )
            groups.update(group.spawn(prefix_set=class_dict.keys()))
        if self.use_critic:
            self.critic_wg = groups["critic"]
            self.critic_wg.init_model()
        if self.use_reference_policy:
            self.ref_policy_wg = groups["ref"]
            self.ref_policy_wg.init_model()
        self.actor_rollout_wg = groups["actor_rollout"]
        self.actor_rollout_wg.init_model()


class Skipping(OwnWorkers):
    """A loop of its own over kept rollouts."""

    def fit(self):
        self._start_profiling(True)
        skip = RolloutSkip(self.config, self.actor_rollout_wg)
        skip.wrap_generate_sequences()
        assert find_latest_ckpt_path(self.config.trainer.default_local_dir) is None and not should_save_ckpt_esi(1.0)
        self.texts, timing = [], {}
        for rows in self.train_dataloader:
            batch = self.first_batch(rows)
            with _timer("gen", timing), marked_timer("twice", timing, color="red"):
                output = self.actor_rollout_wg.generate_sequences(batch)
            self._stop_profiling(do_profile=True)
            self.texts.append(output.batch["responses"].tolist())
            return timing

    def first_batch(self, rows):
        from verl import DataProto

        batch = DataProto.from_single_dict(rows)
        return batch.pop(["input_ids", "attention_mask", "position_ids"], non_tensor_batch_keys=["raw_prompt_ids"])


class MyTaskRunner(TaskRunner):
    """Another actor class, and a key of its own in the tree."""

    def add_actor_rollout_worker(self, config):
        assert config.my_project.note == "ours"
        cls, group_cls = super().add_actor_rollout_worker(config)
        assert issubclass(ProfiledActor, cls)
        self.role_worker_mapping[Role.ActorRollout] = ProfiledActor
        return ProfiledActor, group_cls

    def run(self, config):
        roles = {Role.ActorRollout: object, Role.RefPolicy: object}
        assert not need_critic(config) and need_reference_policy(roles) and not need_reward_model(roles)
        assert need_reference_policy(config) == config.actor_rollout_ref.actor.use_kl_loss
        with open_dict(config):
            config.my_project.seen = OmegaConf.to_container(config.trainer, resolve=True)["total_training_steps"]
        super().run(config)
        said = ("RAN", config.my_project.seen, core_algos.AdvantageEstimator.GRPO.value, reduce_metrics({"x": [1, 3]}))
        print(*said)
        Path(config.trainer.default_local_dir, "ran.txt").write_text(" ".join(map(str, said)))


def own_pools(config):
    """The pools of a script, by verl's constructor."""
    spec = {"pool": [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
    roles = (Role.ActorRollout, Role.Critic, Role.RefPolicy)
    return ResourcePoolManager(resource_pool_spec=spec, mapping={role: "pool" for role in roles})
