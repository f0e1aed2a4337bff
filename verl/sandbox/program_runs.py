"""One program in many tests, in forks under limits: the half of ``code_runner.py`` that lives in a child process.

Expected outputs never come here: a program cannot read them off its harness. Tests that are assertions come here, so
the program they are about is a fork that starts an interpreter of its own (`program.py`), and they run in a process
that the program cannot reach (`judging.py`). Each program is contained before its first line runs, or refused
(`containment.py`).
"""

import contextlib
import json
import os
import resource
import secrets
import select
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from verl.sandbox.containment import Outside, contain, python_folders
from verl.sandbox.judging import Check, report
from verl.sandbox.outcomes import Outcome
from verl.sandbox.program import OUT_OF_MEMORY
from verl.sandbox.supervisor import MIB, Limits, die_with_parent, enter, kill_tree, outcome_of, status_of_self

_SHOWN_AS = {Outcome.CPU: Outcome.TIMEOUT, Outcome.EXIT: Outcome.CRASH}

_ERROR_TAIL = 2000
"""Bytes of the end of what a program writes to stderr that are kept."""

UNCONTAINED, UNJUDGEABLE = "uncontained", "unjudgeable"
"""Results of programs that were not run, or not judged; no outcomes."""

_PROGRAM = str(Path(__file__).with_name("program.py"))


def run(
    code: str,
    tests: list[dict[str, Any]],
    limits: dict[str, Any],
    output_kb: int,
    total_s: float,
    allow_uncontained: bool = False,
) -> list[dict]:
    """Return the result of a program in each test.

    Args:
        code: Python source; compiled once.
        tests: each ``{"stdin": text}``, ``{"call": name, "arguments": [...]}`` or the fields of :class:`Check`.
        limits: of one test, the fields of :class:`Limits`.
        output_kb: KiB of output after which a test is ended.
        total_s: seconds for all tests; those that find no time left end as ``timeout``.

    Returns:
        for each test ``outcome`` (``done``, ``wrong``, ``timeout``, ``memory``, ``processes``, ``crash``, ``output`` or
        ``compile``), ``output`` (text), ``value`` (of a call), ``detail`` (the end of stderr), ``seconds``, and
        ``missing``, the names of promises of containment that do not hold. Look at them with `refuse_uncontained`.
    """
    for test in tests:
        try:
            compile(f"{test.get('given', '')}\n{test.get('source', '')}", "test.py", "exec")
        except (SyntaxError, ValueError) as error:
            return [_result(UNJUDGEABLE, detail=f"ground_truth has a test that is no Python: {error}")] * len(tests)
    try:
        program = compile(code, "solution.py", "exec")
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        # the last two: code nested too deep for the parser
        return [_result("compile", detail=f"{type(error).__name__}: {error}")] * len(tests)
    python_folders()  # cached here, for the forks
    end = time.monotonic() + total_s
    results = []
    for test in tests:
        left = end - time.monotonic()
        if left <= 0:
            results.append(_result("timeout", detail=f"no time left of {total_s:g} s for all tests"))
            continue
        own = Limits(**{**limits, "wall_s": min(limits.get("wall_s") or left, left)})
        results.append(_Run(own, output_kb << 10, allow_uncontained).result(code, program, test))
        if results[-1]["outcome"] in (UNCONTAINED, UNJUDGEABLE):
            return results[-1:] * len(tests)
    return results


def _result(outcome: str, output: str = "", value: Any = None, detail: str = "", seconds: float = 0.0) -> dict:
    return {"outcome": outcome, "output": output, "value": value, "detail": detail, "seconds": seconds}


