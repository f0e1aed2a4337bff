"""Programs run against their tests on this machine: each test in a process of its own under limits.

The second half of this file lives in a child process (`fork_server`), and runs one program on many inputs, each in a
fork. Expected outputs never come there: a program cannot read them off its harness. Tests that are assertions bring
their own.
"""

import contextlib
import json
import math
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from verl.sandbox.fork_server import fork_server
from verl.sandbox.outcomes import Outcome, SandboxError
from verl.sandbox.supervisor import Limits, enter, outcome_of

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
    """Python source run behind the program; it must not raise."""

    def __len__(self) -> int:
        return len(self.checks) + len(self.inputs)

    def first(self, count: int) -> "Tests":
        return Tests(self.inputs[:count], self.outputs[:count], self.fn_name, self.checks[:count])


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
) -> list[Result]:
    """Run a program against each of its tests.

    Args:
        code: Python source.
        test_s, total_s: wall seconds of one test, and of all.
        memory_mb: MiB of one test and all processes it starts.
        output_kb: KiB it may write to stdout.
        number: of the fork server that runs it; programs of one number run one after the other.
    """
    limits = Limits(
        wall_s=test_s, cpu_s=math.ceil(test_s), memory_mb=memory_mb, output_mb=64, processes=PROCESSES, network=False
    )
    if tests.fn_name:
        tasks = [{"call": tests.fn_name, "arguments": arguments(given)} for given in tests.inputs]
    else:
        tasks = [{"stdin": text_of(given)} for given in tests.inputs]
    tasks += [{"check": source} for source in tests.checks]
    # looser than the limits of the tests within: those end one test, and say which; these end all
    call = fork_server("verl.sandbox.code_runner:run", TOTAL_S, memory_mb=8 * 1024, number=number)
    try:
        found = call(code, tasks, asdict(limits), output_kb, total_s, timeout_s=total_s + 10)
    except SandboxError as error:
        outcome = Outcome.TIMEOUT if error.failure.kind is Outcome.TIMEOUT else Outcome.CRASH
        return [Result(outcome, str(error))] * len(tasks)
    expected = [*tests.outputs, *[None] * len(tests.checks)]
    return [
        judge(one, right, bool(tests.fn_name), "check" in task)
        for one, right, task in zip(found, expected, tasks, strict=True)
    ]


def judge(found: dict[str, Any], expected: Any, is_call: bool, is_check: bool) -> Result:
    """Return the result of a test, from the output of the program and the expected one."""
    outcome, detail = Outcome(found["outcome"]), found["detail"]
    if outcome is not Outcome.DONE:
        # an assertion that fails is a wrong answer; its fork can tell by stderr alone
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


# -- Runs one program on many inputs, each in a fork under limits. Lives in a child process (``code_runner.py``) -----


_SHOWN_AS = {Outcome.CPU: Outcome.TIMEOUT, Outcome.EXIT: Outcome.CRASH}

_ERROR_TAIL = 2000
"""Bytes of the end of what a program writes to stderr that are kept."""

_OUT_OF_MEMORY = 99
"""Exit status of a program that raised MemoryError."""


def run(code: str, tests: list[dict[str, Any]], limits: dict[str, Any], output_kb: int, total_s: float) -> list[dict]:
    """Return the result of a program in each test.

    Args:
        code: Python source; compiled once.
        tests: each ``{"stdin": text}``, ``{"call": name, "arguments": [...]}`` or ``{"check": source}``.
        limits: of one test, the fields of :class:`Limits`.
        output_kb: KiB of output after which a test is ended.
        total_s: seconds for all tests; those that find no time left end as ``timeout``.

    Returns:
        for each test ``outcome`` (``done``, ``timeout``, ``memory``, ``processes``, ``crash``, ``output`` or
        ``compile``), ``output`` (text), ``value`` (of a call), ``detail`` (the end of stderr), ``seconds``.
    """
    try:
        program = compile(code, "solution.py", "exec")
        checks = [compile(test["check"], "test.py", "exec") if "check" in test else None for test in tests]
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        # the last two: code nested too deep for the parser
        return [_result("compile", detail=f"{type(error).__name__}: {error}")] * len(tests)
    end = time.monotonic() + total_s
    results = []
    for test, check in zip(tests, checks, strict=True):
        left = end - time.monotonic()
        if left <= 0:
            results.append(_result("timeout", detail=f"no time left of {total_s:g} s for all tests"))
            continue
        wall = min(limits.get("wall_s") or left, left)
        results.append(_run_one(program, check, test, Limits(**{**limits, "wall_s": wall}), output_kb << 10))
    return results


def _result(outcome: str, output: str = "", value: Any = None, detail: str = "", seconds: float = 0.0) -> dict:
    return {"outcome": outcome, "output": output, "value": value, "detail": detail, "seconds": seconds}


