"""Interface of reward managers, a batch of responses in and a number per response out; and the managers by name."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from verl.protocol import DataProto
from verl.rewards.functions.calling import RawRewardFn
from verl.utils.py_functional import nearest_name

__all__ = ["get_reward_manager_cls", "register"]


class RewardError(RuntimeError):
    """A reward function failed or returned no usable number; the message names the sample and what to do."""


class AbstractRewardManager(ABC):
    """Turns responses into token-level rewards.

    Chosen by ``reward_model.reward_manager``; register your own with ``@register("name")``. It is built once for
    training and once for validation.

    Args:
        tokenizer: decodes responses.
        num_examine: how many samples of each data source to print per batch (0 in training, 1 in validation).
        compute_score: the reward function; ``None`` for the built-in rules of ``verl.rewards.scorers``.
        reward_fn_key: the column that names a row's data source (``data.reward_fn_key``).
        reward_kwargs: everything under ``reward_model.reward_kwargs``.
    """

    @abstractmethod
    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ):
        pass

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Score every response of the batch, R = response length.

        Returns:
            (B, R) float32 with the score on the last token of the response and zero elsewhere; with ``return_dict``
            ``{"reward_tensor": that, "reward_extra_info": {name: list of B values}}``.
        """


# -- Reward managers by the name they have in ``reward_model.reward_manager`` ----------------------------------------


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
            "verl.rewards.managers.register."
        )
    return REWARD_MANAGER_REGISTRY[name]
