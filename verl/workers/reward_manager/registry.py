"""Reward managers by the name they have in ``reward_model.reward_manager``."""

from collections.abc import Callable

from verl.utils.py_functional import nearest_name
from verl.workers.reward_manager.abstract import AbstractRewardManager

__all__ = ["get_reward_manager_cls", "register"]

REWARD_MANAGER_REGISTRY: dict[str, type[AbstractRewardManager]] = {}


def register(name: str) -> Callable[[type], type]:
    """Class decorator: make a reward manager known under ``name``.

    Raises:
        ValueError: another class has the name.
    """

    def enter(cls: type) -> type:
        known = REWARD_MANAGER_REGISTRY.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"Reward manager name {name!r} belongs to {known.__module__}.{known.__qualname__}: register "
                f"{cls.__qualname__} under another."
            )
        REWARD_MANAGER_REGISTRY[name] = cls
        return cls

    return enter


def get_reward_manager_cls(name: str) -> type[AbstractRewardManager]:
    """The class registered under ``name``.

    Raises:
        ValueError: there is none; lists the known names.
    """
    if name not in REWARD_MANAGER_REGISTRY:
        raise ValueError(
            f"reward_model.reward_manager={name!r} is not known; known are {', '.join(REWARD_MANAGER_REGISTRY)}."
            f"{nearest_name(name, REWARD_MANAGER_REGISTRY)} Register your own with "
            "verl.workers.reward_manager.register."
        )
    return REWARD_MANAGER_REGISTRY[name]
