"""From the config to a reward function and its manager, and from a batch to its rewards."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_users_modules, load_extern_type
from verl.utils.py_functional import convert_to_regular_types
from verl.utils.reward_score import built_in_options, default_compute_score
from verl.workers.reward_manager import get_reward_manager_cls
from verl.workers.reward_manager.abstract import AbstractRewardManager, RawRewardFn

__all__ = ["compute_reward", "get_custom_reward_fn", "load_reward_manager"]

logger = logging.getLogger(__name__)


def get_custom_reward_fn(config: Any) -> RawRewardFn | None:
    """The function of ``custom_reward_function.{path,name}`` with its ``reward_kwargs`` bound, or ``None``.

    The file may import its neighbours, with or without a leading dot, and may hold an ``async def`` function.

    Raises:
        FileNotFoundError: no such file.
        RuntimeError: the file fails while it is loaded.
        AttributeError: it has no such function.
    """
    section = config.get("custom_reward_function", None) or {}
    path = section.get("path", None)
    if not path:
        return None
    function = load_extern_type(copy_to_local(path), section.get("name", None) or "compute_score")
    reward_kwargs = convert_to_regular_types(section.get("reward_kwargs", None) or {})
    return functools.partial(function, **reward_kwargs) if reward_kwargs else function


def get_built_in_reward_fn(config: Any) -> RawRewardFn | None:
    """The built-in scorers with ``reward_model.sandbox_fusion`` and ``reward_model.judge``; None: as they are."""
    options = built_in_options(config.reward_model)
    return functools.partial(default_compute_score, **options) if options else None


def load_reward_manager(
    config: Any, tokenizer: Any, num_examine: int, **reward_kwargs: Any
) -> AbstractRewardManager | Callable:
    """The reward manager of ``reward_model.reward_manager`` around the user's function or the built-in rules.

    Args:
        num_examine: how many samples of each data source it prints per batch.
        reward_kwargs: for the manager, on top of ``reward_model.reward_kwargs``.
    """
    section = config.reward_model
    import_users_modules(_external_lib(config))
    manager_cls = get_reward_manager_cls(section.get("reward_manager", "naive"))
    kwargs = {**convert_to_regular_types(section.get("reward_kwargs", None) or {}), **reward_kwargs}
    on_error = section.get("on_error", None) or "stop"
    if "on_error" in inspect.signature(manager_cls).parameters:
        kwargs.setdefault("on_error", on_error)
    elif on_error != "stop":
        logger.warning(
            "reward_model.on_error=%s has no effect: reward manager %s does not take it.",
            on_error,
            manager_cls.__name__,
        )
    return manager_cls(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=get_custom_reward_fn(config) or get_built_in_reward_fn(config),
        reward_fn_key=config.data.get("reward_fn_key", "data_source"),
        **kwargs,
    )


def _external_lib(config: Any) -> str | None:
    model = (config.get("actor_rollout_ref", None) or {}).get("model", None) or {}
    return model.get("external_lib", None)


def compute_reward(data: DataProto, reward_fn: Callable) -> tuple[Tensor, dict[str, list]]:
    """Rewards (B, R) of a batch, and the extra columns the reward function reports: name -> list of B values.

    An error of the reward function is not caught.

    Raises:
        ValueError: the manager's rewards are not of shape (B, R), or not finite.
    """
    if _takes_return_dict(reward_fn):
        result = reward_fn(data, return_dict=True)
    else:
        result = reward_fn(data)
    extra: dict[str, list] = {}
    if isinstance(result, Mapping):
        result, extra = result["reward_tensor"], dict(result.get("reward_extra_info", None) or {})
    _check(result, data, type(reward_fn).__name__)
    return result, extra


def _takes_return_dict(reward_fn: Callable) -> bool:
    try:
        inspect.signature(reward_fn).bind(None, return_dict=True)
    except TypeError:
        return False
    return True


def _check(rewards: Any, data: DataProto, manager: str) -> None:
    shape = tuple(data.ragged("responses").shape) if "rm_scores" not in data.keys() else tuple(rewards.shape)
    if not isinstance(rewards, Tensor) or tuple(rewards.shape) != shape:
        kind = f"a tensor of shape {tuple(rewards.shape)}" if isinstance(rewards, Tensor) else type(rewards).__name__
        raise ValueError(
            f"Reward manager {manager} returned {kind} for {len(data)} responses: it must be a tensor of shape "
            f"{shape}, one row per response and one column per response token."
        )
    if not torch.isfinite(rewards.sum()):
        rows = (~torch.isfinite(rewards)).any(-1).nonzero()[:, 0].tolist()
        raise ValueError(f"Reward manager {manager} returned rewards that are not finite, in rows {rows[:10]}.")
