"""Right and wrong answers through the reward function: right ones must score high, wrong ones low.

The function runs in a forked child: one that hangs, exits or crashes costs the child, and the row it was at is named.
Knows rows and the function; no model, no reward manager but for how it calls.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from verl.data_check.gold import GARBAGE, gold_responses
from verl.utils.import_utils import load_extern_type
from verl.utils.py_functional import convert_to_regular_types, excerpt

_TRIED = 4
"""Rows on which all forms of a right answer are tried before one is chosen."""

HIGH, LOW = 0.95, 0.05
"""A right answer should score more than the first and a wrong one less than the second."""


@dataclass(frozen=True)
class ScoredRow:
    """What the reward function is told of a row."""

    where: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass
class SourceScores:
    """Rewards of one data source."""

    data_source: str
    rows: int
    """In the files."""
    form: str | None = None
    """How right answers were written; None: the rows do not say what would be right."""
    gold: list[float] = field(default_factory=list)
    """Of right answers."""
    garbage: list[float] = field(default_factory=list)
    """Of a text that answers nothing."""
    other: list[float] = field(default_factory=list)
    """Of the right answers of other rows."""
    low_gold: list[str] = field(default_factory=list)
    """Rows whose right answer did not score high."""
    errors: list[str] = field(default_factory=list)
    """Row and exception."""
    has_no_scorer: bool = False
    """Whether the built-in rules do not know the data source."""

    @property
    def constant(self) -> float | None:
        """The only score there is, of right and wrong answers alike; None if they differ."""
        scores = {*self.gold, *self.garbage, *self.other}
        return next(iter(scores)) if len(scores) == 1 and self.gold and self.garbage else None

    def problems(self) -> tuple[list[str], list[str]]:
        """What would spoil a training, and what should be looked at."""
        name, errors, warnings = f"data_source={self.data_source!r}", [], []
        if self.errors:
            errors.append(f"{name}: the reward function failed at {self.errors[0]}")
        if self.constant is not None:
            errors.append(
                f"{name}: right and wrong answers all score {self.constant:g}, so nothing could be learned. Look at "
                "the scorer, and at the form of the answers it wants."
            )
        elif self.gold and mean(self.gold) < HIGH:
            worst = f" The first that does not: {self.low_gold[0]}." if self.low_gold else ""
            warnings.append(
                f"{name}: right answers, written as {self.form!r}, score {mean(self.gold):.3f} on average.{worst}"
            )
        elif not self.gold and not self.errors:
            warnings.append(f"{name}: the rows do not say what would be right, so only a wrong answer was scored.")
        wrong = {"an answer that says nothing": self.garbage, "the right answer of another row": self.other}
        for kind, scores in wrong.items():
            if scores and mean(scores) > LOW and self.constant is None:
                warnings.append(f"{name}: {kind} scores {mean(scores):.3f} on average.")
        return errors, warnings


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def reward_function(config: Any) -> tuple[Callable[..., Any], str]:
    """The scoring function of a configuration, and what to call it.

    Raises:
        FileNotFoundError, RuntimeError, AttributeError: the user's file, or the function in it, is not there.
    """
    section = config.custom_reward_function
    if section.path:
        kwargs = convert_to_regular_types(section.reward_kwargs or {})
        function = load_extern_type(section.path, section.name)
        return _one_by_one(function, kwargs, config.reward_model.reward_manager), f"{section.path}:{section.name}"
    from verl.utils.reward_score import default_compute_score

    return default_compute_score, "built in, by data source"


def _one_by_one(function: Callable, kwargs: dict[str, Any], manager: str) -> Callable[..., Any]:
    """Call as the manager calls, with one sample at a time."""

    def score(**sample: Any) -> Any:
        if manager == "batch":
            result = function(**{f"{name}s": [value] for name, value in sample.items()}, **kwargs)
            return result[0]
        result = function(**sample, **kwargs)
        return asyncio.run(result) if inspect.isawaitable(result) else result

    return score


def score_source(
    function: Callable[..., Any], source: str, rows: Sequence[ScoredRow], count: int, patience: float
) -> SourceScores:
    """Score right and wrong answers of some rows of a data source.

    Args:
        count: rows of that source in the files.
        patience: seconds one call may take, and a tenth of what all may take.
    """
    context = multiprocessing.get_context("fork")  # the function may be a closure, and its module is loaded already
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_score, args=(function, source, rows, count, sender), daemon=True)
    child.start()
    sender.close()
    at, ends = "the first row", time.monotonic() + 10 * patience
    try:
        while receiver.poll(max(0.0, min(patience, ends - time.monotonic()))):
            message = receiver.recv()
            if isinstance(message, SourceScores):
                return message
            at = message
        why = f"no score within {patience:g} s" if time.monotonic() < ends else f"not done within {10 * patience:g} s"
    except EOFError:
        child.join()
        why = f"it ended the process (exit code {child.exitcode})"
    finally:
        child.kill()
        child.join()
        receiver.close()
    return SourceScores(source, count, errors=[f"{at}: {why}"])


def _score(function: Callable, source: str, rows: Sequence[ScoredRow], count: int, sender: Connection) -> None:
    """In the child: says at which row it is, and at last the scores."""
    found = SourceScores(source, count)

    def score(row: ScoredRow, response: str) -> float | None:
        sender.send(row.where)
        try:
            return _number(
                function(
                    data_source=row.data_source,
                    solution_str=response,
                    ground_truth=row.ground_truth,
                    extra_info={**row.extra_info, "num_turns": None},
                )
            )
        except (Exception, SystemExit) as error:
            found.has_no_scorer |= isinstance(error, NotImplementedError)
            text = " ".join(str(error).split())
            found.errors.append(f"{row.where}: {type(error).__name__}: {excerpt(text)}")
            return None

    gold = [gold_responses(row.ground_truth, row.extra_info) for row in rows]
    found.form = _best_form(rows[:_TRIED], gold, score)
    if found.errors:
        rows = ()
    last: tuple[str, str] | None = None
    for row, responses in zip(rows, gold, strict=False):
        wrong = score(row, GARBAGE)
        found.garbage += [] if wrong is None else [wrong]
        response = responses.get(found.form or "")
        if response is None:
            continue
        right = score(row, response)
        found.gold += [] if right is None else [right]
        if right is not None and right < HIGH:
            found.low_gold.append(f"{row.where}: {right:g} for {excerpt(response, 120)}")
        truth = repr(row.ground_truth)
        if last is not None and last[0] != truth:
            swapped = score(row, last[1])
            found.other += [] if swapped is None else [swapped]
        last = truth, response
    sender.send(found)


def _best_form(
    rows: Sequence[ScoredRow], gold: Sequence[Mapping[str, str]], score: Callable[[ScoredRow, str], float | None]
) -> str | None:
    """The form in which the right answers of these rows score best; of equals the first."""
    best, best_mean = None, -math.inf
    for form in dict.fromkeys(form for responses in gold for form in responses):
        scores = [score(row, responses[form]) for row, responses in zip(rows, gold, strict=False) if form in responses]
        scores = [value for value in scores if value is not None]
        if scores and mean(scores) > best_mean:
            best, best_mean = form, mean(scores)
        if best_mean >= 1:
            break
    return best


def _number(result: Any) -> float:
    """The score of a result; TypeError or ValueError if it is none, or not finite."""
    if isinstance(result, Mapping):
        if "score" not in result:
            raise TypeError(f"a dict without 'score'; its keys are {', '.join(map(str, result))}")
        result = result["score"]
    if hasattr(result, "item"):
        result = result.item()
    if not isinstance(result, (bool, int, float)):
        raise TypeError(f"{excerpt(result)} of type {type(result).__name__} is no score: return a number, or a dict")
    if not math.isfinite(result):
        raise ValueError(f"the score is {result}; it must be finite")
    return float(result)
