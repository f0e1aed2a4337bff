"""Programs run by a sandbox-fusion service: POST to its ``/run_code``, one request a test, several at a time."""

import contextlib
import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.rewards.scorers.http_json import ServiceError, post, slot
from verl.rewards.scorers.matching import code_block
from verl.sandbox.code_runner import MEMORY_MB, Result, Tests, arguments, judge, read_tests, text_of
from verl.sandbox.outcomes import Outcome

THREADS = 16
"""Requests of one program at a time."""

COMPILE_S = 10.0
"""Seconds the service may take to compile a program."""

MARGIN_S = 30.0
"""Seconds after its limits in which the service must have answered: requests wait in its queue."""

CODES = {Outcome.PASSED: True, Outcome.WRONG: False, Outcome.TIMEOUT: -3, Outcome.COMPILE: -4}
"""Outcome -> result code of a test, as users know them; all others are -2, an error at run time."""

# output of the function goes to stderr: stdout holds the token and the value, after what the program printed
_CALL = """

if True:
    import json as _json, sys as _sys
    _give = _sys.stdout
    _sys.stdout = _sys.stderr
    _function = globals().get({name!r}) or getattr(Solution(), {name!r})
    _value = _function(*_json.loads(_sys.stdin.read()))
    _plain = lambda value: sorted(value) if isinstance(value, (set, frozenset)) else repr(value)
    _give.write({token!r} + _json.dumps(_value, default=_plain))
"""


def compute_score(
    sandbox_fusion_url: str,
    concurrent_semaphore: Any,
    memory_limit_mb: int | None,
    completion: str,
    test_cases: Any,
    continuous: bool = False,
    timeout: float = 10,
) -> tuple[float, list[dict]]:
    """The share of the first ten tests that a program passes; without ``continuous`` 1.0 if all pass.

    Returns:
        the score, and for each test ``{"result": True, False, -2, -3 or -4, "outcome", "detail"}``.

    Raises:
        ServiceError: the service gave no usable answer; the program may be right or wrong.
    """
    tests = read_tests(test_cases)
    tests = tests.first(10) if continuous else tests
    memory_mb = memory_limit_mb or MEMORY_MB
    results = run_remotely(sandbox_fusion_url, code_block(completion), tests, timeout, memory_mb, concurrent_semaphore)
    passed = [one.outcome is Outcome.PASSED for one in results]
    details = [
        {"result": CODES.get(one.outcome, -2), "outcome": one.outcome.value, "detail": one.detail} for one in results
    ]
    return (sum(passed) / len(passed) if continuous else float(all(passed))), details


def run_remotely(
    url: str,
    code: str,
    tests: Tests,
    test_s: float,
    memory_mb: int,
    semaphore: Any = None,
    max_concurrent: int | None = None,
    language: str = "python",
) -> list[Result]:
    """Return the result of a program in each of its tests, which the service at ``url`` ran.

    Args:
        semaphore: entered around each request.
        max_concurrent: requests under way at a time, of all processes of this user on this machine.

    Raises:
        ServiceError: the service gave no usable answer.
    """

    def run(number: int) -> Result:
        with (
            semaphore or contextlib.nullcontext(),
            slot(url, max_concurrent) if max_concurrent else contextlib.nullcontext(),
        ):
            return _run_one(url, code, tests, number, test_s, memory_mb, language)

    with ThreadPoolExecutor(min(THREADS, len(tests))) as pool:
        return list(pool.map(run, range(len(tests))))


def _run_one(url: str, code: str, tests: Tests, number: int, test_s: float, memory_mb: int, language: str) -> Result:
    # secret: a program that prints it could pass without having run its test
    # tests are numbered inputs first, then checks
    token, is_check, stdin = f"{secrets.token_hex(8)}:", number >= len(tests.inputs), ""
    if is_check:
        code = f"{code}\n\n{tests.checks[number - len(tests.inputs)]}\nprint({token!r})\n"
    elif tests.fn_name:
        code += _CALL.format(name=tests.fn_name, token=token)
        stdin = json.dumps(arguments(tests.inputs[number]))
    else:
        stdin = text_of(tests.inputs[number])
    answer = post_program(url, code, stdin, test_s, memory_mb, language)
    outcome, output, detail = read_answer(answer, url)
    value = None
    if outcome == "done" and (is_check or tests.fn_name):
        _, has_ended, reply = output.rpartition(token)
        if not has_ended:
            outcome, detail = "crash", detail or "the program ended before its test did"
        elif not is_check:
            value = json.loads(reply)
    found = {"outcome": outcome, "output": output, "value": value, "detail": detail, "seconds": 0.0}
    return judge(found, None if is_check else tests.outputs[number], bool(tests.fn_name), is_check)


def post_program(url: str, code: str, stdin: str, run_s: float, memory_mb: int, language: str) -> Any:
    """Return the service's answer to a program and its input."""
    body = {
        "compile_timeout": COMPILE_S,
        "run_timeout": run_s,
        "code": code,
        "stdin": stdin,
        "memory_limit_MB": memory_mb,
        "language": language,
        "files": {},
        "fetch_files": [],
    }
    return post(url, body, timeout_s=COMPILE_S + run_s + MARGIN_S)


def read_answer(answer: Any, url: str) -> tuple[str, str, str]:
    """Return (outcome, stdout, the end of stderr) of the service's answer.

    Raises:
        ServiceError: the service could not run the program.
    """
    status = answer.get("status") if isinstance(answer, dict) else None
    # "Failed" is a program's failure; any other status is the service's, and tells nothing of the program
    if status not in ("Success", "Failed"):
        message = answer.get("message") if isinstance(answer, dict) else answer
        raise ServiceError("malformed", f"{url} could not run the program: status {status!r}, {str(message)[:300]}")
    compiled, ran = answer.get("compile_result") or {}, answer.get("run_result") or {}
    if compiled and (compiled.get("status") != "Finished" or compiled.get("return_code")):
        return "compile", "", str(compiled.get("stderr") or compiled.get("status"))[-2000:]
    errors = str(ran.get("stderr") or "")[-2000:]
    if ran.get("status") == "TimeLimitExceeded":
        return "timeout", "", errors
    if ran.get("status") != "Finished" or ran.get("return_code"):
        if "SyntaxError" in errors or "IndentationError" in errors:
            return "compile", "", errors
        return "memory" if "MemoryError" in errors else "crash", "", errors
    return "done", str(ran.get("stdout") or ""), errors