class _Run:
    """One program in one test: its process, that of its judge, and the pipes from them."""

    def __init__(self, limits: Limits, output_bytes: int, allow_uncontained: bool):
        self.limits, self.output_bytes, self.allow_uncontained = limits, output_bytes, allow_uncontained
        self.outside = Outside.here()
        self.folder = tempfile.mkdtemp(prefix="verl-code-")
        self.start = time.monotonic()

    def result(self, code: str, program: Any, test: dict[str, Any]) -> dict:
        """Return the result of a program, given as source and compiled."""
        # the third for the value or the verdict, the fourth for the promises of containment that do not hold
        pipes = [os.pipe() for _ in range(4)]
        (out, out_in), (error, error_in), (answer, answer_in), (told, told_in) = pipes
        token, judge = secrets.token_hex(8), None
        if "source" in test:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                pid = _fork(lambda: self._start_program(ours, theirs, (out_in, error_in, told_in)))
                judge = _fork(lambda: self._judge(Check(**test), code, ours, theirs, answer_in))
        else:
            pid = _fork(lambda: self._program(program, test, token, (out_in, error_in, answer_in, told_in)))
        for _, written in pipes:
            os.close(written)
        sizes = {out: self.output_bytes, error: self.output_bytes, answer: self.output_bytes + MIB, told: MIB}
        # later than the supervisor's own deadline: that ends the program, and knows why
        texts, is_too_much = _read(sizes, self.limits.wall_s + 2)
        if is_too_much:
            kill_tree(pid)
        status = None if is_too_much else _wait(pid, self.limits.wall_s + 2)
        if judge is not None:
            kill_tree(judge)
        shutil.rmtree(self.folder, ignore_errors=True)
        if texts[told].startswith(b"!"):  # no fault of the program's, so no outcome of it
            raise RuntimeError(f"A program could not be started. {texts[told].decode()}")
        missing = texts[told].decode().split()
        if "-" in missing and not self.allow_uncontained:
            return {**_result(UNCONTAINED), "missing": missing[1:]}
        detail = texts[error][-_ERROR_TAIL:].decode(errors="replace")
        if status is None:
            result = _result("output", detail=f"wrote more than {self.output_bytes >> 10} KiB")
        elif "source" in test:
            result = _judged(texts[answer], status, detail)
        else:
            result = _ran(texts[out], texts[answer], status, detail, None if "stdin" in test else token)
        return {**result, "seconds": time.monotonic() - self.start, "missing": missing[1:]}

    # -- in the forks --
    def _enter(self, out: int, error: int, told: int, reads: Iterable[str]) -> bool:
        """Put this process under its limits and contain it; returns whether its program may run."""
        try:
            enter(self.limits, folder=self.folder)
            for fd, place in ((out, 1), (error, 2)):
                os.dup2(fd, place)
            os.chdir(self.folder)
            os.environ.update(HOME=self.folder, TMPDIR=self.folder)
            tempfile.tempdir = None  # of this process: found again by TMPDIR
            missing = contain(self.outside, self.folder, reads)
        except BaseException:
            os.write(told, f"! {traceback.format_exc()}".encode())
            raise
        os.write(told, " ".join(["-" if missing else "+", *missing]).encode())
        os.close(told)
        return not missing or self.allow_uncontained

    def _start_program(self, judges: socket.socket, channel: socket.socket, pipes: tuple[int, int, int]) -> int:
        """Become an interpreter that runs the program which arrives on the channel (``program.py``)."""
        judges.close()  # or the program's supervisor would keep it open, and the program not see its end
        if not self._enter(*pipes, reads=(_PROGRAM,)):
            return 1
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        channel.set_inheritable(True)  # all other files are closed by the start of the interpreter
        folders = python_folders()
        path = [one for one in sys.path if one.startswith(tuple(f"{folder}/" for folder in folders))]
        # -S, -s: no look at site-packages, for a quick start; one order of sets of strings, whoever runs it
        line = [sys.executable, "-S", "-s", _PROGRAM, str(channel.fileno()), ":".join(path)]
        names = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "OMP_NUM_THREADS")
        env = {name: os.environ[name] for name in names if name in os.environ}
        os.execve(sys.executable, line, {**env, "PYTHONHASHSEED": "0"})

    def _judge(self, check: Check, code: str, channel: socket.socket, programs: socket.socket, verdict: int) -> int:
        """Run assertions about the program at the other end of the channel; their text comes from the data."""
        programs.close()
        die_with_parent()
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for place in range(3):
            os.dup2(quiet, place)
        if self.limits.memory_mb is not None:
            most = self.limits.memory_mb * MIB + int(status_of_self("VmData") or 0) * 1024
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        contain(self.outside, self.folder)
        report(check, code, channel, verdict)
        return 0

    def _program(self, program: Any, test: dict[str, Any], token: str, pipes: tuple[int, int, int, int]) -> int:
        """Run the program in this fork; returns its exit status."""
        out, error, answer, told = pipes
        given = (
            # not a pipe: above its 64 KiB this process, which is to become the reader, would wait for itself
            os.memfd_create("stdin")
            if hasattr(os, "memfd_create")
            else os.open(f"{self.folder}/.in", os.O_RDWR | os.O_CREAT)
        )
        with os.fdopen(os.dup(given), "wb") as file:
            file.write(test.get("stdin", "").encode(errors="surrogatepass"))
        os.lseek(given, 0, os.SEEK_SET)
        if not self._enter(out, error, told, reads=()):
            return 1
        os.dup2(given, 0)
        os.dup2(answer, 3)
        os.closerange(4, 1 << 16)  # above all the channel of this fork server, into which a program could write results
        for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
            stream = open(fd, mode, encoding="utf-8", errors="replace", closefd=False)
            vars(sys).update({name: stream, f"__{name}__": stream})
        return _execute(program, test, token)


