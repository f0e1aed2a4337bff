"""Exit codes of a training run: the class of what ended it, so that a scheduler or a script can tell what to do next.

An exception class names its own in an attribute ``exit_class``. An error without one is classed by its type (memory, a
full disk), by its cause, and by the folder of this package that it was raised in.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from enum import IntEnum


class ExitCode(IntEnum):
    """What ended a run."""

    DONE = 0
    UNEXPECTED = 1
    """None of the classes below: a fault of this package, or of a user's own module."""
    CONFIGURATION = 2
    DATA = 3
    """Data, reward function, environment or tool."""
    CHECKPOINT = 4
    """A checkpoint or a model's files are damaged or missing, or the disk is full or not writable."""
    WORKER = 5
    """A worker, a rollout engine or a server died, or did not answer in time."""
    UNHEALTHY = 6
    """``trainer.halt_on``, numbers that are not finite, or rollout weights that are not the trained ones."""
    MEMORY = 7
    STOPPED_EARLY = 75
    """A signal or a limit of time, with a checkpoint saved; the same command goes on. EX_TEMPFAIL of sysexits.h."""
    INTERRUPTED = 130
    """SIGINT that had to be obeyed at once."""
    TERMINATED = 143
    """SIGTERM that had to be obeyed at once."""

    @property
    def about(self) -> str:
        """The class in a few words."""
        return _ABOUT[self]


_ABOUT = {
    ExitCode.DONE: "complete",
    ExitCode.UNEXPECTED: "unexpected error",
    ExitCode.CONFIGURATION: "configuration",
    ExitCode.DATA: "data or reward",
    ExitCode.CHECKPOINT: "checkpoint, model files or disk",
    ExitCode.WORKER: "a worker died or did not answer",
    ExitCode.UNHEALTHY: "training is unhealthy",
    ExitCode.MEMORY: "out of memory",
    ExitCode.STOPPED_EARLY: "stopped early, checkpoint saved",
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.TERMINATED: "terminated",
}


class StoppedEarly(SystemExit):
    """A run that saved a checkpoint and ended before its last step, as it was told to; the same command goes on."""

    def __init__(self) -> None:
        super().__init__(int(ExitCode.STOPPED_EARLY))


_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_PLACES = {
    "config/": ExitCode.CONFIGURATION,
    "preflight/": ExitCode.CONFIGURATION,
    "data/": ExitCode.DATA,
    "rewards/": ExitCode.DATA,
    "envs/": ExitCode.DATA,
    "tools/": ExitCode.DATA,
    "interactions/": ExitCode.DATA,
    "sandbox/": ExitCode.DATA,
    "checkpoint/": ExitCode.CHECKPOINT,
    "models/loader.py": ExitCode.CHECKPOINT,
    "trainer/run_folder.py": ExitCode.CHECKPOINT,
}

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO}

_NO_MEMORY = ("can't allocate memory", "CUDA out of memory", "Cannot allocate memory")
"""Words of torch and of the system where they raise a plain RuntimeError."""


def exit_code(error: BaseException) -> ExitCode:
    """Return the class of ``error``.

    The first of its causes that has a class decides: an error that stands for another gets that one's.
    """
    if isinstance(error, KeyboardInterrupt):
        return getattr(error, "exit_class", ExitCode.INTERRUPTED)
    for one in _causes(error):
        if code := _own_code(one):
            return code
    for one in _causes(error):
        if code := _code_of_place(one):
            return code
    return ExitCode.UNEXPECTED


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it, without what it only happened to follow."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__


def _own_code(error: BaseException) -> ExitCode | None:
    """The code an error names, or has by its type; None if neither says anything."""
    if code := getattr(error, "exit_class", None):
        code = ExitCode(code)
        return None if code is ExitCode.UNEXPECTED else code
    torch = sys.modules.get("torch")  # not imported for the sake of an exit code
    if isinstance(error, MemoryError) or torch is not None and isinstance(error, torch.OutOfMemoryError):
        return ExitCode.MEMORY
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
        return ExitCode.MEMORY
    if isinstance(error, FloatingPointError):
        return ExitCode.UNHEALTHY
    if isinstance(error, OSError) and error.errno in _DISK:
        return ExitCode.CHECKPOINT
    return ExitCode.MEMORY if isinstance(error, OSError) and error.errno == errno.ENOMEM else None


def _code_of_place(error: BaseException) -> ExitCode | None:
    """The code of the innermost folder that an error went through, of those that belong to one class."""
    tb, code, file = error.__traceback__, None, ""
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        if file.startswith(_ROOT):
            inside = file[len(_ROOT) :].replace(os.sep, "/")
            code = next((code for place, code in _PLACES.items() if inside.startswith(place)), code)
        tb = tb.tb_next
    # preflight imports users' modules: what these raise says nothing of the configuration
    return None if code is ExitCode.CONFIGURATION and not file.startswith(_ROOT) else code
