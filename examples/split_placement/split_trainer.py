"""PPO with the critic on devices of its own: a pool of devices each, and a map from roles to pools."""

from __future__ import annotations

from typing import Any

from verl.config.base import ConfigError
from verl.protocol import DataProto
from verl.single_controller.background import run_concurrently
from verl.trainer.ppo.job import PPOJob
from verl.trainer.ppo.placement import ResourcePoolManager, Role, default_roles
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.rollout_correction import reject_tokens

POLICY, CRITIC = "policy_pool", "critic_pool"


class SplitTrainer(RayPPOTrainer):
    """PPO whose two updates run side by side."""

    def improve(self, batch: DataProto) -> None:
        """Fit the critic to the returns while the policy moves along the advantages."""
        self.recorder.before_update(self)
        self.metrics.update(reject_tokens(batch, self.correction))
        batch.meta_info["global_steps"] = self.global_steps
        updates = [lambda: self.critic_wg.update_critic(batch)]
        if self.updates_actor:
            updates.append(lambda: self.actor_wg.update_actor(batch))
        with self.timed("update_actor_and_critic"):
            for result in run_concurrently(*updates):
                self.record(result)


class SplitJob(PPOJob):
    """The main job on two pools of ``trainer.n_gpus_per_node`` devices of each node."""

    trainer_cls = SplitTrainer

    def __init__(self, config: Any, command_line: Any = None) -> None:
        super().__init__(config, command_line)
        actor = config.actor_rollout_ref.actor
        if config.algorithm.use_pf_ppo or actor.skip_old_log_probs or actor.difficulty_loss_weight:
            raise ConfigError(
                [
                    "algorithm.use_pf_ppo, actor.skip_old_log_probs and actor.difficulty_loss_weight are not read by "
                    "the update of examples/split_placement. Leave them out, or run verl.trainer.main_ppo."
                ]
            )
        self.roles = default_roles(config)
        devices = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
        mapping = {role: CRITIC if role is Role.Critic else POLICY for role in self.roles}
        self.pools = ResourcePoolManager({POLICY: devices, CRITIC: devices}, mapping)
