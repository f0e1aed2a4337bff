"""From the config to a reward function and its manager, and from a batch to its rewards."""

import functools
import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.config.reward import RewardSandboxConfig
from verl.protocol import DataProto
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_users_modules, load_extern_type, split_file_name
from verl.utils.py_functional import convert_to_regular_types
from verl.utils.ragged import Ragged
from verl.utils.reward_score import default_compute_score
from verl.utils.sandbox.function import SandboxedFunction, sandboxed
from verl.utils.sandbox.limits import Limits
from verl.utils.sandbox.pool import Pool, Source
from verl.workers.reward_manager import get_reward_manager_cls
from verl.workers.reward_manager.abstract import AbstractRewardManager, RawRewardFn
from verl.workers.reward_manager.routing import BUILT_IN, BySource
from verl.workers.reward_manager.rule import REWARD_ERROR_KEY, REWARD_ERROR_KIND_KEY, RuleRewardManager

__all__ = ["compute_reward", "get_custom_reward_fn", "load_reward_manager", "start_reward_functions"]

logger = logging.getLogger(__name__)

_DEFAULT = Source(BUILT_IN, "default_compute_score")


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
    manager_cls = reward_manager_class(config)
    kwargs = {**convert_to_regular_types(section.get("reward_kwargs", None) or {}), **reward_kwargs}
    for name, default in (("on_error", "stop"), ("max_errors", None)):
        value = section.get(name, default)
        value = default if value is None else value
        if _takes(manager_cls, name):
            kwargs.setdefault(name, value)
        elif value != default:
            logger.warning(
                "reward_model.%s=%s has no effect: reward manager %s does not take it.",
                *(name, value, manager_cls.__name__),
            )
    return manager_cls(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=_reward_function(config, manager_cls),
        reward_fn_key=config.data.get("reward_fn_key", "data_source"),
        **kwargs,
    )


def reward_manager_class(config: Any) -> type:
    """The class that ``reward_model.reward_manager`` names; with ``file.py:Class`` the file's."""
    name = config.reward_model.get("reward_manager", None) or "naive"
    in_file = split_file_name(name)
    return load_extern_type(copy_to_local(in_file[0]), in_file[1]) if in_file else get_reward_manager_cls(name)


def start_reward_functions(config: Any) -> None:
    """Start the sandboxes of the reward functions, for them to be ready when `load_reward_manager` wants them."""
    if _wants_sandbox(config, reward_manager_class(config)):
        for source in {repr(source): source for source in _sources(config).values()}.values():
            _pool(config, source)


def _takes(manager_cls: type, name: str) -> bool:
    """Whether a class, or one it hands its keywords on to, has such an argument."""
    for cls in manager_cls.__mro__:
        if "__init__" in vars(cls):
            parameters = inspect.signature(cls.__init__).parameters
            if name in parameters:
                return True
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                return False
    return False


def _wants_sandbox(config: Any, manager_cls: type) -> bool:
    """Whether functions go to a sandbox: a manager that calls them by itself wants them in this process."""
    return _sandbox(config).enable and issubclass(manager_cls, RuleRewardManager)


def _sandbox(config: Any) -> RewardSandboxConfig:
    given = config.reward_model.get("sandbox", None)
    return given if given is not None else RewardSandboxConfig()


def _sources(config: Any) -> dict[str | None, Source]:
    """Where the functions are, by the pattern of the data sources they score; under None that of all others."""
    modules = _external_lib(config)
    section = config.get("custom_reward_function", None) or {}
    reward_kwargs = convert_to_regular_types(section.get("reward_kwargs", None) or {})
    sources: dict[str | None, Source] = {}
    for pattern, place in convert_to_regular_types(config.reward_model.get("by_source", None) or {}).items():
        sources[pattern] = _source(f"reward_model.by_source.{pattern}", place, modules)
    path, name = section.get("path", None), section.get("name", None) or "compute_score"
    sources[None] = Source(copy_to_local(path), name, reward_kwargs, modules) if path else _DEFAULT
    return sources


def _source(key: str, place: Any, modules: str | None) -> Source:
    if place == "builtin":
        return _DEFAULT
    if not isinstance(place, str) or not (place.endswith(".py") or split_file_name(place)):
        raise ValueError(
            f"{key}={place!r} names no function: write file.py:function, file.py (its compute_score), or builtin."
        )
    path, name = split_file_name(place) or (place, "compute_score")
    return Source(copy_to_local(path), name, {}, modules)


def _reward_function(config: Any, manager_cls: type) -> RawRewardFn | None:
    """What the manager is to call: None for the built-in scorers in this process."""
    sources = _sources(config)
    make = _in_process
    if _wants_sandbox(config, manager_cls):
        options = _sandbox(config)
        pools = {repr(source): _pool(config, source) for source in sources.values()}  # all start at once

        def make(source: Source) -> RawRewardFn:
            return SandboxedFunction(pools[repr(source)], options.timeout_s, options.batch_timeout_s)

    default = sources.pop(None)
    functions = {repr(source): make(source) for source in (default, *sources.values())}
    if sources:
        by_source = {pattern: functions[repr(source)] for pattern, source in sources.items()}
        return BySource(by_source, functions[repr(default)])
    function = functions[repr(default)]
    return None if function is default_compute_score else function


def _in_process(source: Source) -> RawRewardFn:
    function = load_extern_type(source.path, source.name)
    return functools.partial(function, **source.reward_kwargs) if source.reward_kwargs else function


def _pool(config: Any, source: Source) -> Pool:
    options = _sandbox(config)
    limits = Limits(None, options.cpu_s, options.memory_mb, options.output_mb, options.processes, options.network)
    workers = options.workers
    if workers is None:
        is_shared = source is _DEFAULT or config.reward_model.get("reward_manager", None) == "prime"
        is_batch = config.reward_model.get("reward_manager", None) == "batch"
        workers = min(8, _cores()) if is_shared and not is_batch else 1
    return sandboxed(source, limits, workers, options.start_timeout_s)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def error_counts(extra: Mapping[str, list]) -> dict[str, float]:
    """The metrics ``reward/errors`` and ``reward/errors/<kind>`` of a manager's extra columns."""
    if REWARD_ERROR_KEY not in extra:
        return {}
    kinds = Counter(kind for kind in extra.get(REWARD_ERROR_KIND_KEY, ()) if kind is not None)
    return {
        "reward/errors": sum(extra[REWARD_ERROR_KEY]),
        **{f"reward/errors/{kind}": float(count) for kind, count in sorted(kinds.items())},
    }


@contextmanager
def without_failed(data: DataProto, on_error: str) -> Iterator[None]:
    """Inside, samples whose scoring failed are in nobody's group; they have no token in the loss from then on.

    Nothing is done with ``on_error=zero_and_count``, whose failures count as responses that earned 0.
    """
    failed = np.array([bool(value) for value in data.non_tensor_batch.get(REWARD_ERROR_KEY, ())])
    if on_error == "zero_and_count" or not failed.any():
        yield
        return
    mask = data.ragged("response_mask")
    keep = torch.from_numpy(~failed).to(mask.values.device).repeat_interleave(mask.layout.lengths)
    data.put("response_mask", Ragged(mask.values * keep.to(mask.values.dtype), mask.layout))
    uids = data.non_tensor_batch.get("uid")
    if uids is not None:
        alone = np.array([f"failed-{i}" for i in range(len(failed))], dtype=object)
        data.non_tensor_batch["uid"] = np.where(failed, alone, uids)
    try:
        yield
    finally:
        if uids is not None:
            data.non_tensor_batch["uid"] = uids


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
