"""Reward managers: responses in, token-level rewards out."""

from verl.rewards.managers.built_in import BatchRewardManager, DAPORewardManager, NaiveRewardManager, PrimeRewardManager
from verl.rewards.managers.rule import AbstractRewardManager, RewardError, get_reward_manager_cls, register

__all__ = [
    "AbstractRewardManager",
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "RewardError",
    "get_reward_manager_cls",
    "register",
]