def _run_one(program: Any, check: Any, test: dict[str, Any], limits: Limits, output_bytes: int) -> dict:
    folder = tempfile.mkdtemp(prefix="verl-code-")
    token = secrets.token_hex(8)
    (out, out_in), (error, error_in), (answer, answer_in) = os.pipe(), os.pipe(), os.pipe()
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        for fd in (out, error, answer):
            os.close(fd)
        status = 1
        try:
            status = _program(program, check, test, limits, folder, token, (out_in, error_in, answer_in))
        finally:
            os._exit(status)
    for fd in (out_in, error_in, answer_in):
        os.close(fd)
    # later than the supervisor's own deadline: that ends the program, and knows why
    texts, is_too_much = _read({out: output_bytes, error: output_bytes, answer: output_bytes}, limits.wall_s + 2)
    if is_too_much:
        os.kill(pid, signal.SIGTERM)  # the supervisor ends what it watches when it ends
    code = _wait(pid, limits.wall_s + 2)
    shutil.rmtree(folder, ignore_errors=True)
    seconds, detail = time.monotonic() - start, texts[error][-_ERROR_TAIL:].decode(errors="replace")
    if is_too_much:
        return _result("output", detail=f"wrote more than {output_bytes >> 10} KiB", seconds=seconds)
    outcome = Outcome.MEMORY if code == _OUT_OF_MEMORY else outcome_of(code)
    outcome, value = _SHOWN_AS.get(outcome, outcome), None
    if outcome is Outcome.DONE and "stdin" not in test:
        # without the token a program could write a right answer into the pipe and leave before its test
        head, _, reply = texts[answer].decode(errors="replace").partition("\n")
        if head != token or not reply.endswith("\n"):
            outcome, detail = Outcome.CRASH, detail or "the program ended before its test did"
        else:
            value = json.loads(reply)
    return _result(outcome.value, texts[out].decode(errors="replace"), value, detail, seconds)


def _read(limits: dict[int, int], seconds: float) -> tuple[dict[int, bytes], bool]:
    """Read pipes to their ends and close them; returns the bytes, and whether one held more than its limit."""
    texts, waiting, end = dict.fromkeys(limits, b""), set(limits), time.monotonic() + seconds
    try:
        while waiting and (ready := select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))[0]):
            for fd in ready:
                piece = os.read(fd, 1 << 16)
                texts[fd] += piece
                if not piece:
                    waiting.discard(fd)
                elif len(texts[fd]) > limits[fd]:
                    return texts, True
        return texts, False
    finally:
        for fd in limits:
            os.close(fd)


def _wait(pid: int, seconds: float) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# -- in the fork ------------------------------------------------------------------------------------------------------
def _program(
    program: Any, check: Any, test: dict[str, Any], limits: Limits, folder: str, token: str, pipes: tuple[int, int, int]
) -> int:
    """Run the program in this fork, under ``limits``; returns its exit status."""
    out, error, answer = pipes
    given = (
        # not a pipe: above its 64 KiB this process, which is to become the reader, would wait for itself
        os.memfd_create("stdin") if hasattr(os, "memfd_create") else os.open(f"{folder}/.in", os.O_RDWR | os.O_CREAT)
    )
    with os.fdopen(os.dup(given), "wb") as file:
        file.write(test.get("stdin", "").encode())
    os.lseek(given, 0, os.SEEK_SET)
    enter(limits)
    for fd, place in ((given, 0), (out, 1), (error, 2)):
        os.dup2(fd, place)
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder)
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = open(fd, mode, encoding="utf-8", errors="replace", closefd=False)
        vars(sys).update({name: stream, f"__{name}__": stream})
    sys.argv = ["solution.py"]
    # a script's `if __name__ == "__main__"` is to run; of a module with a function to call it is not
    space: dict[str, Any] = {"__name__": "__main__" if "stdin" in test else "solution", "__builtins__": __builtins__}
    reply, status = None, 0
    try:
        exec(program, space)
        reply = _answer(space, check, test)
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except MemoryError:
        return _OUT_OF_MEMORY
    except BaseException:
        traceback.print_exc()
        status = 1
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # closed by the program
            output.flush()
    if reply is not None:
        with os.fdopen(answer, "w") as file:
            file.write(f"{token}\n{reply}\n")
    return status


def _answer(space: dict[str, Any], check: Any, test: dict[str, Any]) -> str | None:
    """JSON of what a call returns; null for assertions that hold; None for a program with input and output."""
    if check is not None:
        exec(check, space)
        return "null"
    if "call" not in test:
        return None
    name = test["call"]
    function = space[name] if name in space else getattr(space["Solution"](), name)
    return json.dumps(function(*test["arguments"]), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return value.tolist() if hasattr(value, "tolist") else repr(value)
