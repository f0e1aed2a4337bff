"""Reward functions of a run: read from its config, started in processes of their own, and called. No torch.

A call ends in an outcome: a score, or a failure of a named kind.
"""

import fnmatch
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from verl.config.reward import RewardSandboxConfig
from verl.rewards.scorers import (
    built_in_options,
    built_in_rule,
    default_compute_score,
    has_scorer,
    is_for_judge,
    rule_of,
)
from verl.sandbox.messages import TOKENIZER, name_of
from verl.sandbox.outcomes import Failure, NotCalled, Outcome, Scored, scored, scored_batch
from verl.sandbox.pool import Pool, SandboxedFunction, Source, sandboxed
from verl.sandbox.supervisor import Limits
from verl.sandbox.worker import offered_to
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import load_extern_type, split_file_name
from verl.utils.py_functional import convert_to_regular_types, excerpt, gather_awaitables

RawRewardFn = Callable[..., Any]
"""A user's reward function; how it is called depends on the manager."""

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Names of the arguments of a function that scores one response."""

BATCH_PARAMETERS = tuple(f"{name}s" for name in PARAMETERS)
"""Names of the arguments, each a list, of a function for ``reward_model.reward_manager=batch``."""

MANAGERS_OWN = ("on_error", "max_errors", "max_concurrent", "num_processes", "max_resp_len", "overlong_buffer_cfg")
"""Entries of ``reward_model.reward_kwargs`` that managers keep; the others go to every call of the function."""

_WAYS_OUT = {
    Outcome.TIMEOUT: "raise reward_model.sandbox.timeout_s (of the batch manager batch_timeout_s)",
    Outcome.CPU: "raise reward_model.sandbox.cpu_s",
    Outcome.MEMORY: "raise reward_model.sandbox.memory_mb",
    Outcome.OUTPUT: "raise reward_model.sandbox.output_mb",
    Outcome.PROCESSES: "raise reward_model.sandbox.processes",
}


@dataclass(frozen=True)
class Sample:
    """One response, as a reward function gets it."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


def call(
    function: RawRewardFn,
    samples: Sequence[Sample],
    *,
    is_batch: bool = False,
    timeout_s: float = 60.0,
    reward_kwargs: Mapping[str, Any] | None = None,
) -> Sequence[Scored | Failure | NotCalled]:
    """Outcomes of a function's calls about some samples, as a manager would make them; none after a first failure.

    Args:
        function: here, or in a sandbox.
        is_batch: one call about all samples, with lists.
        timeout_s: seconds after which a call in a sandbox is ended, if the function's own are not fewer.
        reward_kwargs: for every call.
    """
    extra = dict(reward_kwargs or {})
    if isinstance(function, SandboxedFunction):
        # the same processes with shorter limits: a trial must not wait as long as a step
        seconds = [min(timeout_s, own) for own in (function.timeout_s, function.batch_timeout_s)]
        function = SandboxedFunction(function.pool, *seconds)
    if is_batch:
        return _call_batch(function, len(samples), {**in_columns(samples), **extra})
    arguments = [arguments_of(function, sample, extra) for sample in samples]
    if isinstance(function, SandboxedFunction):
        # the first failure ends the trial: the calls after it are `NotCalled`
        return function.rows(arguments, bear=0)
    outcomes: list[Scored | Failure | NotCalled] = []
    for args, kwargs in arguments:
        try:
            outcomes.append(scored(awaited(function(*args, **kwargs))))
        # SystemExit is no Exception, and a function that calls sys.exit must not end the driver
        except (Exception, SystemExit) as error:
            return [*outcomes, Failure.of(error), *[NotCalled()] * (len(samples) - len(outcomes) - 1)]
    return outcomes


def _call_batch(function: RawRewardFn, count: int, columns: dict[str, Any]) -> list[Scored | Failure]:
    if isinstance(function, SandboxedFunction):
        return function.batch(count, columns)
    try:
        return scored_batch(awaited(function(**columns)), count)
    except (Exception, SystemExit) as error:
        return [Failure.of(error)] * count


