"""Runs one program on many inputs, each in a fork under limits. Lives in a child process (``code_runner.py``).

Expected outputs never come here: a program cannot read them off its harness. Tests that are assertions bring their own.
"""

import json
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from typing import Any

from verl.sandbox.limits import Ending, Limits, enter, how_ended

_OUTCOMES = {
    Ending.WALL: "timeout",
    Ending.CPU: "timeout",
    Ending.MEMORY: "memory",
    Ending.PROCESSES: "processes",
}
_ERROR_TAIL = 2000
"""Bytes of the end of what a program writes to stderr that are kept."""

_OUT_OF_MEMORY = 99
"""Exit status of a program that raised MemoryError."""


def run(code: str, tests: list[dict[str, Any]], limits: dict[str, Any], output_kb: int, total_s: float) -> list[dict]:
    """What became of a program in each test.

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
    texts, is_too_much = _read({out: output_bytes, error: output_bytes, answer: output_bytes}, limits.wall_s + 2)
    if is_too_much:
        os.kill(pid, signal.SIGTERM)  # the keeper ends what it watches when it ends
    code = _wait(pid, limits.wall_s + 2)
    shutil.rmtree(folder, ignore_errors=True)
    seconds, detail = time.monotonic() - start, texts[error][-_ERROR_TAIL:].decode(errors="replace")
    if is_too_much:
        return _result("output", detail=f"wrote more than {output_bytes >> 10} KiB", seconds=seconds)
    ending = how_ended(code)
    outcome = _OUTCOMES.get(ending, "done" if ending is Ending.DONE else "crash")
    outcome = "memory" if code == _OUT_OF_MEMORY else outcome
    value, output = None, texts[out].decode(errors="replace")
    if outcome == "done" and "stdin" not in test:
        told, _, reply = texts[answer].decode(errors="replace").partition("\n")
        if told != token or not reply.endswith("\n"):
            outcome, detail = "crash", detail or "the program ended before its test did"
        else:
            value = json.loads(reply)
    return _result(outcome, output, value, detail, seconds)


def _read(limits: dict[int, int], seconds: float) -> tuple[dict[int, bytes], bool]:
    """Read pipes to their ends; whether one held more than its limit."""
    texts, end = dict.fromkeys(limits, b""), time.monotonic() + seconds
    waiting = set(limits)
    while waiting:
        ready = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))[0]
        if not ready:
            break
        for fd in ready:
            piece = os.read(fd, 1 << 16)
            texts[fd] += piece
            if not piece:
                waiting.discard(fd)
            elif len(texts[fd]) > limits[fd]:
                _close(limits)
                return texts, True
    _close(limits)
    return texts, False


def _close(fds: dict[int, int]) -> None:
    for fd in fds:
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
    """The program's life; its exit status."""
    out, error, answer = pipes
    given = (
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
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.argv = ["solution.py"]
    space: dict[str, Any] = {"__name__": "__main__" if "stdin" in test else "solution", "__builtins__": __builtins__}
    try:
        exec(program, space)
        reply = _answer(space, check, test)
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        _flush()
        return status
    except MemoryError:
        return _OUT_OF_MEMORY
    except BaseException:
        traceback.print_exc()
        _flush()
        return 1
    _flush()
    if reply is not None:
        with os.fdopen(answer, "w") as file:
            file.write(f"{token}\n{reply}\n")
    return 0


def _answer(space: dict[str, Any], check: Any, test: dict[str, Any]) -> str | None:
    """JSON of what a call returns; null for assertions that hold; None for a program with input and output."""
    if check is not None:
        exec(check, space)
        return "null"
    if "call" not in test:
        return None
    function = space.get(test["call"])
    if function is None:
        function = getattr(space["Solution"](), test["call"])
    return json.dumps(function(*test["arguments"]), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (ValueError, OSError):  # closed by the program
            pass
