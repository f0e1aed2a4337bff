"""Roles that take part in a run, their resource pools, and the worker groups that play them.

Roles that share a resource pool share its processes: rank r of each lives in process r and they take turns on its
device. Knows worker groups and pools, not what the roles do.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from verl.config.model_info import read_model
from verl.config.ppo import PPOConfig
from verl.single_controller import get_controller
from verl.trainer.launch import check_device, start_controller, stopped_at_end
from verl.trainer.ppo.profiles import nsight_options
from verl.utils.config import typed_config
from verl.utils.process import no_collection


class Role(Enum):
    """Parts a worker can play. ``str(role)`` is the name its worker group goes by."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6
    Teacher = 7

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
    Role.Teacher: "teacher",
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


def need_ref_log_prob(config: PPOConfig) -> bool:
    """The reference scores the sampled tokens, unless only the full KL is needed, which the update computes itself."""
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
    section = role_worker_mapping.reward_model
    return bool(section.get("enable", False)) and not section.get("server_urls", None)


def get_ppo_ray_runtime_env() -> dict[str, Any]:
    """Return a ``runtime_env`` for a script's ``ray.init``: variables that this process does not set."""
    quiet = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "VLLM_LOGGING_LEVEL": "WARN"}
    return {"env_vars": {name: value for name, value in quiet.items() if name not in os.environ}}


# -- resource pools and worker groups ---------------------------------------------------------------------------------


GLOBAL_POOL = "global_pool"


ROLLOUT_POOL = "rollout_pool"


TEACHER_POOL = "teacher_pool"


REWARD_POOL = "reward_pool"