def story_of(function: RawRewardFn, sample: Sample, where: str, failure: Failure) -> str:
    """Return the failure in one line, then the function's own frames, then the sample."""
    place = f"data_source={sample.data_source!r}, index={sample.extra_info.get('index')}"
    cause = failure.cause.splitlines()[0]
    lines = [
        f"The reward function {name_of(function)} failed on {where} ({place}): {cause} [{failure.kind.value}]",
        (failure.trace or failure.cause).rstrip(),
        f"  sample: {where.removeprefix('sample ')}, {place}",
        f"  response: {excerpt(sample.solution_str)}",
        f"  ground_truth: {excerpt(sample.ground_truth)}",
    ]
    return "\n".join(lines)


def way_out_of(failure: Outcome, key: str | None) -> str:
    """Return advice on a function that fails and stops a run; ``key`` chose it, None: it is built in."""
    hint = f" {_WAYS_OUT[failure]}," if failure in _WAYS_OUT else ""
    return (
        f"Correct the function{f' ({key})' if key else ''},{hint} or bear such samples: "
        "reward_model.on_error=zero_and_count gives them 0, drop_sample leaves them out."
    )


def in_columns(samples: Sequence[Sample]) -> dict[str, list]:
    """The samples as :data:`BATCH_PARAMETERS`."""
    return {f"{name}s": [getattr(sample, name) for sample in samples] for name in PARAMETERS}


