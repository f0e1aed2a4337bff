"""Online DPO: the best and the worst response to a prompt are a preference pair, and the reference follows the policy.

Chosen and rejected are both the policy's own, told apart by the reward. With SPIN's data (Chen et al. 2024,
arXiv:2401.01335) the chosen one is a human's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from verl.algorithms.advantages.common import Groups
from verl.algorithms.losses.preference import PairwiseLoss, best_and_worst, dpo_loss, ipo_loss, of_difference
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.experience import response_column
from verl.trainer.ppo.job import PPOJob
from verl.trainer.ppo.placement import Role, default_roles
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.workers.roles import ActorRolloutRefWorker


class SpinWorker(ActorRolloutRefWorker):
    """Policy, rollout and reference, whose update is that of DPO."""

    def init_policy(self) -> None:
        """Load the policy; its loss is that of ``actor.dpo_loss_type``."""
        super().init_policy()
        actor = self.config.actor
        pair_loss = partial(ipo_loss, beta=actor.dpo_beta)
        if actor.dpo_loss_type == "sigmoid":
            pair_loss = partial(dpo_loss, beta=actor.dpo_beta, label_smoothing=actor.dpo_label_smoothing)
        self.ppo_loss = PairwiseLoss(of_difference(pair_loss), scale=actor.dpo_beta)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def refresh_reference(self) -> None:
        """Copy the policy's weights to the reference; both are in this process, sharded alike."""
        reference = self.fused_worker_dict["ref"].reference
        with self.actor.on_device(), reference.on_device(), torch.no_grad():
            own = dict(self.actor.module.named_parameters())
            for name, weight in reference.module.named_parameters():
                weight.copy_(own[name])
        reference.version += 1


class SpinTrainer(RayPPOTrainer):
    """PPO's loop with another update.

    Raises:
        ValueError: the rows of a pair could come apart, or the reference cannot follow the policy.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        shared = self.config.actor_rollout_ref
        if shared.actor.shuffle:
            raise ValueError(
                "actor_rollout_ref.actor.shuffle=true puts the two rows of a pair into different optimizer steps. "
                "Set it to false."
            )
        frequency = self.config.trainer.ref_update_freq
        if frequency and (self.ref_in_actor or shared.actor.strategy == "deepspeed"):
            what = "lora_rank" if self.ref_in_actor else "strategy=deepspeed"
            raise ValueError(
                f"trainer.ref_update_freq={frequency} copies the policy's weights to the reference, and cannot do so "
                f"with {what}. Set trainer.ref_update_freq=0 to keep the initial model, or train whole weights with "
                "fsdp2."
            )

    def improve(self, batch: DataProto) -> None:
        """Raise the best response of each group above its worst, relative to the reference."""
        scores = response_column(batch, "token_level_rewards").sum(-1)
        groups = Groups(batch.non_tensor_batch["uid"], scores.device).group
        counts = response_column(batch, "response_mask").any(-1)  # not what was taken out of the loss
        pairs = torch.zeros(len(batch), dtype=torch.int64)
        pairs[counts] = best_and_worst(scores[counts], groups[counts])
        batch.put("pairs", pairs)
        self.metrics["spin/pairs_per_prompt"] = (pairs > 0).sum().item() / len(groups.unique())
        super().improve(batch)
        frequency = self.config.trainer.ref_update_freq
        if frequency and self.global_steps % frequency == 0:
            self.actor_wg.refresh_reference()

    def load_checkpoint(self) -> None:
        """Continue as ever; the reference is the policy of the checkpoint, where it was when that was written.

        Raises:
            ValueError: it was another then, which no checkpoint holds.
        """
        super().load_checkpoint()
        frequency = self.config.trainer.ref_update_freq
        if not frequency or not self.global_steps:
            return
        if self.global_steps % frequency:
            raise ValueError(
                f"trainer.ref_update_freq={frequency}: the reference of step {self.global_steps} is the policy of an "
                f"earlier one, and checkpoints hold the policy alone. Resume from a multiple of {frequency} "
                "(trainer.resume_from_path), and make trainer.save_freq one."
            )
        self.actor_wg.refresh_reference()


class SpinJob(PPOJob):
    """The main job with these workers and this trainer."""

    trainer_cls = SpinTrainer

    def __init__(self, config: Any, command_line: Any = None) -> None:
        super().__init__(config, command_line)
        policy = (Role.ActorRollout, Role.RefPolicy)
        self.roles = {role: SpinWorker if role in policy else cls for role, cls in default_roles(config).items()}
