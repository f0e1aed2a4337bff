"""The process tree of an SGLang engine, seen from the worker: start, calls, and errors when it has died.

SGLang starts processes of its own, sets signal handlers, an event loop policy and a start method, and on any error ends
every process below the one it was started in. So it gets a process to itself (`host.py`), apart from the trainer's;
its output is kept for the error when it dies.
"""

from __future__ import annotations

import base64
import fcntl
import mmap
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.utils.exit_codes import ExitCode
from verl.workers.rollout.base import Bucket
from verl.workers.rollout.sglang.setup import EngineRequest

_TAIL_LINES = 60
_LONGEST_PARENT = 60  # bytes of the path that holds the folder of SGLang's sockets, whose own have 107 at most
_YOUNG_S = 60.0  # seconds in which a folder's owner may not have locked it yet
_GRACE_S = 5.0  # seconds a dying process tree has to end


class EngineDiedError(RuntimeError):
    """The rollout engine's process has ended; the message has the end of its output and the requests it held."""

    exit_class = ExitCode.WORKER


class EngineProcess:
    """One SGLang engine with all its processes.

    Args:
        arguments: of ``sglang.Engine``.
        given: names among them that the user gave under ``engine_kwargs.sglang``.
        environment: variables set for it, or unset where None.

    Raises:
        ValueError: the installed SGLang lacks an argument; names it.
        EngineDiedError: it did not come up; has its output.
    """

    def __init__(self, arguments: Mapping[str, Any], given: Sequence[str], environment: Mapping[str, str | None]):
        self.folder = _own_folder()
        self._log = self.folder / "log"
        self._output_read = 0
        self._next_call = 0
        self._ended: dict[int, Any] = {}
        self.running: dict[int, int] = {}
        """Request id -> number of prompt tokens, of all that was submitted and has not ended."""
        ours, theirs = socket.socketpair()
        with theirs, open(self._log, "wb") as log:
            fcntl.flock(log, fcntl.LOCK_SH)  # held as long as one of the engine's processes lives
            self._process = subprocess.Popen(
                [sys.executable, "-m", "verl.workers.rollout.sglang.host", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment({**environment, "TMPDIR": str(self.folder)}),
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._end = weakref.finalize(self, _end, os.getpid(), self._process, self._connection, self.folder)
        self._send(("start", os.getpid(), dict(arguments), list(given)))
        try:
            self.info: dict[str, Any] = self.result(None)
            """``version`` of SGLang, ``pids`` of its processes, names of its ``sampling`` parameters."""
        except EngineDiedError:
            raise
        except RuntimeError as error:
            raise self._died() from error
        except BaseException:
            self.close()
            raise

    def call(self, name: str, *args: Any) -> Any:
        """Run a command of `host.Host` and wait for its answer."""
        return self.result(self.start_call(name, *args))

    def start_call(self, name: str, *args: Any) -> int:
        """Start a command of `host.Host`; returns the number under which `result` waits for it.

        Commands run one after the other. The answer to one that is not awaited before the next is lost.
        """
        self._next_call += 1
        self._send(("call", self._next_call, name, args))
        return self._next_call

    def result(self, number: int | None) -> Any:
        """Wait for the answer to a command; None: to the start."""
        while True:
            message = self._receive()
            if message is None or message[0] != number:
                continue  # of a call whose caller was interrupted
            _, good, value = message
            if good:
                return value
            raise value

    def submit(self, requests: Sequence[tuple[int, EngineRequest]]) -> None:
        """Start these requests, each with its id."""
        self._send(("submit", list(requests)))
        self.running |= {request_id: len(request.ids) for request_id, request in requests}

    def partial_output(self, request_id: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probs of a request so far; all of one that `ended` has yet to return."""
        found = self.call("partial_output", request_id)
        return self._ended[request_id][:2] if request_id in self._ended else found

    def abort(self, request_ids: Sequence[int]) -> None:
        self._send(("abort", list(request_ids)))

    def ended(self, timeout_s: float | None) -> dict[int, Any]:
        """Requests that have ended since the last call, by id; waits for something to end, ``timeout_s`` at most."""
        while not self._ended and self.running and self._poll(timeout_s):
            self._receive()
        while self._poll(0):
            self._receive()
        ended, self._ended = self._ended, {}
        return ended

    def keep(self, ended: Mapping[int, Any]) -> None:
        """Have `ended` return these again."""
        self._ended |= ended

    def new_output(self) -> str:
        """Output of the engine since the last call."""
        with open(self._log, errors="replace") as log:
            log.seek(self._output_read)
            text = log.read()
            self._output_read = log.tell()
        return text

    def close(self) -> None:
        """End all its processes; again is harmless."""
        self._end()

    @property
    def pids(self) -> list[int]:
        return self.info["pids"]

    # -- messages ------------------------------------------------------------------------------------------------------

    def _send(self, message: tuple) -> None:
        if not self._end.alive:
            raise EngineDiedError("This SGLang engine was closed.")
        try:
            self._connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
        except OSError as error:
            raise self._died() from error

    def _poll(self, timeout_s: float | None) -> bool:
        try:
            return self._connection.poll(timeout_s)
        except OSError as error:
            raise self._died() from error

    def _receive(self) -> tuple[int | None, bool, Any] | None:
        """Take one message; returns it if it answers a call."""
        try:
            kind, *rest = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._died() from error
        if kind == "ended":
            for request_id, output in rest[0]:
                self.running.pop(request_id, None)
                self._ended[request_id] = output
            return None
        number, good, value = rest
        return number, good, value

    def _died(self) -> EngineDiedError:
        deadline = time.monotonic() + _GRACE_S
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        code = self._process.poll()
        if code is None:
            state = "is not answering"
        else:
            state = f"ended with {f'signal {signal.Signals(-code).name} ({code})' if code < 0 else f'exit code {code}'}"
        lines = self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        held = ", ".join(
            f"{request_id} ({length} prompt tokens)" for request_id, length in list(self.running.items())[-5:]
        )
        self.close()
        held = f"{len(self.running)}, the last of them {held}" if held else "none"
        return EngineDiedError(
            f"SGLang's process {self._process.pid} {state}. Requests it held: {held}. If nothing below says why, "
            "memory may have run out: lower rollout.gpu_memory_utilization or rollout.max_num_seqs. Its last words:\n"
            + "\n".join(lines)
        )


def _own_folder() -> Path:
    """A folder for an engine's log and sockets; clears away those of engines that were killed with their worker."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > _LONGEST_PARENT:
        parent = Path("/tmp")
    for folder in parent.glob("verl-sglang-*"):
        with suppress(OSError), open(folder / "log", "rb") as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while one of its engine's processes lives
            if time.time() - folder.stat().st_mtime > _YOUNG_S:
                shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix="verl-sglang-", dir=parent))


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment and import path, with ``changes``."""
    merged = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path), **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _end(owner: int, process: subprocess.Popen, connection: Connection, folder: Path) -> None:
    if os.getpid() != owner:  # a fork of the worker inherits this finalizer, and must not run it
        return
    connection.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


# -- Buckets of weights for SGLang's scheduler processes, by shared memory or CUDA IPC handles -------------------------


_ALIGNMENT = 64


class SharedMemoryBuffer:
    """Shared memory for one bucket after the other; as large as the largest of them."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("verl-weights")
        self._mapped: mmap.mmap | None = None

    def pack(self, bucket: Bucket) -> dict[str, Any]:
        """Copy a bucket in; returns a message for `open_bucket`. The previous bucket must have been loaded."""
        layout, size = _layout_of(bucket)
        if self._mapped is None or len(self._mapped) < size:
            os.ftruncate(self._descriptor, size)
            self._mapped = mmap.mmap(self._descriptor, size)
        buffer = torch.frombuffer(self._mapped, dtype=torch.uint8)
        _fill(buffer, bucket, layout)
        return {"layout": layout, "path": f"/proc/{os.getpid()}/fd/{self._descriptor}"}

    def close(self) -> None:
        self._mapped = None  # unmapped when no tensor looks into it any more
        os.close(self._descriptor)


class CudaIpcBuffer:
    """The same in CUDA memory, which the schedulers open by handle."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def pack(self, bucket: Bucket) -> dict[str, Any]:
        from torch.multiprocessing.reductions import reduce_tensor

        layout, size = _layout_of(bucket)
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = None
            self._buffer = torch.empty(size, dtype=torch.uint8, device=bucket[0][1].device)
        _fill(self._buffer, bucket, layout)
        torch.cuda.synchronize(self._buffer.device)
        handle = pickle.dumps(reduce_tensor(self._buffer))
        uuid = str(torch.cuda.get_device_properties(self._buffer.device).uuid)
        return {"layout": layout, "handle": base64.b64encode(handle).decode(), "uuid": uuid}

    def close(self) -> None:
        self._buffer = None


@contextmanager
def open_bucket(message: dict[str, Any], device: torch.device) -> Iterator[Bucket]:
    """The bucket as tensors that look into the shared memory; they must not outlive the block."""
    buffer = _mapped(message["path"]) if "path" in message else _opened(message["handle"], message["uuid"])
    yield [
        (name, buffer[offset : offset + size].view(getattr(torch, dtype)).view(shape))
        for name, offset, size, dtype, shape in message["layout"]
    ]


def _layout_of(bucket: Bucket) -> tuple[list[tuple[str, int, int, str, list[int]]], int]:
    """(name, offset, bytes, dtype, shape) of every tensor in a buffer, and the buffer's size."""
    layout, end = [], 0
    for name, tensor in bucket:
        layout.append((name, end, tensor.nbytes, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return layout, max(end, _ALIGNMENT)


def _fill(buffer: Tensor, bucket: Bucket, layout: list[tuple[str, int, int, str, list[int]]]) -> None:
    for (_, tensor), (_, offset, size, _, _) in zip(bucket, layout, strict=True):
        buffer[offset : offset + size].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def _mapped(path: str) -> Tensor:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _opened(handle: str, uuid: str) -> Tensor:
    """A CUDA buffer of another process; its device has another number here if other devices are visible."""
    rebuild, arguments = pickle.loads(base64.b64decode(handle))
    devices = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if uuid not in devices:
        raise RuntimeError(f"The weights lie on the device {uuid}, which SGLang does not see: it sees {devices}.")
    arguments = list(arguments)
    arguments[6] = devices.index(uuid)  # storage_device of rebuild_cuda_tensor
    return rebuild(*arguments)
