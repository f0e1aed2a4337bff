"""Load the reward manager of a run from its config, and compute the rewards of a batch with it."""

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.agents.base import STATUS_COLUMN, EpisodeStatus
from verl.batch.ragged import Column, Ragged, RowValues
from verl.config.rollout import loops_may_reward
from verl.data.table import distinct_values
from verl.protocol import DataProto
from verl.rewards.functions.calling import (
    RawRewardFn,
    function_for,
    is_built_in,
    is_judged,
    lacks_scorer,
    reward_function,
    sandbox_options,
    start_sandboxes,
)
from verl.rewards.managers import get_reward_manager_cls
from verl.rewards.managers.rule import (
    RESPONSE_ERROR_KEY,
    REWARD_ERROR_KEY,
    REWARD_ERROR_KIND_KEY,
    AbstractRewardManager,
    RuleRewardManager,
)
from verl.rewards.scorers import asserts_about_programs, built_in_options, runs_programs, unknown
from verl.sandbox.containment import Uncontained, containment, is_allowed
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_users_modules, load_extern_type, split_file_name
from verl.utils.py_functional import convert_to_regular_types

__all__ = [
    "compute_reward",
    "compute_reward_async",
    "extract_reward",
    "get_custom_reward_fn",
    "load_reward_manager",
    "start_reward_functions",
]

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


def load_reward_manager(
    config: Any, tokenizer: Any, num_examine: int, **reward_kwargs: Any
) -> AbstractRewardManager | Callable:
    """The reward manager of ``reward_model.reward_manager`` around the user's function or the built-in rules.

    Args:
        num_examine: how many samples of each data source it prints per batch.
        reward_kwargs: for the manager, on top of ``reward_model.reward_kwargs``.
    """
    section = config.reward_model
    model = (config.get("actor_rollout_ref", None) or {}).get("model", None) or {}
    # first: importing it may register the manager that is named below
    import_users_modules(model.get("external_lib", None))
    manager_cls = reward_manager_class(config)
    kwargs = {**convert_to_regular_types(section.get("reward_kwargs", None) or {}), **reward_kwargs}
    for name, default in (("on_error", "stop"), ("max_errors", None)):
        value = section.get(name, default)
        value = default if value is None else value
        if _takes(manager_cls, name):
            # an entry of reward_kwargs wins over the section's option
            kwargs.setdefault(name, value)
        elif value != default:
            logger.warning(
                "reward_model.%s=%s has no effect: reward manager %s does not take it.",
                *(name, value, manager_cls.__name__),
            )
    return manager_cls(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=reward_function(config, _wants_sandbox(config, manager_cls)),
        reward_fn_key=config.data.get("reward_fn_key", "data_source"),
        **kwargs,
    )


def start_reward_functions(config: Any) -> None:
    """Start the sandboxes of the reward functions, so that they are ready when `load_reward_manager` is called."""
    if _wants_sandbox(config, reward_manager_class(config)):
        start_sandboxes(config)


def reward_manager_class(config: Any) -> type:
    """The class that ``reward_model.reward_manager`` names; with ``file.py:Class`` the file's."""
    name = config.reward_model.get("reward_manager", None) or "naive"
    in_file = split_file_name(name)
    return load_extern_type(copy_to_local(in_file[0]), in_file[1]) if in_file else get_reward_manager_cls(name)


def _wants_sandbox(config: Any, manager_cls: type) -> bool:
    """Whether functions go to a sandbox: a user's manager that calls them by itself needs them in this process."""
    return sandbox_options(config).enable and issubclass(manager_cls, RuleRewardManager)


def _takes(manager_cls: type, name: str) -> bool:
    """Whether a class, or one it hands its keywords on to, has such an argument."""
    for cls in manager_cls.__mro__:
        if "__init__" in vars(cls):
            parameters = inspect.signature(vars(cls)["__init__"]).parameters
            if name in parameters:
                return True
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                return False
    return False


def failed_episodes(data: DataProto) -> np.ndarray:
    """Return (B,) bool: the rows whose agent loop failed."""
    statuses = data.non_tensor_batch.get(STATUS_COLUMN)
    return np.zeros(len(data), dtype=bool) if statuses is None else statuses == EpisodeStatus.ERROR


def without_failed_episodes(data: DataProto) -> DataProto:
    """Return the batch without the rows whose agent loop failed: in validation they have no score at all."""
    failed = failed_episodes(data)
    return data.select_idxs(np.flatnonzero(~failed)) if failed.any() else data


def compute_reward(data: DataProto, reward_fn: Callable) -> tuple[Tensor, dict[str, list]]:
    """`reward_column` with padded rewards (B, R)."""
    rewards, columns = reward_column(data, reward_fn)
    return rewards.padded() if isinstance(rewards, Ragged) else rewards, columns


