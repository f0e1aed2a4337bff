"""Public address of the workers. The backend is the engine's choice (``strategy``), so one set serves them all."""

from verl.utils.fsdp_utils import create_device_mesh, get_sharding_strategy
from verl.workers.reward_model import RewardModelWorker
from verl.workers.roles import ActorRolloutRefWorker, CriticWorker

AsyncActorRolloutRefWorker = ActorRolloutRefWorker

__all__ = [
    "ActorRolloutRefWorker",
    "AsyncActorRolloutRefWorker",
    "CriticWorker",
    "RewardModelWorker",
    "create_device_mesh",
    "get_sharding_strategy",
]
