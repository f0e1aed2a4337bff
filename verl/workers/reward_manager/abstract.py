"""What every reward manager is: a batch of responses in, a number per response out."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from verl.protocol import DataProto
from verl.utils.reward_functions.calling import RawRewardFn


class RewardError(RuntimeError):
    """A reward function failed or returned no usable number; the message names the sample and what to do."""


class AbstractRewardManager(ABC):
    """Turns responses into token-level rewards.

    Chosen by ``reward_model.reward_manager``; register your own with ``@register("name")``. It is built once for
    training and once for validation.

    Args:
        tokenizer: decodes responses.
        num_examine: how many samples of each data source to print per batch (0 in training, 1 in validation).
        compute_score: the reward function; ``None`` for the built-in rules of ``verl.utils.reward_score``.
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
