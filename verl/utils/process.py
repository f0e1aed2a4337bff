"""One process: exit code and last words of a run that cannot continue, its log level, garbage collection at the start.

An error ends with one sentence a user can act on, and with a traceback only where that helps. The log level comes from
the environment variable ``VERL_LOGGING_LEVEL`` (default WARN), as users of verl set it.
"""

from __future__ import annotations

import atexit
import gc
import logging
import opcode
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from verl.utils.exit_codes import ExitCode, exit_code

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


_RAISE = opcode.opmap["RAISE_VARARGS"]


class Terminated(KeyboardInterrupt):
    """SIGTERM, which is answered as Ctrl-C is: what is open gets closed."""

    exit_class = ExitCode.TERMINATED


@contextmanager
def plain_ending() -> Iterator[None]:
    """Wrap a whole program: an error it foresaw ends it with the message alone, as the last thing on the screen.

    The exit code is the class of the error (`verl.utils.exit_codes`); after a signal, and where the reader of the
    output has closed (``| head``), 128 and the signal's number as shells have it. An error that was not foreseen, and
    with VERL_LOGGING_LEVEL=DEBUG every error, has its traceback printed.
    """
    # or the interpreter searches everything for garbage once more when it ends, most of a CPU-second after torch
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    ending: BaseException | None = None
    try:
        yield
    except KeyboardInterrupt as stop:
        ending = SystemExit(int(exit_code(stop)))
    except (SystemExit, BrokenPipeError) as error:
        ending = error
    except Exception as error:
        message, code = explanation(error), exit_code(error)
        shows_traceback = message is None or os.environ.get("VERL_LOGGING_LEVEL", "").upper() == "DEBUG"
        if shows_traceback and code is ExitCode.UNEXPECTED:
            raise
        sys.stdout.flush()
        if shows_traceback:
            traceback.print_exception(error)
        if code not in (ExitCode.UNEXPECTED, ExitCode.CONFIGURATION):
            print(f"exit code {int(code)}: {code.about}", file=sys.stderr)
        if not shows_traceback:
            print(f"error: {message}", file=sys.stderr)
        ending = SystemExit(int(code))
    if not _has_readers():
        raise SystemExit(128 + signal.SIGPIPE) from None
    if ending is not None:
        raise ending


def _has_readers() -> bool:
    """Whether what was printed has been taken; a stream whose reader has gone is closed for good."""
    is_read = True
    for stream in (sys.stdout, sys.stderr):
        try:
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if not any(event & select.POLLERR for _, event in poll.poll(0)):  # the other end of the pipe is open
                stream.flush()
                continue
            is_read = False
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())  # or the interpreter would complain at its end
            os.close(nowhere)
        except (AttributeError, ValueError, OSError):  # there is no such stream, it is closed, or no file of the system
            continue
    return is_read


def explanation(error: BaseException) -> str | None:
    """Return the text of ``error`` for a user, or None if only its traceback helps.

    Errors that verl raises on purpose say what is wrong and what to do. Those are the ones whose innermost frame is a
    ``raise`` in this package; what Python or a library raises beneath it, and a broken ``assert``, were not foreseen.
    An error may have an ``explanation`` of its own: one that stands for an error in another process. A package that
    verl needs and Python does not find is most often a Python that is not the environment's.
    """
    if hasattr(error, "explanation"):
        return error.explanation
    if isinstance(error, AssertionError | LookupError) or error.__traceback__ is None:
        return None
    tb = error.__traceback__
    while tb.tb_next is not None:
        tb = tb.tb_next
    code = tb.tb_frame.f_code
    if not code.co_filename.startswith(_PACKAGE) or code.co_name == "__getattr__":
        return None
    if code.co_code[tb.tb_lasti] == _RAISE:
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return (
            f"{error}, which verl needs, for {sys.executable}. From a checkout: `source .venv/bin/activate` "
            "(`bash scripts/setup_env.sh` makes it); elsewhere install what requirements.txt names."
        )
    return None


# -- garbage collection ------------------------------------------------------------------------------------------------


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage in this block, and never look again at what is alive at its end.

    For imports and loading: a process that starts up makes millions of objects that all stay, and searching them for
    garbage takes a quarter of its CPU time. Later collections, and the end of the process, are quicker too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


# -- loggers with one level for the whole package, and warnings that are given once ----------------------------------

_given: set[str] = set()


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, at the level ``VERL_LOGGING_LEVEL`` names."""
    level = os.getenv("VERL_LOGGING_LEVEL", "WARN").upper()
    if level.isdigit():
        level_number = int(level)
    else:
        level_number = logging.getLevelName(level)
        if not isinstance(level_number, int):
            raise ValueError(
                f"VERL_LOGGING_LEVEL={level} is no logging level. Use DEBUG, INFO, WARN, ERROR, CRITICAL or a number."
            )
    logger = logging.getLogger(name)
    logger.setLevel(level_number)
    return logger


def warn_once(message: str, key: str | None = None) -> bool:
    """Log a warning unless this process has given it already; returns whether it was given now.

    Args:
        message: what the user should know.
        key: what counts as the same warning; default: the message itself.
    """
    key = message if key is None else key
    if key in _given:
        return False
    _given.add(key)
    get_logger("verl").warning(message)
    return True


def forget_warnings() -> None:
    """Let every warning be given again; for tests."""
    _given.clear()


def set_basic_config(level: int) -> None:
    """Format and level of the root logger."""
    logging.basicConfig(format="%(levelname)s:%(asctime)s:%(message)s", level=level)