def arguments_of(
    function: RawRewardFn, sample: Sample, reward_kwargs: Mapping[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Positional and named arguments of a call about a sample: by name, or by place where the names do not fit."""
    by_name = {**dict.fromkeys(PARAMETERS), **reward_kwargs}
    if _mismatch(function, (), by_name) and not _mismatch(function, PARAMETERS, reward_kwargs):
        # the fields of Sample stand in the order of PARAMETERS
        return tuple(vars(sample).values()), dict(reward_kwargs)
    return (), {**vars(sample), **reward_kwargs}


def check_signature(
    function: RawRewardFn, parameters: Sequence[str], reward_kwargs: Mapping[str, Any], by_place: bool = False
) -> None:
    """Check before the first rollout that a function can be called.

    Args:
        parameters: the names of its arguments.
        by_place: whether it may take them without their names, too.

    Raises:
        TypeError: it does not take what it will be given.
    """
    if by_place and not _mismatch(function, parameters, reward_kwargs):
        return
    keywords = {**dict.fromkeys(parameters), **reward_kwargs, **getattr(function, "keywords", {})}
    error = _mismatch(function, (), keywords)
    if error is None:
        return
    signature, hint = signature_of_function(function), ""
    for manager, sign in (("batch", "data_sources"), ("naive", "data_source")):
        if sign in signature.parameters and sign not in parameters:
            hint = f" Its parameters are those of reward_model.reward_manager={manager}: set that."
    raise TypeError(
        f"The reward function {name_of(function)} has the parameters {signature} and is called with the "
        f"keywords {', '.join(keywords)}: {error}.{hint} Name its parameters so, or let it take **kwargs."
    )


def signature_of_function(function: RawRewardFn) -> inspect.Signature | None:
    # below partials: their keywords are added to the call in `_mismatch` and `check_signature`
    while isinstance(function, functools.partial):
        function = function.func
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # builtins may not tell
        return None


def _mismatch(function: RawRewardFn, args: Sequence[Any], keywords: Mapping[str, Any]) -> TypeError | None:
    """Return the reason why a function cannot be called so, by its signature; None if it can or has none."""
    signature = signature_of_function(function)
    try:
        if signature is not None:
            # of a partial, and of a function in a sandbox, which binds the same way
            signature.bind(*args, **{**keywords, **getattr(function, "keywords", {})})
    except TypeError as error:
        return error
    return None


def awaited(result: Any) -> Any:
    """Return a result, or what an awaitable one comes to; raises what it raises."""
    if inspect.isawaitable(result):
        [result] = gather_awaitables([result], 1)
        if isinstance(result, Exception):
            # `gather_awaitables` returns an exception in the place of its result
            raise result
    return result


# -- Reward functions by data source ---------------------------------------------------------------------------------
BUILT_IN = "pkg://verl.rewards.scorers"


class BySource:
    """Reward functions by the data sources whose rows they score; called like one, it calls the one that fits.

    Args:
        functions: data source, or a pattern such as ``math/*``, -> function; the first that fits is taken.
        default: for rows that fit none.
    """

    def __init__(self, functions: Mapping[str, RawRewardFn], default: RawRewardFn):
        self.functions, self.default = dict(functions), default

    def function_for(self, data_source: Any) -> RawRewardFn:
        # fnmatchcase: fnmatch would fold case on some systems, and data sources differ by it
        for pattern, function in self.functions.items():
            if fnmatch.fnmatchcase(str(data_source), pattern):
                return function
        return self.default

    def __call__(self, data_source: Any, *args: Any, **kwargs: Any) -> Any:
        return self.function_for(data_source)(data_source, *args, **kwargs)

    def share_out(self, samples: Sequence[Any], call: Callable[[RawRewardFn, list], list]) -> list[Any]:
        """The results of ``call(function, its samples)`` of all functions, in the order of the samples."""
        parts: dict[int, tuple[RawRewardFn, list[int]]] = {}
        for i, sample in enumerate(samples):
            function = self.function_for(sample.data_source)
            parts.setdefault(id(function), (function, []))[1].append(i)
        results: list[Any] = [None] * len(samples)
        # each function waits for its own processes: one thread a function keeps them all busy
        with ThreadPoolExecutor(max(1, len(parts))) as threads:
            done = [
                (rows, threads.submit(call, function, [samples[i] for i in rows])) for function, rows in parts.values()
            ]
        for rows, future in done:
            for i, result in zip(rows, future.result(), strict=True):
                results[i] = result
        return results


def functions_of(function: RawRewardFn) -> list[RawRewardFn]:
    """Return the functions to call, each once."""
    if isinstance(function, BySource):
        # by identity: several patterns may share a function, which starts and is checked once
        return list({id(one): one for one in (*function.functions.values(), function.default)}.values())
    return [function]


def function_for(function: RawRewardFn, data_source: Any) -> RawRewardFn:
    """Return the function that scores a data source."""
    return function.function_for(data_source) if isinstance(function, BySource) else function


def is_built_in(function: RawRewardFn) -> bool:
    """Whether it is the built-in scorers, here or in a sandbox."""
    source = getattr(getattr(function, "pool", None), "source", None)
    return function is default_compute_score or source is not None and source.path == BUILT_IN


def is_judged(function: RawRewardFn, data_source: str, options: Mapping[str, Any]) -> bool:
    """Whether the language model of ``reward_model.judge`` scores a data source.

    Args:
        options: of the built-in scorers (`verl.rewards.scorers.built_in_options`).
    """
    function, judge = function_for(function, data_source), options.get("judge")
    return judge is not None and is_built_in(function) and is_for_judge(data_source, judge["data_sources"])


def lacks_scorer(function: RawRewardFn, data_source: str, options: Mapping[str, Any]) -> bool:
    """Whether rows of a data source go to the built-in scorers and none is for it; arguments as `is_judged`."""
    if is_judged(function, data_source, options) or not is_built_in(function_for(function, data_source)):
        return False
    return not has_scorer(rule_of(data_source, options.get("score_as"))[0])


# -- Reward functions of a run by its config, and the sandboxes they run in ------------------------------------------


def start_sandboxes(config: Any) -> None:
    """Start the processes of the reward functions, so that they are ready when `reward_function` is called."""
    for source in _sources(config).values():
        _pool(config, source)  # an equal one is taken again


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
    # by its repr: patterns of one file share a function; the default is loaded first
    unique = {repr(source): source for source in (sources[None], *sources.values())}
    functions: dict[str, RawRewardFn] = {}
    if in_sandbox:
        options = sandbox_options(config)
        # all pools start before the first is waited for
        pools = {key: _pool(config, source, workers, start_timeout_s) for key, source in unique.items()}
        for key, source in unique.items():
            # a call that asks a judge has as long as all its tries may take
            judge = source.reward_kwargs.get("judge") or {"tries": 0, "timeout_s": 0.0}
            timeout_s = options.timeout_s + 2 * judge["tries"] * judge["timeout_s"]
            functions[key] = SandboxedFunction(pools[key], timeout_s, options.batch_timeout_s)
    else:
        for key, source in unique.items():
            function = load_extern_type(source.path, source.name)
            kwargs = {**source.reward_kwargs, **offered_to(function, source.offered)}
            functions[key] = functools.partial(function, **kwargs) if kwargs else function
    # pop: what is left are the patterns alone
    default = functions[repr(sources.pop(None))]
    if sources:
        return BySource({pattern: functions[repr(source)] for pattern, source in sources.items()}, default)
    return None if default is default_compute_score else default


def _sources(config: Any) -> dict[str | None, Source]:
    """Return the files and names of the functions, by pattern of data sources; under None that of all others."""
    section = config.get("custom_reward_function", None) or {}
    reward_kwargs = convert_to_regular_types(section.get("reward_kwargs", None) or {})
    built_in = Source(BUILT_IN, "default_compute_score", built_in_options(config.reward_model))
    sources: dict[str | None, Source] = {}
    offered = _offered(config)
    for pattern, place in convert_to_regular_types(config.reward_model.get("by_source", None) or {}).items():
        if built_in_rule(place) is not None:
            # the rule is in `score_as` of `built_in_options`: all patterns share these processes
            sources[pattern] = built_in
            continue
        if not isinstance(place, str) or not (place.endswith(".py") or split_file_name(place)):
            raise ValueError(
                f"reward_model.by_source.{pattern}={place!r} names no function: write file.py:function, file.py (its "
                "compute_score), builtin, or builtin:NAME for the rule of another data source."
            )
        path, name = split_file_name(place) or (place, "compute_score")
        sources[pattern] = Source(copy_to_local(path), name, {}, offered)
    path, name = section.get("path", None), section.get("name", None) or "compute_score"
    sources[None] = Source(copy_to_local(path), name, reward_kwargs, offered) if path else built_in
    return sources


def _offered(config: Any) -> dict[str, Any]:
    """The address of the router and the tokenizer's folder, for functions that ask a judge; empty without one."""
    section = config.reward_model
    if not getattr(section, "asks_servers", False) or section.enable:
        return {}
    from verl.rewards.router import router_of  # imports aiohttp

    router = router_of(section)
    assert router is not None, "there are servers"
    return {"reward_router_address": router.address, TOKENIZER: copy_to_local(section.model.path)}


def sandbox_options(config: Any) -> RewardSandboxConfig:
    """The section ``reward_model.sandbox``, or its defaults."""
    given = config.reward_model.get("sandbox", None)
    return given if given is not None else RewardSandboxConfig()


def _pool(config: Any, source: Source, workers: int | None = None, start_timeout_s: float | None = None) -> Pool:
    options = sandbox_options(config)
    limits = Limits(None, options.cpu_s, options.memory_mb, options.output_mb, options.processes, options.network)
    workers = workers or options.workers
    grows = workers is None
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # with lists there is one call at a time
        workers = 1 if config.reward_model.get("reward_manager", None) == "batch" else min(8, cores)
    patience = min(start_timeout_s or options.start_timeout_s, options.start_timeout_s)
    # the key of a judge is the built-in scorers' own
    judge = source.reward_kwargs.get("judge") or {}
    keys = (*options.visible_keys, *([judge["api_key_env"]] if judge.get("api_key_env") else []))
    return sandboxed(source, limits, workers, patience, keys=keys, grows=grows)
