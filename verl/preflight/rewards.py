"""The run's reward function on rows of each data source: whether right and wrong answers earn what they should.

The function runs in the sandbox of a run: one that hangs, exits or crashes costs a process, and its row is named.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.data.table import RowTable
from verl.rewards.functions.calling import (
    BATCH_PARAMETERS,
    MANAGERS_OWN,
    PARAMETERS,
    BySource,
    RawRewardFn,
    check_signature,
    functions_of,
    is_built_in,
    way_out_of,
)
from verl.rewards.functions.sources import reward_function
from verl.rewards.functions.trial import Trial, TrialRow, try_function
from verl.rewards.scorers import built_in_options, rule_of
from verl.rewards.scorers.registry import SOURCES, has_scorer, is_for_judge
from verl.sandbox.outcomes import Outcome
from verl.sandbox.pool import SlowStart
from verl.utils.py_functional import convert_to_regular_types, nearest_name

if TYPE_CHECKING:
    from verl.preflight.data import Limits, Preview

MANAGERS = ("naive", "prime", "dapo", "batch")
"""Managers whose way of calling a function is known here."""

_FUNCTION = ("custom_reward_function.path", "custom_reward_function.name")
_START_S = 30.0
"""Seconds a file has to be loaded; one that is slower is not tried."""
_LONGEST_S = 30.0
"""Seconds after which no other data source is tried."""


def scores_of_rows(config: Any, table: RowTable, found: Preview, limits: Limits) -> None:
    """Try the function on some rows of each data source."""
    rm, begin = config.reward_model, time.monotonic()
    if rm.reward_manager not in MANAGERS:
        found.note(
            f"reward_model.reward_manager={rm.reward_manager} is not tried: it calls functions in a way of its own."
        )
        return
    if rm.enable:
        found.note("Scores of a reward model (reward_model.enable=true) are not tried here; those of functions are.")
        if not config.custom_reward_function.path:
            return
    reward_kwargs = convert_to_regular_types(rm.reward_kwargs or {})
    reward_kwargs = {key: value for key, value in reward_kwargs.items() if key not in MANAGERS_OWN}
    function = _function(config, reward_kwargs, found)
    if function is None:
        return
    unknown = [] if rm.enable else [source for source in found.rows.sources if _has_no_scorer(config, function, source)]
    if rm.self_test == "off" and not limits.asks_judge:
        found.note("The reward function is not tried (reward_model.self_test=off).")
    for source, positions in found.rows.rows_of.items():
        if source in unknown or rm.self_test == "off" and not limits.asks_judge:
            continue
        if not limits.asks_judge and _is_judged(config, function, source):
            found.note(f"data_source={source!r} is scored by the judge, which is not asked here.")
            continue
        if time.monotonic() - begin > _LONGEST_S:
            found.note(f"data_source={source!r} and those after it are not tried: scoring takes too long.")
            break
        scores = try_function(
            function,
            source,
            [_row(table, int(positions[i]), source) for i in spread(len(positions), limits.scored)],
            found.rows.sources[source],
            is_batch=rm.reward_manager == "batch",
            timeout_s=limits.patience,
            seconds=10 * limits.patience,
            reward_kwargs=reward_kwargs,
        )
        found.scores.append(scores)
        errors, warnings = scores.problems()
        would_stop = _would_stop(config, scores)
        say = found.error if would_stop else found.warn
        if scores.error and would_stop:
            errors = [f"{text}\n{_way_out(config, function, scores)}" for text in errors]
        for text in errors:
            say(text, *_blamed(config), "data.train_files")
        for text in warnings:
            found.note(text)
    if unknown:
        shown = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        is_sure = rm.on_error == "stop" and config.data.train_max_samples < 0  # of some rows, not all sources come
        hint = nearest_name(str(unknown[0]), SOURCES)
        positions = found.rows.rows_of.get(unknown[0], ())
        first = f" (first: {table.where(int(positions[0]))})" if len(positions) else ""
        (found.error if is_sure else found.warn)(
            f"There is no built-in scorer for {config.data.reward_fn_key}={shown}{first}.{hint} Name "
            "a function of your own with custom_reward_function.path, for one source alone with "
            "reward_model.by_source, or correct the column (data.reward_fn_key).",
            "data.reward_fn_key",
        )


def _has_no_scorer(config: Any, function: RawRewardFn | None, source: str) -> bool:
    scores = function.function_for(source) if isinstance(function, BySource) else function
    rule, _ = rule_of(source, built_in_options(config.reward_model).get("score_as"))
    return is_built_in(scores) and not _is_judged(config, function, source) and not has_scorer(rule)


def _function(config: Any, reward_kwargs: Mapping[str, Any], found: Preview) -> RawRewardFn | None:
    """The run's function, in processes of its own; a finding where it cannot be loaded or called."""
    section, is_batch = config.custom_reward_function, config.reward_model.reward_manager == "batch"
    found.reward = f"{section.path}:{section.name}" if section.path else "built in, by data source"
    try:
        function = reward_function(config, workers=1, start_timeout_s=_START_S)
        for one in functions_of(function):
            check_signature(
                one,
                BATCH_PARAMETERS if is_batch else PARAMETERS,
                reward_kwargs,
                by_place=config.reward_model.reward_manager == "prime",
            )
    except SlowStart as error:
        found.warn(f"custom_reward_function.name={section.name} was not tried: {error}", *_FUNCTION)
    except (OSError, ImportError, RuntimeError, AttributeError, ValueError) as error:
        found.error(
            f"custom_reward_function.name={section.name} cannot be loaded: {error}", *_FUNCTION, *_by_source(config)
        )
    except TypeError as error:
        found.error(f"reward_model.reward_manager={config.reward_model.reward_manager}: {error}", *_FUNCTION)
    else:
        return function
    return None