def _fork(work: Callable[[], int]) -> int:
    """Return the pid of a fork that does some work and exits with the status it returns."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = work()
        finally:
            os._exit(status)
    return pid


def _ran(output: bytes, answer: bytes, status: int, detail: str, token: str | None) -> dict:
    """Return the result of a program that has ended; ``token``: of one whose function was called."""
    outcome = Outcome.MEMORY if status == OUT_OF_MEMORY else outcome_of(status)
    outcome, value = _SHOWN_AS.get(outcome, outcome), None
    if outcome is Outcome.DONE and token is not None:
        # without the token a program could write an answer into the pipe and leave before its test
        head, _, reply = answer.decode(errors="replace").partition("\n")
        try:
            value = json.loads(reply) if head == token and reply.endswith("\n") else None
            is_answered = head == token and reply.endswith("\n")
        except (ValueError, RecursionError):  # written by the program itself
            is_answered = False
        if not is_answered:
            outcome, detail = Outcome.CRASH, detail or "the program ended before its test did"
    return _result(outcome.value, output.decode(errors="replace"), value, detail)


def _judged(answer: bytes, status: int, detail: str) -> dict:
    """Return the result of a program about which assertions were run, from the judge's verdict."""
    try:
        verdict = json.loads(answer)
    except ValueError:  # it was ended: the time was up
        verdict = {"outcome": "ended", "detail": "the test did not end in time"}
        status = status or -9
    kind, detail = verdict["outcome"], detail or verdict["detail"]
    if kind == "ended":
        outcome = Outcome.MEMORY if status == OUT_OF_MEMORY else outcome_of(status)
        kind = (Outcome.CRASH if outcome is Outcome.DONE else _SHOWN_AS.get(outcome, outcome)).value
    return _result(kind, detail=verdict["detail"] if kind in (UNJUDGEABLE, "wrong") else detail)


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
    return kill_tree(pid)


def _execute(program: Any, test: dict[str, Any], token: str) -> int:
    """Run a compiled program, and call its function if that is the test; returns its exit status."""
    sys.argv = ["solution.py"]
    # a script's `if __name__ == "__main__"` is to run; of a module with a function to call it is not
    space: dict[str, Any] = {"__name__": "__main__" if "stdin" in test else "solution", "__builtins__": __builtins__}
    reply, status = None, 0
    try:
        exec(program, space)
        reply = _answer(space, test)
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except MemoryError:
        return OUT_OF_MEMORY
    except BaseException:
        traceback.print_exc()
        status = 1
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # closed by the program
            output.flush()
    if reply is not None:
        with os.fdopen(3, "w") as file:
            file.write(f"{token}\n{reply}\n")
    return status


def _answer(space: dict[str, Any], test: dict[str, Any]) -> str | None:
    """JSON of what a call returns; None for a program with input and output."""
    if "call" not in test:
        return None
    name = test["call"]
    function = space[name] if name in space else getattr(space["Solution"](), name)
    return json.dumps(function(*test["arguments"]), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return value.tolist() if hasattr(value, "tolist") else repr(value)