def reward_column(data: DataProto, reward_fn: Callable) -> tuple[Column, dict[str, list]]:
    """Rewards (B, R) of a batch, and the extra columns the reward function reports: name -> list of B values.

    The rewards are without padding where the manager has them so: nothing of the size (B, R) is made then.

    An error of the reward function is not caught. Rows whose agent loop failed are not scored: they get the mean of the
    others' rewards, or 0, which moves no statistic, and None in extra columns; `without_failed` takes them out.

    Raises:
        ValueError: the manager's rewards are not of shape (B, R), or not finite.
    """
    failed = failed_episodes(data)
    if not failed.any():
        return _scored(data, reward_fn)
    counted = np.flatnonzero(~failed)
    if not len(counted):
        layout = data.ragged("responses").layout
        return RowValues.on_last_tokens(torch.zeros(len(data)), layout), {}
    rewards, columns = compute_reward(data.select_idxs(counted), reward_fn)
    whole = rewards.new_zeros(len(data), rewards.shape[1])
    whole[torch.from_numpy(counted)] = rewards
    # a failed row has one token, at the beginning of the window
    whole[torch.from_numpy(failed), 0] = rewards.sum(-1).mean()
    numbers = {int(row): place for place, row in enumerate(counted)}
    filled = {
        name: [values[numbers[row]] if row in numbers else None for row in range(len(data))]
        for name, values in columns.items()
        if len(values) == len(counted)
    }
    if "score" in filled:
        filled["score"] = whole.sum(-1).tolist()
    if REWARD_ERROR_KEY in filled:  # a failure of the agent loop is none of the reward function
        filled[REWARD_ERROR_KEY] = [value or 0.0 for value in filled[REWARD_ERROR_KEY]]
    return whole, filled


def _scored(data: DataProto, reward_fn: Callable) -> tuple[Column, dict[str, list]]:
    result, extra = call_manager(data, reward_fn, padded=False)
    _check(result, data, type(reward_fn).__name__)
    return result, extra


def call_manager(data: DataProto, reward_fn: Callable, padded: bool = True) -> tuple[Any, dict[str, list]]:
    """What a reward manager returns, unchecked: rewards (B, R), padded or not, and its extra columns."""
    # a user's manager may return padded rewards alone
    keywords = {"return_dict": True} if _has_keyword(reward_fn, "return_dict") else {}
    # one that takes any keyword may hand them on to one that does not, or change the rewards it is given back
    if "padded" in inspect.signature(reward_fn).parameters:
        keywords["padded"] = padded
    result = reward_fn(data, **keywords)
    if isinstance(result, Mapping):
        return result["reward_tensor"], dict(result.get("reward_extra_info", None) or {})
    return result, {}


def compute_reward_async(
    data: DataProto, config: Any = None, tokenizer: Any = None, reward_fn: Callable | None = None
) -> tuple[Tensor, dict[str, list]]:
    """`compute_reward`, to be called as ``compute_reward_async.remote(...)``: then it runs in a task of Ray's.

    Args:
        config, tokenizer: what the reward manager is made of where there is no ``reward_fn``.
    """
    return compute_reward(data, reward_fn or load_reward_manager(config, tokenizer, num_examine=0))


def _as_task(*args: Any, **kwargs: Any) -> Any:
    import ray  # only where it runs anyway: the local controller does without

    return ray.remote(num_cpus=1)(compute_reward_async).remote(*args, **kwargs)


# an attribute, not a decorator of Ray's: importing this module must not import Ray
vars(compute_reward_async)["remote"] = _as_task


def extract_reward(batch: DataProto) -> tuple[Tensor, dict[str, list]]:
    """The rewards (B, R) that agent loops or a reward model gave a batch, and the reward function's extra columns."""
    names = batch.meta_info.get("reward_extra_keys", ())
    return batch.column("rm_scores"), {name: batch.non_tensor_batch[name].tolist() for name in names}


def error_counts(extra: Mapping[str, list]) -> dict[str, float]:
    """The metrics of failures in a manager's extra columns: ``reward/errors``, ``reward/response_errors``, by kind."""
    counts: dict[str, float] = {}
    if RESPONSE_ERROR_KEY in extra:
        by_response = Counter(kind for kind in extra[RESPONSE_ERROR_KEY] if kind is not None)
        counts = {f"reward/response_errors/{kind}": float(count) for kind, count in sorted(by_response.items())}
        counts["reward/response_errors"] = float(by_response.total())
    if REWARD_ERROR_KEY not in extra:
        return counts
    kinds = Counter(kind for kind in extra.get(REWARD_ERROR_KIND_KEY, ()) if kind is not None)
    return {
        **counts,
        "reward/errors": sum(extra[REWARD_ERROR_KEY]),
        **{f"reward/errors/{kind}": float(count) for kind, count in sorted(kinds.items())},
    }


