"""What a configuration needs: which roles take part in a run, and under which names."""

from __future__ import annotations

from enum import Enum
from typing import Any


class Role(Enum):
    """Parts a worker can play. ``str(role)`` is the name its worker group goes by."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6

    def __str__(self) -> str:
        return _ROLE_NAMES[self]


_ROLE_NAMES = {
    Role.Actor: "actor",
    Role.Rollout: "rollout",
    Role.ActorRollout: "actor_rollout",
    Role.Critic: "critic",
    Role.RefPolicy: "ref",
    Role.RewardModel: "rm",
    Role.ActorRolloutRef: "actor_rollout_ref",
}

WorkerType = type


def need_critic(config: Any) -> bool:
    """A critic takes part when ``critic.enable`` says so, and otherwise exactly when the estimator is GAE."""
    if config.critic.enable is not None:
        return bool(config.critic.enable)
    return config.algorithm.adv_estimator == "gae"


def need_reference_policy(config: Any) -> bool:
    """A reference takes part when the KL to it enters the reward or the loss."""
    return bool(config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss)


def need_ref_log_prob(config: Any) -> bool:
    """The reference scores the sampled tokens, unless only the full KL is wanted, which the update computes itself."""
    actor = config.actor_rollout_ref.actor
    in_loss = actor.use_kl_loss and actor.kl_loss_type != "full"
    return bool(config.algorithm.use_kl_in_reward or in_loss)


def ref_in_actor(config: Any) -> bool:
    """The reference is the actor without its LoRA adapter, unless ``ref.model`` names another."""
    shared = config.actor_rollout_ref
    return bool(need_reference_policy(config) and shared.model.lora_rank and not (shared.ref.model or {}).get("path"))


def need_reward_model(config: Any) -> bool:
    """A reward model takes part when ``reward_model.enable`` is set."""
    return bool(config.reward_model.enable)
