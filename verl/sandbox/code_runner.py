"""Programs run against their tests on this machine: each test in a process of its own under limits.

What a program prints or returns is compared with the expected here, in the process that calls :func:`run_tests`; it
runs in a fork of a child process of it (`program_runs.py`).
"""

import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from typing import Any

from verl.sandbox.containment import PROMISES, Uncontained, is_allowed
from verl.sandbox.fork_server import fork_server
from verl.sandbox.judging import Check, Unjudgeable
from verl.sandbox.outcomes import Outcome, SandboxError
from verl.sandbox.program_runs import UNCONTAINED, UNJUDGEABLE
from verl.sandbox.supervisor import Limits

logger = logging.getLogger(__name__)

TEST_S = 10.0
"""Wall seconds of one test."""

TOTAL_S = 40.0
"""Wall seconds of all tests of a program."""

MEMORY_MB = 1024
"""MiB of one program."""

OUTPUT_KB = 8192
"""KiB a program may write."""

PROCESSES = 16
"""Processes of one program at a time."""

PROGRAM_OUTCOMES = frozenset(
    {
        *(Outcome.PASSED, Outcome.WRONG, Outcome.TIMEOUT, Outcome.MEMORY),
        *(Outcome.PROCESSES, Outcome.CRASH, Outcome.OUTPUT, Outcome.COMPILE),
    }
)
"""Outcomes of a program in one test; of a crash and an exit with a code other than 0 a user sees ``crash``."""


@dataclass(frozen=True)
class Result:
    """One test of one program."""

    outcome: Outcome
    detail: str = ""
    """The end of stderr, or the expected and the actual output."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Tests:
    """Tests of a program: either input and output (or calls and values), or assertions."""

    __test__ = False  # no test of pytest's

    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    fn_name: str | None = None
    """The function to call; None: the program reads stdin and writes stdout."""
    checks: tuple[str, ...] = ()
    """Python source about the program; it must not raise."""
    entry: str | None = None
    """The only function that ``checks`` take from the program; None: every name that they do not define."""
    given: str = ""
    """Source of the task, run before each of ``checks``: imports and helpers that are not the program's."""

    def __len__(self) -> int:
        return len(self.checks) + len(self.inputs)

    def first(self, count: int) -> "Tests":
        return replace(self, inputs=self.inputs[:count], outputs=self.outputs[:count], checks=self.checks[:count])


def read_tests(ground_truth: Any) -> Tests:
    """Tests of ``{"inputs": [...], "outputs": [...], "fn_name": ..., "assert_case": [...]}``, as JSON or dict.

    Raises:
        ValueError: it is not of this form, or has no tests.
    """
    return _parse(ground_truth) if isinstance(ground_truth, str) else _tests(ground_truth)


@lru_cache(maxsize=1024)  # all responses to a prompt bring the same text
def _parse(text: str) -> Tests:
    try:
        return _tests(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"ground_truth={text[:200]!r} is no JSON ({error}): write {{'inputs': [...], ...}}.") from None


def _tests(cases: Any) -> Tests:
    cases = cases if isinstance(cases, dict) else {}
    checks, inputs, outputs = (
        tuple(() if cases.get(name) is None else cases[name]) for name in ("assert_case", "inputs", "outputs")
    )
    # assertions bring their own inputs: others next to them are not run
    if checks:
        inputs = outputs = ()
    if len(inputs) != len(outputs) or not (checks or inputs):
        raise ValueError(
            f"ground_truth has {len(inputs)} inputs, {len(outputs)} outputs and {len(checks)} assertions: it needs as "
            'many outputs as inputs, and at least one test: {"inputs": [...], "outputs": [...]} or '
            '{"assert_case": [...]}.'
        )
    return Tests(inputs, outputs, cases.get("fn_name") or None, checks)


def run_tests(
    code: str,
    tests: Tests,
    test_s: float = TEST_S,
    total_s: float = TOTAL_S,
    memory_mb: int = MEMORY_MB,
    output_kb: int = OUTPUT_KB,
    number: int = 0,
    allow_uncontained: bool | None = None,
) -> list[Result]:
    """Run a program against each of its tests.

    Args:
        code: Python source.
        test_s, total_s: wall seconds of one test, and of all.
        memory_mb: MiB of one test and all processes it starts.
        output_kb: KiB it may write to stdout.
        number: of the fork server that runs it; programs of one number run one after the other.
        allow_uncontained: run it where this system cannot contain it, too; None: if the environment allows it.

    Raises:
        Uncontained: this system cannot contain it.
        Unjudgeable: an assertion is no Python, or hands the program objects that are no data.
    """
    limits = Limits(
        wall_s=test_s, cpu_s=math.ceil(test_s), memory_mb=memory_mb, output_mb=64, processes=PROCESSES, network=False
    )
    if tests.fn_name:
        tasks = [{"call": tests.fn_name, "arguments": arguments(given)} for given in tests.inputs]
    else:
        tasks = [{"stdin": text_of(given)} for given in tests.inputs]
    tasks += [asdict(Check(source, tests.entry, tests.given)) for source in tests.checks]
    # looser than the limits of the tests within: those end one test, and say which; these end all
    call = fork_server("verl.sandbox.program_runs:run", TOTAL_S, memory_mb=8 * 1024, number=number)
    try:
        allow = is_allowed() if allow_uncontained is None else allow_uncontained
        found = call(code, tasks, asdict(limits), output_kb, total_s, allow, timeout_s=total_s + 10)
    except SandboxError as error:
        if error.failure.kind is Outcome.RAISED:  # here, not in the program
            raise
        outcome = Outcome.TIMEOUT if error.failure.kind is Outcome.TIMEOUT else Outcome.CRASH
        return [Result(outcome, str(error))] * len(tasks)
    refuse_uncontained(found)
    expected = [*tests.outputs, *[None] * len(tests.checks)]
    return [
        judge(one, right, bool(tests.fn_name), "source" in task)
        for one, right, task in zip(found, expected, tasks, strict=True)
    ]


