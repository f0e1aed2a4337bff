"""Programs against their tests, on this machine: each test in a process of its own with limits, outcomes with names."""

import enum
import json
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from verl.sandbox.killable import Killed, killable
from verl.sandbox.limits import Limits

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


class Outcome(str, enum.Enum):
    """What became of a program in one test."""

    PASSED = "passed"
    WRONG = "wrong"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    PROCESSES = "processes"
    CRASH = "crash"
    OUTPUT = "output"
    COMPILE = "compile"


@dataclass(frozen=True)
class Result:
    """One test of one program."""

    outcome: Outcome
    detail: str = ""
    """What it wrote to stderr last, or what was expected and found."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Tests:
    """What a program is tested with: either input and output (or calls and values), or assertions."""

    __test__ = False  # no test of pytest's

    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    fn_name: str | None = None
    """The function to call; None: the program reads stdin and writes stdout."""
    checks: tuple[str, ...] = ()
    """Python source run behind the program; it must not raise."""

    def __len__(self) -> int:
        return len(self.checks) + len(self.inputs)

    def first(self, count: int) -> "Tests":
        return Tests(self.inputs[:count], self.outputs[:count], self.fn_name, self.checks[:count])


def read_tests(ground_truth: Any) -> Tests:
    """Tests of ``{"inputs": [...], "outputs": [...], "fn_name": ..., "assert_case": [...]}``, as JSON or dict.

    Raises:
        ValueError: it is none, or has no tests.
    """
    if isinstance(ground_truth, str):
        return _parse(ground_truth)
    return _tests(ground_truth)


@lru_cache(maxsize=1024)
def _parse(text: str) -> Tests:
    try:
        return _tests(json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"ground_truth={text[:200]!r} is no JSON ({error}): write {{'inputs': [...], ...}}.") from None


def _tests(cases: Any) -> Tests:
    cases = cases if isinstance(cases, dict) else {}
    inputs, outputs = (tuple(cases.get(name) if cases.get(name) is not None else ()) for name in ("inputs", "outputs"))
    checks = tuple(cases.get("assert_case") or ())
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
) -> list[Result]:
    """Run a program against each of its tests.

    Args:
        code: Python source.
        test_s, total_s: wall seconds of one test, and of all.
        memory_mb: MiB of one test and all processes it starts.
        output_kb: KiB it may write to stdout.
    """
    limits = Limits(
        wall_s=test_s, cpu_s=math.ceil(test_s), memory_mb=memory_mb, output_mb=64, processes=PROCESSES, network=False
    )
    if tests.fn_name:
        tasks = [{"call": tests.fn_name, "arguments": arguments(given)} for given in tests.inputs]
    else:
        tasks = [{"stdin": text_of(given)} for given in tests.inputs]
    tasks += [{"check": source} for source in tests.checks]
    call = killable("verl.sandbox.code_child:run", TOTAL_S, memory_mb=8 * 1024)
    try:
        found = call(code, tasks, asdict(limits), output_kb, total_s, timeout_s=total_s + 10)
    except Killed as killed:
        outcome = Outcome.TIMEOUT if killed.reason == "timeout" else Outcome.CRASH
        return [Result(outcome, str(killed))] * len(tasks)
    expected = [*tests.outputs, *[None] * len(tests.checks)]
    return [
        judge(one, wanted, bool(tests.fn_name), "check" in task)
        for one, wanted, task in zip(found, expected, tasks, strict=True)
    ]


def judge(found: dict[str, Any], wanted: Any, is_call: bool, is_check: bool) -> Result:
    """The result of a test, from what a program did and what was wanted of it."""
    seconds = found["seconds"]
    if found["outcome"] != "done":
        outcome = Outcome(found["outcome"])
        if is_check and outcome is Outcome.CRASH and "AssertionError" in found["detail"]:
            outcome = Outcome.WRONG
        return Result(outcome, found["detail"], seconds)
    if is_check:
        return Result(Outcome.PASSED, seconds=seconds)
    is_right = same_value(found["value"], wanted) if is_call else same_output(found["output"], text_of(wanted))
    if is_right:
        return Result(Outcome.PASSED, seconds=seconds)
    shown = repr(found["value"]) if is_call else found["output"]
    return Result(Outcome.WRONG, f"expected {text_of(wanted)[:200]!r}, found {shown[:200]!r}", seconds)


def same_output(found: str, wanted: str) -> bool:
    """Whether two texts have the same lines, but for spaces around them and blank lines at the end.

    Where a decimal number is wanted, one that differs by less than 1e-6, or that part of it, will do.
    """
    lines, expected = ([" ".join(line.split()) for line in text.strip().splitlines()] for text in (found, wanted))
    if lines == expected:
        return True
    if len(lines) != len(expected) or "." not in wanted:
        return False
    pairs = [(one.split(), other.split()) for one, other in zip(lines, expected, strict=True)]
    return all(len(one) == len(other) and all(map(_same_token, one, other)) for one, other in pairs)


def _same_token(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    try:
        return "." in wanted and math.isclose(float(found), float(wanted), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


def same_value(found: Any, wanted: Any) -> bool:
    """Whether a function returned what it should; some data sets put the value into a list of one."""
    wanted = (
        json.loads(wanted) if isinstance(wanted, str) and _is_json(wanted) and not isinstance(found, str) else wanted
    )
    if _equal(found, wanted):
        return True
    if isinstance(wanted, str) and isinstance(found, str) and _is_json(wanted):
        return found == json.loads(wanted)
    return isinstance(wanted, (list, tuple)) and len(wanted) == 1 and _equal(found, wanted[0])


def _equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, (list, tuple)):
        is_list = isinstance(found, list) and len(found) == len(wanted)
        return is_list and all(map(_equal, found, wanted))
    if isinstance(wanted, dict):
        wanted = {str(key): value for key, value in wanted.items()}
        return (
            isinstance(found, dict)
            and found.keys() == wanted.keys()
            and all(_equal(found[k], wanted[k]) for k in wanted)
        )
    if isinstance(wanted, float) and isinstance(found, (int, float)) and not isinstance(found, bool):
        return math.isclose(found, wanted, rel_tol=1e-6, abs_tol=1e-6)
    return type(found) is type(wanted) and found == wanted or isinstance(found, float) and found == wanted


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
