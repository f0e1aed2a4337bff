"""Restarts of a run that lost a process (``trainer.max_restarts``): a parent that waits, and attempts in its children.

The parent holds no model and loads no torch, so whatever ends an attempt, its driver included, leaves it standing. An
attempt starts as the command would: from the newest checkpoint of the run, with the same prompts and seeds.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from verl.checkpoint.manifest import TRACKER
from verl.single_controller.errors import NodesMissing
from verl.single_controller.processes import Child
from verl.telemetry.run_record import say_early
from verl.utils.exit_codes import ExitCode
from verl.utils.process import plain_ending

RESTARTED = (ExitCode.WORKER, ExitCode.MEMORY)
"""Failures that another attempt may not meet; all others would come again."""

_LONGEST_WAIT_S = 600.0

_STEP_BYTES = 8

_step: mmap.mmap | None = None
"""In an attempt: memory shared with the parent, for the number of the step it is in, and a byte after it that is 1 if
it ended for lack of nodes."""


def note_step(step: int) -> None:
    """Tell the parent of this attempt, if there is one, which step has begun."""
    if _step is not None:
        _step[:_STEP_BYTES] = step.to_bytes(_STEP_BYTES, sys.byteorder)


def is_attempt() -> bool:
    """Whether this process is an attempt of a run that may be started again."""
    return _step is not None


def run_with_restarts(config: Any, run: Callable[[Any], None]) -> None:
    """Call ``run(config)`` in a child process; again, from the newest checkpoint, after the loss of a process.

    A step that fails a second time ends the run: what it does, it would do again. An attempt that found too few nodes
    in its cluster is no failed step: each restart waits for them once more. SIGINT and SIGTERM are passed on to the
    attempt, and no other follows.

    Args:
        config: the tree of a run, typed or as a script composed it.

    Raises:
        SystemExit: the last attempt failed; with its exit code.
    """
    global _step
    trainer, failed_in, begin = config.trainer, set[int](), time.monotonic()
    first_wait_s = trainer.restart_wait  # read before the first attempt, which complains of options that nothing reads
    tracker = Path(trainer.default_local_dir).expanduser() / TRACKER
    saved_before = _changed_at(tracker)
    _step = mmap.mmap(-1, _STEP_BYTES + 1)
    with _signals_passed_on() as attempt:
        for number in range(trainer.max_restarts + 1):
            note_step(0)
            _step[_STEP_BYTES] = 0
            has_saved = _changed_at(tracker) != saved_before
            spent = time.monotonic() - begin
            code, how = attempt.run(partial(_start, run, config, has_saved, spent if number else 0.0))
            step, lacked_nodes = int.from_bytes(_step[:_STEP_BYTES], sys.byteorder), bool(_step[_STEP_BYTES])
            if code not in RESTARTED or attempt.stop is not None:
                break
            where = "for lack of nodes" if lacked_nodes else f"in step {step}" if step else "before its first step"
            if step in failed_in and not lacked_nodes:
                say_early(f"the run {how} {where}, for the second time: it is not started again")
                break
            if number == trainer.max_restarts:
                say_early(f"the run {how} {where}, and trainer.max_restarts={trainer.max_restarts} is used up")
                break
            if not lacked_nodes:
                failed_in.add(step)
            seconds = _wait_s(first_wait_s, number)
            start = "its newest checkpoint" if _changed_at(tracker) != saved_before else "where it began"
            say_early(
                f"the run {how} {where}; restart {number + 1} of {trainer.max_restarts} from {start} in {seconds:g} s"
            )
            if not attempt.wait(seconds):
                code = 128 + attempt.stop
                break
    if code:
        raise SystemExit(int(code))


def _wait_s(first_s: float, number: int) -> float:
    """Seconds before restart ``number``, counted from 0."""
    return min(first_s * 2 ** min(number, 60), _LONGEST_WAIT_S)  # 2**1024 is no float


def _changed_at(tracker: Path) -> int | None:
    """When a checkpoint was last completed, in ns; None if none was."""
    with suppress(OSError):
        return tracker.stat().st_mtime_ns
    return None


def _start(run: Callable[[Any], None], config: Any, goes_on: bool, spent_s: float) -> None:
    """Call ``run`` with the tree of an attempt.

    Args:
        goes_on: from the run's own newest checkpoint, wherever its first attempt began.
        spent_s: by earlier attempts; ``trainer.max_time`` is a limit of them all.
    """
    changes: dict[str, Any] = {"trainer.resume_mode": "auto", "trainer.resume_from_path": None} if goes_on else {}
    if spent_s and config.trainer.max_time is not None:
        changes["trainer.max_time"] = max(config.trainer.max_time - spent_s, 1e-3)
    try:
        run(_changed(config, changes))
    except NodesMissing:
        if _step is not None:
            _step[_STEP_BYTES] = 1
        raise


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    if not changes:
        return config
    if hasattr(config, "with_values"):
        return config.with_values(changes)
    from omegaconf import OmegaConf

    for key, value in changes.items():
        OmegaConf.update(config, key, value)  # this process's own copy
    return config


class _Attempt:
    """The child that runs now, and the signal that asked the whole run to stop."""

    def __init__(self) -> None:
        self.stop: int | None = None
        self._child: Child | None = None

    def run(self, action: Callable[[], None]) -> tuple[int, str]:
        """Run ``action`` in a child; return the exit code and the end in words.

        A child that a signal killed counts as a lost worker.
        """
        self._child = Child(lambda: _in_child(action))
        if self.stop is not None:  # it came while the child was forked
            self.pass_on(self.stop)
        number, code = self._child.outcome()
        self._child = None
        if number is None:
            return (ExitCode.UNEXPECTED if code is None else code), f"ended with exit code {code}"
        how = f"was killed by {signal.Signals(number).name}"
        return (128 + number if self.stop is not None else ExitCode.WORKER), how

    def pass_on(self, number: int, frame: Any = None) -> None:
        """Handle a signal to the parent: it is for the attempt."""
        self.stop = number
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.kill(self._child.pid, number)

    def wait(self, seconds: float) -> bool:
        """Wait, unless a signal comes; returns whether none came."""
        deadline = time.monotonic() + seconds
        while self.stop is None and time.monotonic() < deadline:
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
        return self.stop is None


@contextmanager
def _signals_passed_on() -> Iterator[_Attempt]:
    attempt = _Attempt()
    before = {number: signal.signal(number, attempt.pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield attempt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_child(action: Callable[[], None]) -> None:
    """Run an attempt as a program of its own: with its last words, and the exit code of what ended it."""
    code: Any = 0
    try:
        with plain_ending():
            action()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
