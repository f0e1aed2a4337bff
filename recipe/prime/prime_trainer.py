"""PRIME: process rewards without process labels, from a model that learns outcomes beside the policy.

The process reward model is a language model in the critic's place: placed, trained and saved as a critic is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from recipe.prime.prime_algos import ImplicitRewardLoss, batch_norm
from verl.batch.windows import register_ragged_column
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.experience import put_response_column, response_column
from verl.trainer.ppo.job import PPOJob
from verl.trainer.ppo.placement import Role, default_roles
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.workers.engine import Want
from verl.workers.model_worker import model_spec
from verl.workers.roles import TOKENS, UPDATE_COLUMNS, CriticWorker

REFERENCE = "prime_ref_log_probs"
register_ragged_column(REFERENCE, "response")


class ImplicitRewardWorker(CriticWorker):
    """The process reward model and its frozen reference, with a critic's verbs."""

    def init_critic(self) -> None:
        """Load both models, with their language model heads, and build the loss."""
        config = self.config
        spec = model_spec(config.model, config.model.fsdp_config, "lm", remove_padding=config.model.use_remove_padding)
        self.critic = self.model_engine(spec, config, mesh="critic", train=True)
        frozen = replace(spec, path=config.prime.ref_path or spec.path, lora=None)
        self.reference = self.model_engine(frozen, config, mesh="reference", train=False)
        self.value_loss = ImplicitRewardLoss(config.prime.beta)
        path = config.model.tokenizer_path or config.model.path
        self.checkpoint_manager(self.critic, path, config.checkpoint, config.model.trust_remote_code)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="reference", reads=TOKENS)
    def compute_reference(self, data: DataProto) -> DataProto:
        """Score the responses under the reference: adds ``prime_ref_log_probs`` (B, R)."""
        with self.ledger.phase("values"), self.reference.on_device():
            return self.reference.infer(data, Want.LOG_PROBS, self.config.forward_split).rename("log_probs", REFERENCE)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="critic", reads=TOKENS, balanced=True)
    def compute_values(self, data: DataProto) -> DataProto:
        """Score the responses under the process reward model: adds ``values`` (B, R), their log-probabilities."""
        with self.ledger.phase("values"), self.critic.on_device():
            return self.critic.infer(data, Want.LOG_PROBS, self.config.forward_split).rename("log_probs", "values")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="critic", reads=(*UPDATE_COLUMNS, REFERENCE), balanced=True)
    def update_critic(self, data: DataProto) -> DataProto:
        """Learn the outcomes of the batch; returns metrics only."""
        return super().update_critic(data)


class PrimeTrainer(RayPPOTrainer):
    """PPO's loop, in which process rewards come where values would.

    Raises:
        ValueError: ``critic.enable`` is off.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if not self.use_critic:
            raise ValueError("critic.enable=false leaves PRIME without its process reward model. Set it to true.")
        self.use_critic = False  # the loop's own use of a critic: values, and an update from returns

    @property
    def updates_actor(self) -> bool:
        """Not while only the process reward model learns."""
        return self.global_steps > self.config.trainer.critic_warmup

    def evaluate(self, batch: DataProto) -> DataProto:
        """As PPO, and add ``rm_scores`` (B, R), the process rewards."""
        batch = super().evaluate(batch)
        mask = response_column(batch, "response_mask")
        labels = (response_column(batch, "token_level_scores") * mask).sum(-1)
        if labels.min() < 0 or labels.max() > 1:
            raise ValueError(
                f"the rewards of step {self.global_steps} lie between {labels.min():g} and {labels.max():g}, and the "
                "process reward model learns the probability of success. Have the reward function return 0 to 1."
            )
        with self.timed("process_rewards"):
            batch = batch.union(self.critic_wg.compute_reference(batch))
            if self.config.critic.prime.update == "before":
                self.record(self.critic_wg.update_critic(batch))
            scores = self.critic_wg.compute_values(batch)
            rewards = response_column(scores, "values") - response_column(batch, REFERENCE)
            rewards = self.config.critic.prime.beta * torch.where(mask != 0, rewards, 0)
            self.metrics["critic/process_reward/mean"] = rewards.sum(-1).mean().item()
            if self.config.critic.prime.norm == "batch_norm":
                rewards = batch_norm(rewards, mask)
            put_response_column(batch, "rm_scores", rewards)
        return batch

    def improve(self, batch: DataProto) -> None:
        """Move the policy; with ``update=after`` let the process reward model learn the outcomes now."""
        super().improve(batch)
        if self.config.critic.prime.update == "after":
            with self.timed("update_critic"):
                self.record(self.critic_wg.update_critic(batch))


class PrimeJob(PPOJob):
    """The main job with this trainer, and a process reward model for a critic."""

    trainer_cls = PrimeTrainer

    def __init__(self, config: Any, command_line: Any = None) -> None:
        super().__init__(config, command_line)
        roles = default_roles(config)
        self.roles = {role: ImplicitRewardWorker if role is Role.Critic else cls for role, cls in roles.items()}
