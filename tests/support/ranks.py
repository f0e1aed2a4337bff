"""Run a function on several forked gloo ranks: two ranks start in under a second from a warm process."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.single_controller.base.worker import free_port
from verl.utils.distributed import ensure_process_group


def run_ranks(ranks: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call ``fn(*args)`` in ``ranks`` processes that form a process group; returns their results in rank order.

    Raises:
        RuntimeError: with the traceback of the first rank that failed, or after ``timeout_s``; the others are killed.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                _child(rank, ranks, port, Path(folder), fn, args)
            children[pid] = rank
        _wait(children, Path(folder), timeout_s)
        return [pickle.loads((Path(folder) / f"{rank}.ok").read_bytes()) for rank in range(ranks)]


def _child(rank: int, ranks: int, port: int, folder: Path, fn: Callable, args: tuple) -> None:
    """Body of a forked rank; never returns, so that pytest does not run on in it."""
    status = 1
    try:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        torch.set_num_threads(1)
        ensure_process_group("cpu", timeout_s=30)
        result = fn(*args)
        (folder / f"{rank}.ok").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
        status = 0
    except BaseException:
        (folder / f"{rank}.failed").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(children: dict[int, int], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if time.monotonic() > deadline:
                _kill(children)
                raise RuntimeError(f"ranks {sorted(children.values())} did not finish in {timeout_s} s")
            time.sleep(0.01)
            continue
        rank = children.pop(pid, None)
        if rank is not None and status != 0:
            _kill(children)
            report = folder / f"{rank}.failed"
            raise RuntimeError(f"rank {rank} failed\n{report.read_text() if report.exists() else f'status {status}'}")


def _kill(children: dict[int, int]) -> None:
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