@dataclass
class ResourcePoolManager:
    """Pools by name, and the pool each role runs on.

    Args:
        resource_pool_spec: pool name -> processes on each node, e.g. ``{"global_pool": [8, 8]}``.
        mapping: role -> pool name.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    resource_pool_dict: dict[str, Any] = field(default_factory=dict)
    controller: Any = None
    """Controller that creates the pools; the trainer sets its own. None: Ray."""

    def create_resource_pool(self, controller: Any = None) -> None:
        """Make the pools with ``controller``'s class; a role mapped to an unknown pool is an error."""
        controller = controller or self.controller or get_controller("ray")
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                raise ValueError(
                    f"role {role} is mapped to resource pool {pool!r}, which does not exist. "
                    f"Known pools: {', '.join(self.resource_pool_spec)}. Name one of them, or add it to the spec."
                )
        first_device = 0
        for name, processes in self.resource_pool_spec.items():
            pool = controller.ResourcePool(process_on_nodes=processes, max_colocate_count=1)
            pool.concurrent, pool.first_device = self.get_n_gpus() - pool.world_size, first_device
            first_device += max(processes)
            self.resource_pool_dict[name] = pool

    def get_resource_pool(self, role: Role) -> Any:
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Processes (one per device) over all pools."""
        return sum(sum(processes) for processes in self.resource_pool_spec.values())


def needed_roles(config: Any) -> list[Role]:
    """The roles ``config`` needs."""
    config = typed_config(config)
    roles = [Role.ActorRollout] if config.actor_rollout_ref.hybrid_engine else [Role.Actor, Role.Rollout]
    if need_reference_policy(config) and not ref_in_actor(config):
        roles.append(Role.RefPolicy)
    if need_critic(config):
        roles.append(Role.Critic)
    if config.reward_model.runs_server or need_reward_model(config):
        roles.append(Role.RewardModel)
    if config.distillation.enabled:
        roles.append(Role.Teacher)
    return roles


def default_roles(config: Any) -> dict[Role, type]:
    """The roles ``config`` needs and the worker class of each."""
    from verl.workers.disjoint import ActorWorker, RolloutWorker
    from verl.workers.reward_model import RewardModelWorker
    from verl.workers.roles import ActorRolloutRefWorker, CriticWorker
    from verl.workers.teacher import TeacherWorker

    config = typed_config(config)
    classes: dict[Role, type] = {
        Role.ActorRollout: ActorRolloutRefWorker,
        Role.Actor: ActorWorker,
        Role.Rollout: RolloutWorker,
        Role.RefPolicy: ActorRolloutRefWorker,
        Role.Critic: CriticWorker,
        Role.RewardModel: RewardModelWorker,
        Role.Teacher: TeacherWorker,
    }
    if config.reward_model.runs_server:
        from verl.workers.reward_server import RewardServerWorker  # imports aiohttp

        classes[Role.RewardModel] = RewardServerWorker
    return {role: classes[role] for role in needed_roles(config)}


def default_pools(config: Any, roles: Iterable[Role]) -> ResourcePoolManager:
    """One pool of all devices, shared by all roles; rollout, teachers and reward model may have one each."""
    config = typed_config(config)
    spec = {GLOBAL_POOL: [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
    mapping = dict.fromkeys(roles, GLOBAL_POOL)
    if Role.Rollout in roles:
        spec[ROLLOUT_POOL] = config.rollout_processes
        mapping[Role.Rollout] = ROLLOUT_POOL
    if Role.Teacher in roles and config.teacher_processes:
        spec[TEACHER_POOL] = config.teacher_processes
        mapping[Role.Teacher] = TEACHER_POOL
    if Role.RewardModel in roles and config.reward_model.own_processes:
        spec[REWARD_POOL] = config.reward_model.own_processes
        mapping[Role.RewardModel] = REWARD_POOL
    return ResourcePoolManager(resource_pool_spec=spec, mapping=mapping)


_IMPORTED_AHEAD = ("verl.workers.roles", "transformers.models.auto.modeling_auto")
"""What every worker that has a model imports."""


@contextmanager
def workers_ahead(config: Any) -> Iterator[None]:
    """With Ray, start the worker processes before the driver loads its modules and data; both load side by side.

    The trainer of the block finds them when it starts its worker groups. Left to the trainer where the configuration
    alone does not say what to start: images, for which Ray's object store must have room, are counted in the data, and
    a profiler starts the processes itself.
    """
    config = typed_config(config)
    model = read_model(config.actor_rollout_ref.model.path) if config.trainer.controller == "ray" else None
    if model is None or model.is_multimodal or config.profile_plan.is_on or config.reward_model.shares_devices:
        yield
        return
    check_device(config.trainer, config.processes_beside)
    roles = [role for role in needed_roles(config) if role != Role.RewardModel or config.reward_model.has_workers]
    manager = default_pools(config, roles)
    pools = [
        (processes, [str(role) for role in roles if manager.mapping[role] == pool])
        for pool, processes in manager.resource_pool_spec.items()
    ]
    with begun_workers(config, pools, _IMPORTED_AHEAD, config.batch_bytes()):
        yield


@contextmanager
def begun_workers(
    config: Any, pools: Sequence[tuple[Sequence[int], Sequence[str]]], modules: Sequence[str], batch_bytes: int = 0
) -> Iterator[None]:
    """Start Ray and the actors of ``pools`` before the block, which loads while they do; its trainer finds them.

    Args:
        config: a tree with ``trainer`` and ``ray_init``.
        pools: processes on each node, and the names of the roles in them.
        modules: what the roles import.
        batch_bytes: of the largest batch.
    """
    controller = get_controller("ray")
    with stopped_at_end(controller):
        with no_collection():
            start_controller(controller, config.ray_init, batch_bytes)
            controller.begin(pools, config.trainer.device, modules)
        yield


def start_worker_groups(
    config: PPOConfig,
    roles: Mapping[Role, type],
    pools: ResourcePoolManager,
    controller: Any,
    total_training_steps: int,
    device: str,
    worker_group_cls: type | None = None,
) -> dict[Role, Any]:
    """Start the processes and return one worker group a role; the models are not loaded yet.

    A critic, reference, reward model or teacher in ``roles`` that ``config`` does not use is not started.
    """
    has_reference = need_reference_policy(config) and not ref_in_actor(config)
    needed = {
        Role.Critic: need_critic(config),
        Role.RefPolicy: has_reference,
        Role.RewardModel: config.reward_model.has_workers,
        Role.Teacher: config.distillation.enabled,
    }
    if needed[Role.RewardModel] and Role.RewardModel not in roles:
        raise ValueError(
            "reward_model.enable=true, and role_worker_mapping names no worker for Role.RewardModel. Map it to "
            "verl.workers.fsdp_workers.RewardModelWorker, and give it a pool."
        )
    if needed[Role.Teacher] and Role.Teacher not in roles:
        raise ValueError(
            "distillation.enabled=true, and role_worker_mapping names no worker for Role.Teacher. Map it to "
            "verl.workers.teacher.TeacherWorker, and give it the actor's pool."
        )
    roles = {role: cls for role, cls in roles.items() if needed.get(role, True)}
    pools.create_resource_pool(controller)
    sections = {Role.Critic: config.critic, Role.RewardModel: config.reward_model}
    rollout = config.actor_rollout_ref.rollout
    settings = {
        "device": device,
        "seed": config.trainer.seed,
        "total_training_steps": total_training_steps,
        "response_length": rollout.response_length,
        "sequence_length": rollout.max_model_len or rollout.prompt_length + rollout.response_length,
        "timeout_s": config.actor_rollout_ref.nccl_timeout,
        "tokenizer_path": config.data.tokenizer,
        "distillation": config.distillation if config.distillation.enabled else None,
    }
    by_pool: dict[str, dict[str, Any]] = {}
    for role, cls in roles.items():
        classes = controller.ClassWithInitArgs(cls, config=sections.get(role, config.actor_rollout_ref), role=str(role))
        parameters = inspect.signature(classes.cls).parameters  # a user's worker names what it takes
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        classes.kwargs.update((name, value) for name, value in settings.items() if takes_all or name in parameters)
        by_pool.setdefault(pools.mapping[role], {})[str(role)] = classes
    nsight = nsight_options(config.profile_plan, config.trainer.worker_nsight_options, config.trainer.default_local_dir)
    common = (pools, controller, config.trainer, device, settings, worker_group_cls, nsight)
    groups: dict[str, Any] = {}
    first: Role | None = None
    if config.reward_model.shares_devices:
        # in processes of its own, and before the others: it is asleep when they take their memory
        first, name = Role.RewardModel, pools.mapping[Role.RewardModel]
        pool = pools.resource_pool_dict[name]
        pool.max_colocate_count, pool.concurrent = 2, pool.concurrent + 1
        groups = start_groups({name: {str(first): by_pool[name].pop(str(first))}}, *common)
        pool.concurrent -= 1
    groups |= start_groups(by_pool, *common)
    return {role: groups[str(role)] for role in sorted(roles, key=lambda role: role is not first)}


def start_groups(
    by_pool: Mapping[str, Mapping[str, Any]],
    pools: ResourcePoolManager,
    controller: Any,
    trainer: Any,
    device: str,
    settings: Mapping[str, Any],
    worker_group_cls: type | None = None,
    nsight: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Start the processes of each pool with the roles that share it; returns a worker group a role.

    Args:
        by_pool: pool -> role -> its class with arguments.
        trainer: the ``trainer`` section.
        settings: arguments of the workers' constructors.
        nsight: options of ``nsys profile``, under which Ray starts the processes. Empty: they start without it.
    """
    groups: dict[str, Any] = {}
    for pool, classes in by_pool.items():
        host = controller.create_colocated_worker_cls(classes)
        group = (worker_group_cls or controller.WorkerGroup)(
            pools.resource_pool_dict[pool],
            host,
            ray_wait_register_center_timeout=trainer.ray_wait_register_center_timeout,
            timeout=trainer.worker_timeout,
            device_name=device,
            **({"worker_nsight_options": nsight, "profile_steps": [1]} if nsight else {}),
        )
        groups.update(group.spawn(prefix_set=classes.keys()))
    for group in groups.values():
        group.set_deadlines(trainer.deadlines)
        if hasattr(group, "configure"):  # a user's subclass may not have handed them on
            group.configure(settings)
            group.after_start = partial(group.configure, settings)
    return groups