@contextmanager
def without_failed(data: DataProto, on_error: str) -> Iterator[None]:
    """Inside, samples whose scoring or agent loop failed are groups of their own; then no token of them counts.

    With ``on_error=zero_and_count`` failures of scoring count as responses that earned 0.
    """
    failed = failed_episodes(data)
    if on_error != "zero_and_count" and (errors := data.non_tensor_batch.get(REWARD_ERROR_KEY)) is not None:
        failed = failed | np.array([bool(value) for value in errors])
    if not failed.any():
        yield
        return
    # the mask for good, the uid for the block only: later steps find the row's prompt again
    data.put("response_mask", data.ragged("response_mask").zero_rows(torch.from_numpy(failed)))
    uids = data.non_tensor_batch.get("uid")
    if uids is not None:
        alone = np.array([f"failed-{i}" for i in range(len(failed))], dtype=object)
        data.non_tensor_batch["uid"] = np.where(failed, alone, uids)
    try:
        yield
    finally:
        if uids is not None:
            data.non_tensor_batch["uid"] = uids


def _has_keyword(function: Callable, keyword: str) -> bool:
    """Whether a reward manager can be called with a batch and this keyword."""
    try:
        inspect.signature(function).bind(None, **{keyword: None})
    except TypeError:
        return False
    return True


def _check(rewards: Any, data: DataProto, manager: str) -> None:
    shape = tuple(data.ragged("responses").shape) if "rm_scores" not in data.keys() else tuple(rewards.shape)
    if isinstance(rewards, Ragged) and tuple(rewards.shape) == shape:
        if rewards.is_finite():
            return
        rewards = rewards.padded()
    if not isinstance(rewards, Tensor) or tuple(rewards.shape) != shape:
        kind = f"a tensor of shape {tuple(rewards.shape)}" if isinstance(rewards, Tensor) else type(rewards).__name__
        raise ValueError(
            f"Reward manager {manager} returned {kind} for {len(data)} responses: it must be a tensor of shape "
            f"{shape}, one row per response and one column per response token."
        )
    if torch.isfinite(rewards.sum()):  # one reduction; the rows are looked for only where it fails
        return
    if rows := (~torch.isfinite(rewards)).any(-1).nonzero()[:, 0].tolist():  # none where a sum overflows
        place = int((~torch.isfinite(rewards[rows[0]])).nonzero()[0])
        uid = data.non_tensor_batch["uid"][rows[0]] if "uid" in data.non_tensor_batch else None
        raise ValueError(
            f"Reward manager {manager} returned rewards that are not finite, in rows {rows[:10]}: the first is "
            f"{rewards[rows[0], place].item()} at response token {place + 1} of row {rows[0]} (uid={uid})."
        )


# -- Whether each data source has a scorer, checked before a model is loaded ----------------------------------------


def check_data_sources(config: Any, reward_fn: Any, datasets: Iterable[Any]) -> None:
    """Refuse rows that no scorer would score.

    Datasets that are not rows of files, and managers that score by themselves, raise when their rows come.

    Raises:
        UnknownDataSource: a data source would go to the built-in rules, and none is for it. With
            ``reward_model.on_error`` other than ``stop`` it is a warning.
        Uncontained: one would be scored by programs that this system cannot contain.
    """
    section = config.reward_model
    if section.enable or not isinstance(reward_fn, RuleRewardManager) or config.env.reward == "environment":
        return
    options, datasets = built_in_options(section), list(datasets)
    # loops of the user may return rewards; if they do not, the first batch is refused for the same reason
    may_reward = loops_may_reward(config.actor_rollout_ref.rollout, distinct_values(datasets, "agent_name"))
    for source in distinct_values(datasets, reward_fn.reward_fn_key):
        if isinstance(source, str) and not may_reward and lacks_scorer(reward_fn.compute_score, source, options):
            if section.on_error == "stop":
                raise unknown(source)
            logger.warning("%s", unknown(source))
        if isinstance(source, str) and not may_reward and _is_forgeable(reward_fn.compute_score, source, options):
            logger.warning(
                "data_source=%r: reward_model.sandbox_fusion.url runs the assertions in the process of the program, so "
                "a program made to fool them scores 1. Here the judge is another process: leave the url out, or look "
                "at the programs of the highest scores.",
                source,
            )
        if isinstance(source, str) and not may_reward and _runs_programs(reward_fn.compute_score, source, options):
            is_free = options.get("allow_uncontained") or is_allowed()
            if not is_free and (missing := containment()):
                raise Uncontained(missing)


def _is_forgeable(function: RawRewardFn, data_source: str, options: Mapping[str, Any]) -> bool:
    """Whether a service runs assertions of a data source together with the program that they judge."""
    local = {name: value for name, value in options.items() if name != "sandbox_fusion_url"}
    is_remote = local != options and _runs_programs(function, data_source, local)
    return is_remote and asserts_about_programs(data_source, options)


def _runs_programs(function: RawRewardFn, data_source: str, options: Mapping[str, Any]) -> bool:
    """Whether rows of a data source are scored by programs that run on this machine."""
    is_ours = is_built_in(function_for(function, data_source)) and not is_judged(function, data_source, options)
    return is_ours and runs_programs(data_source, options)
