"""Public address of the workers. The backend is the engine's choice (``strategy``), so one set serves them all."""

from verl.workers.reward_model import RewardModelWorker
from verl.workers.roles import ActorRolloutRefWorker, CriticWorker

AsyncActorRolloutRefWorker = ActorRolloutRefWorker

__all__ = ["ActorRolloutRefWorker", "AsyncActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"]
