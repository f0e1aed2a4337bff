"""The controller in ranks that torchrun has started: rank 0 drives and is a worker too, the others answer its calls.

A call goes out over a gloo group of its own, so that the groups of models are left alone, and every rank runs its part.
A rank that fails ends its process: torchrun then ends the others, and starts them again if it was told to.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch.distributed as dist

from verl.single_controller.base.decorator import map_batches
from verl.single_controller.base.worker import WorkerHost
from verl.single_controller.base.worker_group import (
    ClassWithInitArgs,
    Hosts,
    Request,
    ResourcePool,
    WorkerGroup,
    create_colocated_worker_cls,
)
from verl.single_controller.errors import WorkerError
from verl.single_controller.local import Call
from verl.utils.distributed import destroy_global_process_group, ensure_process_group

_LONGEST_PAUSE = timedelta(days=7)
"""Time limit of ranks that wait for the next call; torchrun ends them if rank 0 ends."""


def join(device: str, timeout_s: float) -> None:
    """Join the process group of all ranks, and the group of calls; all ranks call it together."""
    ensure_process_group(device, timeout_s)
    _control_group()


@lru_cache(maxsize=1)
def _control_group() -> dist.ProcessGroup | None:
    return dist.new_group(backend="gloo", timeout=_LONGEST_PAUSE) if dist.get_world_size() > 1 else None


def serve() -> None:
    """Answer the calls of rank 0 until it stops; in all other ranks, after `join`.

    Raises:
        WorkerError: a call failed here.
    """
    host = WorkerHost()
    while (message := _exchange(None)) is not None:
        _gather(_answer(host, message))
    destroy_global_process_group()


def _answer(host: WorkerHost, message: Any) -> Any:
    """Do what rank 0 asks of this rank: build the roles, or run one method."""
    if not message:
        return None
    if isinstance(message, Mapping):
        return host.setup({}, message)
    role, method, keep, args, kwargs = message
    return host.call(role, method, keep, *args, **kwargs)


def _exchange(messages: list | None) -> Any:
    """This rank's message of those that rank 0 has for all."""
    if dist.get_world_size() == 1:
        return messages[0] if messages else None
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, messages, src=0, group=_control_group())
    return mine[0]


def _gather(output: Any) -> list:
    """Outputs of all ranks, on rank 0."""
    if dist.get_world_size() == 1:
        return [output]
    outputs = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(output, outputs, dst=0, group=_control_group())
    return outputs or []


class TorchrunHosts(Hosts):
    """The ranks of torchrun, seen from rank 0; a call runs on all of them when it is made."""

    def __init__(self, roles: Mapping[str, ClassWithInitArgs]):
        super().__init__()
        self.world_size, self._host = dist.get_world_size(), WorkerHost()
        self.pids = self._all([dict(roles)] * self.world_size)

    def _all(self, messages: list) -> list:
        mine = _exchange(messages)
        return _gather(_answer(self._host, mine))

    def _submit(self, role: str, method: str, requests: Sequence[Request], exposed: bool) -> list:
        messages: list[Any] = [()] * self.world_size
        for request in requests:
            # as between processes: what the role does to its arguments, the driver must not see
            args, kwargs = map_batches(lambda data: data.unshared(), request.args, request.kwargs)
            messages[request.rank] = role, method, request.keep, args, kwargs
        calls = [Call(self, request.rank, role, method) for request in requests]
        try:
            outputs = self._all(messages)
        except WorkerError as error:
            for call in calls:
                call.finish(error=error)
            return calls
        for call in calls:
            call.finish(output=outputs[call.rank])
        return calls

    def _wait(self, handles: Sequence, timeout: float | None) -> list:
        return [handle.outcome() for handle in handles]

    def _stop(self, at_once: bool) -> None:
        if not at_once:  # after a failure the others may wait elsewhere: torchrun ends them
            _exchange([None] * self.world_size)
        self._host = WorkerHost()


class TorchrunWorkerGroup(WorkerGroup):
    """A `WorkerGroup` of the ranks of torchrun."""

    controller = "torchrun"

    def _start(self, resource_pool: Any, roles: Mapping[str, ClassWithInitArgs], timeout: float, **options: Any) -> Any:
        if resource_pool.world_size != dist.get_world_size():
            raise ValueError(
                f"torchrun started {dist.get_world_size()} ranks, and the run needs {resource_pool.world_size}. Set "
                "trainer.nnodes and trainer.n_gpus_per_node to torchrun's --nnodes and --nproc_per_node."
            )
        TorchrunController.hosts = TorchrunHosts(roles)
        return TorchrunController.hosts


class TorchrunController:
    """The controller of torchrun's ranks; the others have the same names."""

    name = "torchrun"
    ResourcePool = ResourcePool
    ClassWithInitArgs = ClassWithInitArgs
    WorkerGroup = TorchrunWorkerGroup
    create_colocated_worker_cls = staticmethod(create_colocated_worker_cls)
    driver_host: str | None = None  # the other ranks may be on other machines
    hosts: TorchrunHosts | None = None

    def start(
        self, ray_init: Mapping | None = None, env: Mapping[str, str] | None = None, batch_bytes: int = 0
    ) -> None:
        """Put ``env`` into the environment of rank 0; other ranks have torchrun's.

        ``ray_init`` and ``batch_bytes`` have no effect.
        """
        os.environ.update({name: str(value) for name, value in (env or {}).items()})

    def stop(self) -> None:
        """Let the other ranks end, unless the run failed: torchrun then ends them."""
        hosts, TorchrunController.hosts = self.hosts, None
        if sys.exc_info()[0] is None and hosts is not None:
            hosts.stop()
        destroy_global_process_group()