def _would_stop(config: Any, scores: Trial) -> bool:
    """Whether a run would stop at what was found; it waits longer for a score than one does here."""
    section = config.reward_model
    if scores.error:
        return scores.kind is not Outcome.TIMEOUT and section.on_error == "stop" and not section.max_errors
    return section.self_test == "stop"


def _way_out(config: Any, function: RawRewardFn, scores: Trial) -> str:
    """Out of a failure that would stop a run."""
    function = function.function_for(scores.data_source) if isinstance(function, BySource) else function
    key = None if is_built_in(function) else "/".join(key for key in _blamed(config) if not key.endswith(".name"))
    way_out = way_out_of(scores.kind, key)
    return f"{way_out} A function that fails on such made-up responses alone: reward_model.self_test=off tries none."


def _blamed(config: Any) -> tuple[str, ...]:
    """Options that choose the function."""
    return (*(_FUNCTION if config.custom_reward_function.path else ()), *_by_source(config))


def _by_source(config: Any) -> tuple[str, ...]:
    return ("reward_model.by_source",) if config.reward_model.by_source else ()


def _is_judged(config: Any, function: RawRewardFn, source: str) -> bool:
    """Whether the language model of ``reward_model.judge`` scores a data source."""
    judge = config.reward_model.judge
    scores = function.function_for(source) if isinstance(function, BySource) else function
    return bool(judge.url) and is_built_in(scores) and is_for_judge(source, judge.data_sources)


def _row(table: RowTable, position: int, source: str) -> TrialRow:
    row = table[position]
    info = row.get("extra_info")
    return TrialRow(
        table.where(position), source, row["reward_model"]["ground_truth"], info if isinstance(info, dict) else {}
    )


def spread(count: int, wanted: int | None) -> Sequence[int]:
    """At most ``wanted`` of ``count`` positions, evenly spread, the first among them."""
    if wanted is None or count <= wanted:
        return range(count)
    return [i * count // wanted for i in range(wanted)]
