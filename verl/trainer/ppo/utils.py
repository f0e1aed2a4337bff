"""What a configuration needs: which roles take part in a run, and under which names."""

from __future__ import annotations

import os
from collections.abc import Mapping
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

    @classmethod
    def from_string(cls, name: str) -> Role:
        """The role whose worker group goes by ``name``."""
        for role, known in _ROLE_NAMES.items():
            if name == known:
                return role
        raise ValueError(f"no role is called {name!r}; there are {', '.join(_ROLE_NAMES.values())}.")


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
    enabled = config.critic.get("enable", None)
    return config.algorithm.adv_estimator == "gae" if enabled is None else bool(enabled)


def need_reference_policy(role_worker_mapping: Any) -> bool:
    """A reference takes part when the KL to it enters the reward or the loss.

    Args:
        role_worker_mapping: the whole config; or the roles of a script, which has one when they name a RefPolicy.
    """
    if _are_roles(role_worker_mapping):
        return Role.RefPolicy in role_worker_mapping
    config = role_worker_mapping
    return bool(
        config.algorithm.get("use_kl_in_reward", False) or config.actor_rollout_ref.actor.get("use_kl_loss", False)
    )


def _are_roles(mapping: Any) -> bool:
    return isinstance(mapping, Mapping) and all(isinstance(role, Role) for role in mapping)


def need_ref_log_prob(config: Any) -> bool:
    """The reference scores the sampled tokens, unless only the full KL is wanted, which the update computes itself."""
    actor = config.actor_rollout_ref.actor
    in_loss = actor.use_kl_loss and actor.kl_loss_type != "full"
    return bool(config.algorithm.use_kl_in_reward or in_loss)


def ref_in_actor(config: Any) -> bool:
    """The reference is the actor without its LoRA adapter, unless ``ref.model`` names another."""
    shared = config.actor_rollout_ref
    return bool(need_reference_policy(config) and shared.model.lora_rank and not (shared.ref.model or {}).get("path"))


def need_reward_model(role_worker_mapping: Any) -> bool:
    """A reward model takes part when ``reward_model.enable`` is set.

    Args:
        role_worker_mapping: the whole config; or the roles of a script, which has one when they name a RewardModel.
    """
    if _are_roles(role_worker_mapping):
        return Role.RewardModel in role_worker_mapping
    return bool(role_worker_mapping.reward_model.get("enable", False))


def get_ppo_ray_runtime_env() -> dict[str, Any]:
    """What a script may give ``ray.init`` as ``runtime_env``: variables that this process does not set."""
    quiet = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "VLLM_LOGGING_LEVEL": "WARN"}
    return {"env_vars": {name: value for name, value in quiet.items() if name not in os.environ}}
