"""Outcomes of untrusted code: a score, or a failure of a named kind. Standard library only, and quick to import."""

import enum
import math
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# modules between the caller and the user's function: their frames tell a user nothing
_CALLERS = (
    "verl.rewards.managers",
    "verl.rewards.functions",
    "verl.utils.py_functional",
    "verl.sandbox",
    "verl.envs.worker",
    "asyncio",
    "concurrent",
)


class Outcome(str, enum.Enum):
    """Outcome of a call, or of a program in a test.

    The value is the last part of the metric ``reward/errors/<kind>``, and the column ``outcome`` of code scorers.
    """

    DONE = "done"
    """It ended by itself, with exit code 0."""

    PASSED = "passed"
    """A program passed its test."""

    WRONG = "wrong"
    """A program ran, and its output or value is not the expected one."""

    COMPILE = "compile"
    """A program is no Python."""

    RAISED = "raised"
    """It raised an exception."""

    TIMEOUT = "timeout"
    """It took too long by the clock, and was ended."""

    CPU = "cpu"
    """It used too many CPU seconds."""

    MEMORY = "memory"
    """It asked for too much memory, or held too much."""

    OUTPUT = "output"
    """It printed too much."""

    PROCESSES = "processes"
    """It had too many processes at a time."""

    EXIT = "exit"
    """It ended its process: ``sys.exit``, ``os._exit``."""

    CRASH = "crash"
    """Its process was ended by a signal: a segmentation fault, an abort, a kill."""

    WRONG_TYPE = "wrong_type"
    """The returned value is no score."""

    NOT_FINITE = "not_finite"
    """It returned NaN or an infinity."""

    WRONG_COUNT = "wrong_count"
    """Called with a batch, it returned another number of scores."""


@dataclass(frozen=True)
class Failure:
    """Cause of a call without a score."""

    kind: Outcome
    cause: str
    """The cause; its first line names it."""

    trace: str = ""
    """Stack of the user's code, if it is known."""

    @classmethod
    def of(cls, error: BaseException, kind: Outcome | None = None) -> "Failure":
        """Return the failure for an exception; its trace begins with the first frame of the user's code."""
        if kind is None:
            is_exit, is_memory = isinstance(error, SystemExit), isinstance(error, MemoryError)
            kind = Outcome.EXIT if is_exit else Outcome.MEMORY if is_memory else Outcome.RAISED
        cause = "".join(traceback.format_exception_only(type(error), error)).strip()
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_CALLERS):
            frames = frames.tb_next  # the first outside the packages that call reward functions
        trace = "".join(traceback.format_exception(type(error), error, frames)) if frames else ""
        if len(trace) > 8000:  # of an endless recursion, for example
            trace = f"{trace[:4000]}\n ...\n{trace[-4000:]}"
        return cls(kind, cause, trace)


@dataclass(frozen=True)
class Scored:
    """Score of a call, and the columns it returned with it, score included; None if it returned a number."""

    score: float
    columns: Mapping[str, Any] | None = None


class SandboxError(RuntimeError):
    """A call in a sandbox failed."""

    def __init__(self, failure: Failure):
        super().__init__(f"{failure.cause}\n{failure.trace}".strip())
        self.failure = failure


class NotCalled:
    """Outcome of a call that was not made, since too many others had failed."""


def scored(result: Any) -> Scored | Failure:
    """Return the result of a reward function as a number with its columns, or a failure."""
    if type(result) is float and math.isfinite(result):
        return Scored(result)
    try:
        return Scored(to_number(result), result if isinstance(result, Mapping) else None)
    except TypeError as error:
        return Failure.of(error, Outcome.WRONG_TYPE)
    except ValueError as error:
        return Failure.of(error, Outcome.NOT_FINITE)


def scored_batch(results: Any, count: int) -> list[Scored | Failure]:
    """Return the results of a reward function for ``count`` responses at once."""
    # an array of numpy or torch, neither of which is imported here
    if hasattr(results, "tolist"):
        results = results.tolist()
    elif isinstance(results, Iterable) and not isinstance(results, (str, bytes, bytearray, Mapping)):
        results = list(results)
    if not isinstance(results, list):
        problem = f"the function returned {shown(results)} of type {type(results).__name__}; it must return a list"
        return [Failure(Outcome.WRONG_TYPE, f"TypeError: {problem} of {count} scores")] * count
    if len(results) != count:
        cause = f"ValueError: the function returned {len(results)} scores for {count} responses"
        return [Failure(Outcome.WRONG_COUNT, cause)] * count
    return [scored(result) for result in results]


def to_number(result: Any) -> float:
    """The score of a reward function's result.

    Raises:
        TypeError: it is neither a number nor a dict with one under ``score``.
        ValueError: it is not finite.
    """
    score = result
    if isinstance(result, Mapping):
        if "score" not in result:
            names, more = ", ".join(map(str, list(result)[:20])), len(result) - 20
            raise TypeError(
                f"the function returned a dict without 'score'; its keys are {names}"
                + (f" and {more} more" if more > 0 else "")
            )
        score = result["score"]
    score = plain_number(score)
    if not isinstance(score, (float, int)):  # bool is an int
        raise TypeError(
            f"the function returned {shown(score)} of type {type(score).__name__}; a score is a float, an int, "
            "a bool, or a dict that holds one under 'score'"
        )
    try:
        number = float(score)
    except OverflowError:  # an int beyond the range of floats
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"the function returned {number}; a score must be finite")
    return number


def shown(value: Any) -> str:
    """Return an excerpt of a value's ``repr``, which is the user's code and may fail."""
    from verl.utils.py_functional import excerpt  # imports asyncio, which a supervisor's start has no time for

    try:
        return excerpt(value)
    except Exception as error:
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"


def plain_number(value: Any) -> Any:
    """A number of numpy or torch, or an array with one element, as Python's own; anything else as it is."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and hasattr(value, "item") and math.prod(shape) == 1:
        return value.item()
    return value
