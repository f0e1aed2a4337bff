"""Reward functions of a run by its config, and the sandboxes they run in."""

import functools
import os
from typing import Any

from verl.config.reward import RewardSandboxConfig
from verl.rewards.functions.calling import BUILT_IN, BySource, RawRewardFn
from verl.rewards.scorers import built_in_options, built_in_rule, default_compute_score
from verl.sandbox.pool import Pool, SandboxedFunction, Source, sandboxed
from verl.sandbox.supervisor import Limits
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import load_extern_type, split_file_name
from verl.utils.py_functional import convert_to_regular_types


def start_sandboxes(config: Any) -> None:
    """Start the processes of the reward functions, for them to be ready when `reward_function` wants them."""
    for source in {repr(source): source for source in _sources(config).values()}.values():
        _pool(config, source)


def reward_function(
    config: Any, in_sandbox: bool = True, workers: int | None = None, start_timeout_s: float | None = None
) -> RawRewardFn | None:
    """Return the reward function of a run: None for the built-in scorers in this process.

    Args:
        config: the tree; read are ``custom_reward_function`` and ``reward_model``.
        in_sandbox: call it in processes of its own, or else in this one.
        workers: processes; None: ``reward_model.sandbox.workers``.
        start_timeout_s: seconds in which each must have loaded the function, if the options do not give fewer.

    Raises:
        FileNotFoundError, AttributeError, RuntimeError: the file, the function in it, or what the file does.
        SlowStart: (a RuntimeError) the file was not loaded in time.
        ValueError: an entry of ``reward_model.by_source`` names no function.
    """
    sources = _sources(config)
    make = _in_process
    if in_sandbox:
        options = sandbox_options(config)
        # all start at once
        pools = {repr(source): _pool(config, source, workers, start_timeout_s) for source in sources.values()}

        def make(source: Source) -> RawRewardFn:
            return SandboxedFunction(pools[repr(source)], _timeout_s(config, source), options.batch_timeout_s)

    default = sources.pop(None)
    functions = {repr(source): make(source) for source in (default, *sources.values())}
    if sources:
        by_source = {pattern: functions[repr(source)] for pattern, source in sources.items()}
        return BySource(by_source, functions[repr(default)])
    function = functions[repr(default)]
    return None if function is default_compute_score else function


def _sources(config: Any) -> dict[str | None, Source]:
    """Return the files and names of the functions, by pattern of data sources; under None that of all others."""
    section = config.get("custom_reward_function", None) or {}
    reward_kwargs = convert_to_regular_types(section.get("reward_kwargs", None) or {})
    sources: dict[str | None, Source] = {}
    for pattern, place in convert_to_regular_types(config.reward_model.get("by_source", None) or {}).items():
        sources[pattern] = _source(f"reward_model.by_source.{pattern}", place, config)
    path, name = section.get("path", None), section.get("name", None) or "compute_score"
    sources[None] = Source(copy_to_local(path), name, reward_kwargs) if path else _built_in(config)
    return sources


def _built_in(config: Any) -> Source:
    return Source(BUILT_IN, "default_compute_score", built_in_options(config.reward_model))


def _source(key: str, place: Any, config: Any) -> Source:
    if built_in_rule(place) is not None:
        return _built_in(config)
    if not isinstance(place, str) or not (place.endswith(".py") or split_file_name(place)):
        raise ValueError(
            f"{key}={place!r} names no function: write file.py:function, file.py (its compute_score), builtin, or "
            "builtin:NAME for the rule of another data source."
        )
    path, name = split_file_name(place) or (place, "compute_score")
    return Source(copy_to_local(path), name)


def sandbox_options(config: Any) -> RewardSandboxConfig:
    """The section ``reward_model.sandbox``, or its defaults."""
    given = config.reward_model.get("sandbox", None)
    return given if given is not None else RewardSandboxConfig()


def _pool(config: Any, source: Source, workers: int | None = None, start_timeout_s: float | None = None) -> Pool:
    options = sandbox_options(config)
    limits = Limits(None, options.cpu_s, options.memory_mb, options.output_mb, options.processes, options.network)
    workers = workers or options.workers
    if workers is None:
        is_shared = source.path == BUILT_IN or config.reward_model.get("reward_manager", None) == "prime"
        is_batch = config.reward_model.get("reward_manager", None) == "batch"
        workers = min(8, _cores()) if is_shared and not is_batch else 1
    patience = min(start_timeout_s or options.start_timeout_s, options.start_timeout_s)
    return sandboxed(source, limits, workers, patience)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _timeout_s(config: Any, source: Source) -> float:
    """Seconds of one call; one that asks a judge has as long as all its tries may take."""
    judge = source.reward_kwargs.get("judge") or {"tries": 0, "timeout_s": 0.0}
    return sandbox_options(config).timeout_s + 2 * judge["tries"] * judge["timeout_s"]


def _in_process(source: Source) -> RawRewardFn:
    function = load_extern_type(source.path, source.name)
    return functools.partial(function, **source.reward_kwargs) if source.reward_kwargs else function
