"""Trial of the run's reward function on rows of each data source, with right and wrong answers.

The function runs in the sandbox of a run: if it hangs, exits or crashes, a process is lost and the row is named.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl.data.table import RowTable
from verl.preflight.rows import evenly_spaced
from verl.rewards.functions.calling import (
    BATCH_PARAMETERS,
    MANAGERS_OWN,
    PARAMETERS,
    RawRewardFn,
    check_signature,
    function_for,
    functions_of,
    is_built_in,
    is_judged,
    lacks_scorer,
    reward_function,
    way_out_of,
)
from verl.rewards.functions.trial import Trial, TrialRow, try_function
from verl.rewards.scorers import built_in_options
from verl.rewards.scorers.registry import SOURCES
from verl.sandbox.outcomes import Outcome
from verl.sandbox.pool import SlowStart
from verl.utils.py_functional import convert_to_regular_types, nearest_name

if TYPE_CHECKING:
    from verl.preflight.data import Limits, Preview

MANAGERS = ("naive", "prime", "dapo", "batch")
"""Reward managers whose calls of a function are reproduced here."""

_FUNCTION = ("custom_reward_function.path", "custom_reward_function.name")
_START_S = 30.0
"""Timeout in seconds of loading the file; a slower one is not tried."""
_LONGEST_S = 30.0
"""Seconds after which no further data source is tried."""


def scores_of_rows(config: Any, table: RowTable, found: Preview, limits: Limits) -> None:
    """Try the function on some rows of each data source."""
    rm, begin = config.reward_model, time.monotonic()
    if rm.reward_manager not in MANAGERS:
        found.note(f"reward_model.reward_manager={rm.reward_manager} is not tried: it is a user-defined manager.")
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
    options = built_in_options(rm)
    unknown = [] if rm.enable else [source for source in found.rows.sources if lacks_scorer(function, source, options)]
    if rm.self_test == "off" and not limits.asks_judge:
        found.note("The reward function is not tried (reward_model.self_test=off).")
    for source, positions in found.rows.rows_of.items():
        if source in unknown or rm.self_test == "off" and not limits.asks_judge:
            continue
        if not limits.asks_judge and is_judged(function, source, options):
            found.note(f"data_source={source!r} is scored by the judge, which is not called here.")
            continue
        if time.monotonic() - begin > _LONGEST_S:
            found.note(f"data_source={source!r} and those after it are not tried: scoring takes too long.")
            break
        scores = try_function(
            function,
            source,
            [_row(table, int(positions[i]), source) for i in evenly_spaced(len(positions), limits.scored)],
            found.rows.sources[source],
            is_batch=rm.reward_manager == "batch",
            timeout_s=limits.patience,
            seconds=10 * limits.patience,
            reward_kwargs=reward_kwargs,
        )
        found.scores.append(scores)
        errors, warnings = scores.problems()
        would_stop = _would_stop(config, scores)
        add = found.error if would_stop else found.warn
        if scores.error and would_stop:
            errors = [f"{text}\n{_way_out(config, function, scores)}" for text in errors]
        for text in errors:
            add(text, *_function_options(config), "data.train_files")
        for text in warnings:
            found.note(text)
    if unknown:
        names = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        # a sample of the rows may not have this source
        is_certain = rm.on_error == "stop" and config.data.train_max_samples < 0
        hint = nearest_name(str(unknown[0]), SOURCES)
        positions = found.rows.rows_of.get(unknown[0], ())
        first = f" (first: {table.where(int(positions[0]))})" if len(positions) else ""
        (found.error if is_certain else found.warn)(
            f"There is no built-in scorer for {config.data.reward_fn_key}={names}{first}.{hint} Name "
            "a function of your own with custom_reward_function.path, for one source alone with "
            "reward_model.by_source, or correct the column (data.reward_fn_key).",
            "data.reward_fn_key",
        )


def _function(config: Any, reward_kwargs: Mapping[str, Any], found: Preview) -> RawRewardFn | None:
    """Load the run's function in processes of its own; add a finding if it cannot be loaded or called."""
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
    """Whether a run would stop at these problems; a timeout here is no proof, as a run waits longer."""
    section = config.reward_model
    if scores.error:
        return scores.kind is not Outcome.TIMEOUT and section.on_error == "stop" and not section.max_errors
    return section.self_test == "stop"


def _way_out(config: Any, function: RawRewardFn, scores: Trial) -> str:
    """Return what to do about a failure that would stop a run."""
    function = function_for(function, scores.data_source)
    key = (
        None
        if is_built_in(function)
        else "/".join(key for key in _function_options(config) if not key.endswith(".name"))
    )
    way_out = way_out_of(scores.kind, key)
    return f"{way_out} If a function fails only on these made-up responses, set reward_model.self_test=off."


def _function_options(config: Any) -> tuple[str, ...]:
    """Return the options that choose the function."""
    return (*(_FUNCTION if config.custom_reward_function.path else ()), *_by_source(config))


def _by_source(config: Any) -> tuple[str, ...]:
    return ("reward_model.by_source",) if config.reward_model.by_source else ()


def _row(table: RowTable, position: int, source: str) -> TrialRow:
    row = table[position]
    info = row.get("extra_info")
    return TrialRow(
        table.where(position), source, row["reward_model"]["ground_truth"], info if isinstance(info, dict) else {}
    )