def refuse_uncontained(found: Iterable[Mapping[str, Any]]) -> None:
    """Raise `Uncontained` if a program of these results was refused; warn, once, of one that ran all the same."""
    for one in found:
        if one["outcome"] == UNJUDGEABLE:
            raise Unjudgeable(one["detail"])
        if one["outcome"] == UNCONTAINED:
            raise Uncontained(one["missing"])
        if one.get("missing"):
            _warn_uncontained(tuple(one["missing"]))


@cache
def _warn_uncontained(missing: tuple[str, ...]) -> None:
    promises = "; ".join(f"{name} ({PROMISES[name]})" for name in missing)
    logger.warning("Generated programs run without full containment, as was allowed. Not promised: %s.", promises)


def judge(found: dict[str, Any], expected: Any, is_call: bool, is_check: bool) -> Result:
    """Return the result of a test, from the output of the program and the expected one."""
    outcome, detail = Outcome(found["outcome"]), found["detail"]
    if outcome is not Outcome.DONE:
        # an assertion that fails behind a program of a service: stderr alone tells
        is_wrong = is_check and outcome is Outcome.CRASH and "AssertionError" in detail
        return Result(Outcome.WRONG if is_wrong else outcome, detail, found["seconds"])
    shown = repr(found["value"]) if is_call else found["output"]
    if is_check or (same_value(found["value"], expected) if is_call else same_output(shown, text_of(expected))):
        return Result(Outcome.PASSED, seconds=found["seconds"])
    detail = f"expected {text_of(expected)[:200]!r}, found {shown[:200]!r}"
    return Result(Outcome.WRONG, detail, found["seconds"])


def same_output(found: str, expected: str) -> bool:
    """Whether two texts have the same lines, but for spaces around them and blank lines at the end.

    Where a decimal number is expected, one that differs by less than 1e-6, or that part of it, will do.
    """
    ours, theirs = ([line.split() for line in text.strip().splitlines()] for text in (found, expected))
    if ours == theirs:
        return True
    if "." not in expected or list(map(len, ours)) != list(map(len, theirs)):
        return False
    pairs = ((one, other) for line, its in zip(ours, theirs, strict=True) for one, other in zip(line, its, strict=True))
    return all(_same_token(one, other) for one, other in pairs)


def _same_token(found: str, expected: str) -> bool:
    try:
        return found == expected or "." in expected and _close(float(found), float(expected))
    except ValueError:
        return False


def _close(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-6)


def same_value(found: Any, expected: Any) -> bool:
    """Whether a function returned what it should; some data sets put the value into a list of one."""
    parsed = json.loads(expected) if isinstance(expected, str) and _is_json(expected) else expected
    if isinstance(found, str):  # text that reads as JSON may be meant as it is
        return found == expected or found == parsed or isinstance(expected, (list, tuple)) and [found] == [*expected]
    return _equal(found, parsed) or isinstance(parsed, (list, tuple)) and len(parsed) == 1 and _equal(found, parsed[0])


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, (list, tuple)):
        return isinstance(found, list) and len(found) == len(expected) and all(map(_equal, found, expected))
    if isinstance(expected, dict):
        expected = {str(key): value for key, value in expected.items()}
        has_keys = isinstance(found, dict) and found.keys() == expected.keys()
        return has_keys and all(_equal(found[key], value) for key, value in expected.items())
    if isinstance(expected, float) and isinstance(found, (int, float)) and not isinstance(found, bool):
        return _close(found, expected)
    # Python has True == 1: types must agree, unless a float came out as a whole number
    return (type(found) is type(expected) or isinstance(found, float)) and found == expected


def arguments(given: Any) -> list[Any]:
    """Arguments of a call: a list, or text with one JSON value a line."""
    if isinstance(given, str):
        return [json.loads(line) if _is_json(line) else line for line in given.splitlines() if line.strip()]
    return list(given)


def text_of(given: Any) -> str:
    """Input or output as text; some data sets keep it as a list of lines."""
    if isinstance(given, (list, tuple)):
        return "\n".join(map(str, given))
    return given if isinstance(given, str) else str(given)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
