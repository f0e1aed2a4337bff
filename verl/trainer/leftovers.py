"""What a run that was killed left on this machine, found and removed: ``verl clean RUN``.

Processes are known by a variable that the run gives to all it starts, Ray's by the files of their session. Nothing is
touched while the run holds the lock of its folder.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from verl.telemetry.memory import process_state
from verl.telemetry.run_record import LOCK
from verl.trainer.run_folder import RUN_VARIABLE

_TEMPORARY = ("verl-code-", "verl-agent-", "verl-sglang-")
_SEGMENTS = ("psm_", "torch_", "sem.mp-", "nccl-", "sglang", "vllm")
_SERVERS = "rollout_servers.json"
_UPLOADS = "wandb"
_END_S = 3.0


class RunIsAlive(ValueError):
    """The run of a folder has not ended, or ran on another machine."""


@dataclass(frozen=True)
class Leftover:
    """One thing that is left. ``kind``: process, folder, file or shared memory."""

    kind: str
    path: str
    """Its path, or the number of the process."""
    about: str = ""
    stays: str = ""
    """Why it is not removed; empty: it is."""

    def __str__(self) -> str:
        text = f"{self.kind} {self.path}" + (f": {self.about}" if self.about else "")
        return f"{text} (stays: {self.stays})" if self.stays else text


# -- the processes of this user ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Process:
    pid: int
    command: str
    environment: tuple[bytes, ...]
    files: frozenset[str]
    """Paths it has open, mapped, or is in."""


def _processes() -> list[_Process]:
    """Processes of this user, without this one and those it stems from."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [found for name in filter(str.isdigit, os.listdir("/proc")) if (found := _process(int(name), own))]


