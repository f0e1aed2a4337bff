"""One run with one fault: in a fork of this process, with what it printed, how it ended and what it left."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.support.runs import overrides
from verl.config.load import load_ppo_config
from verl.utils.process import plain_ending

_PR_SET_CHILD_SUBREAPER = 36

SMALL = {
    "data__train_batch_size": 2,
    "data__max_response_length": 4,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
    "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref__actor__skip_old_log_probs": False,  # faults strike that pass too
    "actor_rollout_ref__rollout__n": 2,
    "reward_model__self_test": "off",
    "trainer__logger": "[file]",
    "trainer__total_training_steps": 2,
    "trainer__unread_keys": "off",
}

APART = {
    "actor_rollout_ref__hybrid_engine": False,
    "actor_rollout_ref__rollout__n_gpus_per_node": 1,
}


@dataclass
class Ending:
    """How a cell ended."""

    code: int
    """Exit code; -N after signal N."""
    text: str
    """What it printed, both streams."""
    strikes: int
    """How often the fault struck."""
    left: list[str]
    """Processes, shared memory and temporary files that it left."""


class Strike:
    """A fault: ``action`` happens at the ``at``-th call of ``owner.name``, in whichever process calls it.

    Args:
        when: looks at the arguments; other calls are not counted.
        times: how often it happens in all, over all processes; 0: at every call from then on.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        action: Callable[..., Any],
        at: int = 1,
        when: Callable[..., bool] = lambda *args, **kwargs: True,
        times: int = 1,
    ):
        self.owner, self.name, self.action = owner, name, action
        self.at, self.when, self.times = at, when, times

    def install(self, marks: Path) -> None:
        """Replace the method or function, in this process and those it forks; ``marks`` gets a byte a strike."""
        method, count = getattr(self.owner, self.name), [0]

        @functools.wraps(method)  # with the registration of a verb
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.when(*args, **kwargs):
                count[0] += 1
                struck = marks.stat().st_size
                if count[0] >= self.at and (not self.times or struck < self.times):
                    with marks.open("ab") as file:
                        file.write(b".")
                    if (result := self.action()) is not None:
                        return result
            return method(*args, **kwargs)

        setattr(self.owner, self.name, call)


# -- what happens ------------------------------------------------------------------------------------------------------


def by(number: int) -> Callable[[], None]:
    """The signal ``number``, to the process that it strikes."""

    def send() -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.01)  # a handler of Python's runs

    return send


def raises(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def leaves() -> None:
    os._exit(0)


def hangs() -> None:
    time.sleep(1000)


def outgrows_its_limit() -> None:
    """Take more memory than this process may have, for real."""
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    torch.ones(1 << 26)


# -- the run -----------------------------------------------------------------------------------------------------------


@functools.lru_cache
def _composed(task: tuple[tuple[str, str], ...], is_apart: bool) -> Any:
    return load_ppo_config(overrides(dict(task), **SMALL, **(APART if is_apart else {})))


def config_of(task: dict[str, str], folder: Path, apart: bool = False, **settings: Any) -> Any:
    """The typed configuration of a cell whose run lies in ``folder``; composed once, since that takes half a second.

    Args:
        apart: whether actor and rollout each have a process of their own, so that a driver is left that can speak.
        settings: of the section ``trainer``.
    """
    values = {"default_local_dir": str(folder / "run"), **settings}
    return _composed(tuple(task.items()), apart).with_values({f"trainer.{name}": it for name, it in values.items()})


def run_cell(config: Any, folder: Path, strike: Strike | None, timeout_s: float = 120.0) -> Ending:
    """Run the main job with a fault.

    Raises:
        TimeoutError: it had not ended after ``timeout_s``, and was killed.
    """
    marks, temporary = folder / "marks", folder / "tmp"
    marks.touch()
    temporary.mkdir()
    _adopt_orphans(True)
    before, shm = _children(), _shared_memory()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _child(config, folder / "output", temporary, strike, marks)
    try:
        code = _await(pid, timeout_s)
        left = [f"process {one}" for one in _left_running(before)]
        left += [f"/dev/shm/{name}" for name in sorted(_shared_memory() - shm) if _is_unused(name)]
        left += [f"temporary {path.name}" for path in temporary.iterdir()]
    finally:
        _adopt_orphans(False)
    return Ending(code, (folder / "output").read_text(errors="replace"), marks.stat().st_size, left)


def _child(config: Any, output: Path, temporary: Path, strike: Strike | None, marks: Path) -> None:
    """The fork: run the job as the command would, and leave with its exit code."""
    code: Any = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        if strike is not None:
            strike.install(marks)
        from verl.trainer.main_ppo import run_ppo

        with plain_ending():
            run_ppo(config)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _await(pid: int, timeout_s: float) -> int:
    """Return the exit code of a child; one that has not ended after ``timeout_s`` is killed, which is an error."""
    deadline = time.monotonic() + timeout_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError(f"the run had not ended after {timeout_s:g} s")
        time.sleep(0.01)


# -- leftovers ---------------------------------------------------------------------------------------------------------


def _adopt_orphans(whether: bool) -> None:
    """Make this process the parent of what a cell leaves, so that it is found whatever session it is in."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0)


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _left_running(before: set[psutil.Process], patience_s: float = 5.0) -> list[str]:
    """Command lines of processes that a cell left; they are ended."""
    deadline = time.monotonic() + patience_s
    while True:
        left = []
        for process in _children() - before:
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(process.pid, os.WNOHANG)
                else:
                    left.append(process)
            except (psutil.NoSuchProcess, ChildProcessError):
                pass
        if not left:
            return []
        if time.monotonic() > deadline:
            shown = [f"{' '.join(process.cmdline())[:80] or process.name()}{_listening(process)}" for process in left]
            for process in left:  # children of this process, by adoption
                process.kill()
            return shown
        time.sleep(0.02)


def _listening(process: psutil.Process) -> str:
    """The ports that a process listens at; a port is left exactly where its process is."""
    ports = [one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return f" listening at {', '.join(map(str, ports))}" if ports else ""


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _is_unused(name: str) -> bool:
    """Whether no process has this segment open: one in use belongs to another run of this machine."""
    for process in psutil.process_iter():
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            descriptors = (os.readlink(entry) for entry in Path(f"/proc/{process.pid}/fd").iterdir())
            if f"/dev/shm/{name}" in maps or any(f"/dev/shm/{name}" in link for link in descriptors):
                return False
        except OSError:
            continue
    return os.path.exists(f"/dev/shm/{name}")