def _process(pid: int, own: set[int]) -> _Process | None:
    root = f"/proc/{pid}"
    try:
        if pid in own or os.stat(root).st_uid != os.getuid():
            return None
        if process_state(pid) in (None, "Z"):
            return None
        links = [f"{root}/cwd", *(f"{root}/fd/{name}" for name in os.listdir(f"{root}/fd"))]
    except OSError:  # it has ended
        return None
    files = set()
    for link in links:
        with contextlib.suppress(OSError):
            files.add(os.readlink(link))
    files.update(line.split(None, 5)[-1].decode(errors="replace") for line in _read(f"{root}/maps").splitlines())
    command = _read(f"{root}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return _Process(pid, command, tuple(_read(f"{root}/environ").split(b"\0")), frozenset(files))


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _uses(process: _Process, path: str) -> bool:
    inside = f"{path}/"
    is_named = any(path.encode() in value for value in process.environment) or path in process.command
    return is_named or any(file == path or file.startswith(inside) for file in process.files)


# -- what is left ------------------------------------------------------------------------------------------------------


def owner_of(folder: Path) -> dict[str, Any]:
    """Return host, pid and start of the run that was killed; empty if it ended by itself, or there was none.

    Raises:
        RunIsAlive: it holds its lock, or ran on another machine.
    """
    try:
        handle = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return {}
    try:
        text = os.read(handle, 1 << 16).decode(errors="replace")
        try:
            owner = json.loads(text) if text else {}
        except ValueError:
            owner = {}
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
            raise RunIsAlive(f"{folder}: the run has not ended: {who}. End it, or wait for it.") from error
    finally:
        os.close(handle)
    if owner and owner.get("host") != socket.gethostname():
        raise RunIsAlive(f"{folder}: the run was on {owner.get('host')}. Run `verl clean {folder}` there.")
    return owner


def find(folder: Path, with_segments: bool = False) -> Iterator[Leftover]:
    """Yield what the run of ``folder`` left, in the order in which it is removed.

    Args:
        with_segments: shared memory that nobody uses counts as the run's to remove. A container that shares /dev/shm
            may use it unseen.

    Raises:
        RunIsAlive: as `owner_of`.
    """
    folder = folder.expanduser().absolute()
    owner, processes = owner_of(folder), _processes()
    variable = f"{RUN_VARIABLE}={folder}".encode()
    begin = _begin(owner)
    sessions = list(_ray_sessions(owner, begin))
    for process in processes:
        # Ray's agents have overwritten their environment with their names
        is_ray = process.command.startswith("ray::") and any(_uses(process, str(session)) for session in sessions)
        if is_ray or variable in process.environment:
            stays = "it may be uploading what it has" if _UPLOADS in process.command else ""
            yield Leftover("process", str(process.pid), process.command[:100], stays)
    for session in sessions:
        yield Leftover("folder", str(session), "session of Ray")
    if (servers := folder / _SERVERS).exists():
        yield Leftover("file", str(servers), "addresses of rollout servers")
    if begin is None:
        return
    others = [process for process in processes if variable not in process.environment]
    for path in sorted(Path(tempfile.gettempdir()).glob("verl-*")):
        if path.name.startswith(_TEMPORARY) and _is_unused(path, begin, others):
            yield Leftover("folder", str(path), "temporary")
    for path in sorted(Path("/dev/shm").glob("*")):
        if path.name.startswith(_SEGMENTS) and _is_unused(path, begin, others):
            stays = "" if with_segments else "another container may use it; --shared-memory removes it"
            yield Leftover("shared memory", str(path), f"{path.stat().st_size >> 20} MiB", stays)


def _begin(owner: dict[str, Any]) -> float | None:
    """When the killed run began, in seconds since 1970."""
    try:
        return time.mktime(time.strptime(owner["started"][:19], "%Y-%m-%d %H:%M:%S"))
    except (KeyError, ValueError, TypeError):
        return None


def _ray_sessions(owner: dict[str, Any], begin: float | None) -> Iterator[Path]:
    """The folders of Ray's sessions that the killed driver started: their names end with its number."""
    if begin is None:
        return
    root = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray"
    for path in root.glob(f"session_*_{owner.get('pid')}"):
        if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid() and _changed(path) >= begin:
            yield path


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _is_unused(path: Path, begin: float, others: Sequence[_Process]) -> bool:
    """Whether this user made ``path`` since the run began, and no process of another run uses it."""
    try:
        is_own = path.lstat().st_uid == os.getuid() and not path.is_symlink()
    except OSError:
        return False
    return is_own and _changed(path) >= begin and not any(_uses(process, str(path)) for process in others)


def remove(leftovers: Sequence[Leftover]) -> list[Leftover]:
    """End the processes, then delete the rest; returns what could not be removed."""
    pids = [int(one.path) for one in leftovers if one.kind == "process" and not one.stays]
    for number, seconds in ((signal.SIGTERM, _END_S), (signal.SIGKILL, _END_S)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while any(_is_running(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        pids = [pid for pid in pids if _is_running(pid)]
    failed = [one for one in leftovers if one.kind == "process" and int(one.path) in pids]
    for one in leftovers:
        if one.kind == "process" or one.stays:
            continue
        if one.kind == "folder":
            shutil.rmtree(one.path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(one.path)
        if os.path.lexists(one.path):
            failed.append(one)
    return failed


def _is_running(pid: int) -> bool:
    return process_state(pid) not in (None, "Z")


def main(words: Sequence[str]) -> int:
    """Run ``verl clean``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="verl clean",
        description="List and remove what a run that was killed left on this machine: processes, the session of Ray, "
        "temporary folders, shared memory.",
    )
    parser.add_argument("run", type=Path, help="folder of the run (trainer.default_local_dir)")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--shared-memory", action="store_true", help="also remove shared memory that nobody here uses")
    options = parser.parse_args(list(words))
    if not options.run.is_dir():
        print(f"error: {options.run} is no folder. Name that of a run (trainer.default_local_dir).", file=sys.stderr)
        return 2
    try:
        found = list(find(options.run, options.shared_memory))
    except RunIsAlive as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for one in found:
        print(one)
    if not found:
        print(f"{options.run}: nothing is left")
    if options.list or not found:
        return 0
    failed = remove(found)
    for one in failed:
        print(f"error: {one} could not be removed", file=sys.stderr)
    print(f"{sum(not one.stays for one in found) - len(failed)} removed")
    return 1 if failed else 0
