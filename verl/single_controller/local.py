"""The controller without Ray: roles inside the driver for one rank, in forked processes of this machine for more.

One rank is meant for debuggers and laptops: a breakpoint in a role stops there. With more ranks the children start from
what the driver has already imported, so they are up in milliseconds, and batches go through shared memory.
"""

import faulthandler
import os
import select
import signal
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from verl.single_controller.base.decorator import map_batches
from verl.single_controller.base.worker import WorkerHost, free_port
from verl.single_controller.base.worker_group import (
    ClassWithInitArgs,
    Hosts,
    Request,
    ResourcePool,
    WorkerGroup,
    create_colocated_worker_cls,
)
from verl.single_controller.batch_cache import BatchLedger
from verl.single_controller.channel import ArgumentMessages, Channel, SharedMemoryPool
from verl.single_controller.errors import StderrTail, WorkerDiagnostics, WorkerDied, WorkerError
from verl.single_controller.processes import Child, is_readable

_LIVE: "weakref.WeakSet[ForkedHosts]" = weakref.WeakSet()
"""Groups of this process: a child forked for one of them closes its copies of the others' connections."""

_LEAVE_GRACE_S = 2.0
"""Seconds a worker has to leave by itself when its group is stopped in good order."""

_STACK_DUMP_S = 0.2

_DEATH_GRACE_S = 0.5
"""Seconds to look for a death that explains another rank's error."""


class LocalWorkerGroup(WorkerGroup):
    """A `WorkerGroup` on this machine, without Ray."""

    controller = "local"

    def _start(
        self, resource_pool: ResourcePool, roles: Mapping[str, ClassWithInitArgs], timeout: float, **options
    ) -> Hosts:
        known = {"bin_pack", "detached", "worker_names", "worker_handles", "profile_steps", "worker_nsight_options"}
        if unknown := sorted(set(options) - known):
            raise TypeError(f"LocalWorkerGroup does not know the options {unknown}.")
        size = resource_pool.world_size
        alone = size == 1 and not resource_pool.concurrent
        if alone:
            return InProcessHosts(roles, self.name_prefix or "")
        hosts = ForkedHosts(size, resource_pool.first_device, resource_pool.concurrent)
        hosts.setup(roles, self.name_prefix or "", timeout)
        return hosts


class InProcessHosts(Hosts):
    """One rank, in the driver itself: a call is a function call, and runs when it is made."""

    world_size = 1

    def __init__(self, roles: Mapping[str, ClassWithInitArgs], prefix: str):
        super().__init__()
        self._host = WorkerHost()
        self.pids = [os.getpid()]
        rank_env = rank_environment(0, 1, prefix, os.environ.get("MASTER_PORT") or free_port())
        self._stopping_on_failure(lambda: self._host.setup(rank_env, roles))

    def _submit(self, role: str, method: str, requests: Sequence[Request], exposed: bool) -> list:
        calls = []
        for request in requests:
            call = Call(self, request.rank, role, method)
            # as between processes: what the role does to its arguments, the driver must not see
            args, kwargs = map_batches(lambda data: data.unshared(), request.args, request.kwargs)
            try:
                call.finish(output=self._host.call(role, method, request.keep, *args, **kwargs))
            except WorkerError as error:
                call.finish(error=error)
            calls.append(call)
        return calls

    def _wait(self, handles: Sequence, timeout: float | None) -> list:
        return [handle.outcome() for handle in handles]

    def _stop(self, at_once: bool) -> None:
        self._host = WorkerHost()


class Call:
    """The future of one call on one rank."""

    def __init__(self, hosts: Hosts, rank: int, role: str, method: str):
        self.hosts, self.rank, self.role, self.method = hosts, rank, role, method
        self.done = False
        self._output: Any = None
        self._error: WorkerError | None = None

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the output, ``timeout`` seconds at most."""
        return self.hosts.wait([self], timeout)[0]

    result = get

    def finish(self, output: Any = None, error: WorkerError | None = None) -> None:
        self.done, self._output, self._error = True, output, error

    def outcome(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._output


class ForkedHosts(Hosts):
    """n ranks in n forked processes. Outputs are read when a caller waits, for all calls at once."""

    def __init__(self, world_size: int, first_device: int = 0, concurrent: int = 0):
        """``concurrent``: processes of other groups that compute at the same time, for a fair share of the cores."""
        super().__init__()
        self.world_size, self.pids = world_size, []
        self._first_device, self._concurrent = first_device, concurrent
        self._memory_pool = SharedMemoryPool()
        self.ledger = BatchLedger()
        self._channels: list[Channel] = []
        self._children: list[Child] = []
        self._tails: list[StderrTail] = []
        self._diagnostics = WorkerDiagnostics(world_size)
        self._calls: dict[int, Call] = {}  # sent and not answered, oldest first
        self._next_call = 0
        self._poll = select.poll()
        self._rank_of: dict[int, int] = {}  # descriptor polled -> rank
        _LIVE.add(self)
        weakref.finalize(self, _end_all, self._children, self._channels, self._tails)  # also when the driver leaves

    def setup(self, roles: Mapping[str, ClassWithInitArgs], prefix: str, timeout: float) -> None:
        """Fork the ranks and build the roles in each, within ``timeout`` seconds."""
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            raise ValueError(
                "trainer.controller=local forks its ranks, and CUDA does not survive a fork: the driver has used "
                "the GPU already. Touch it in workers only, or use trainer.controller=ray."
            )
        _leave_process_group()  # of an earlier run in the driver: no use in a fork
        port = free_port()
        calls = []
        for rank in range(self.world_size):
            rank_env = rank_environment(rank, self.world_size, prefix, port, self._first_device)
            rank_env |= self._diagnostics.environment(rank)
            self._fork(rank, rank_env, roles)
            calls.append(self._note_call(rank, "+".join(roles), "__init__"))
        self.wait(calls, timeout)

    # Transport --------------------------------------------------------------------------------------------------------

    def _fork(self, rank: int, rank_env: dict[str, str], roles: Mapping[str, ClassWithInitArgs]) -> None:
        ours, theirs = socket.socketpair()
        tail = StderrTail()
        processes = self.world_size + self._concurrent

        def run_rank() -> None:
            tail.adopt()
            # with a copy open here, a sibling would not see that the driver has closed its end
            for hosts in list(_LIVE):
                hosts.close_inherited()
            ours.close()
            # `setup` notes the call of __init__ under this number when the fork is done
            _Rank(Channel(theirs), rank_env, roles, first_call=self._next_call, processes=processes).serve()

        child = Child(run_rank)
        theirs.close()
        tail.started()
        self._tails.append(tail)
        self._children.append(child)
        self.pids.append(child.pid)
        self._channels.append(Channel(ours, self._memory_pool))
        for watched in (ours.fileno(), child.pidfd):
            if watched is not None:
                self._poll.register(watched, select.POLLIN)
                self._rank_of[watched] = rank

    def close_inherited(self) -> None:
        """Close this process's copies of the connections; in a child, where they belong to the driver."""
        for channel in self._channels:
            channel.close()
        self._memory_pool.close()

    def _note_call(self, rank: int, role: str, method: str) -> Call:
        self._calls[self._next_call] = call = Call(self, rank, role, method)
        self._next_call += 1
        return call

    def _submit(self, role: str, method: str, requests: Sequence[Request], exposed: bool) -> list:
        messages = ArgumentMessages(self._memory_pool, f"{role}.{method}")
        calls = []
        for rank, args, kwargs, keep in requests:
            packed, number = messages.pack(args, kwargs), self._next_call
            calls.append(self._note_call(rank, role, method))
            try:
                self._channels[rank].send((number, role, method, keep), packed)
            except OSError:  # its end is closed: read its remaining messages, up to its end
                while True:
                    self._receive_from(rank)
        self.traffic.add(role, method, sent=messages.nbytes)
        return calls

    def _wait(self, handles: Sequence[Call], timeout: float | None) -> list:
        if not handles:
            return []
        wait = self._begin_wait(handles, timeout, self._diagnostics, self.pids.__getitem__)
        while waiting := [call for call in handles if not call.done]:
            # ended ranks come first: they explain the errors of others
            ready = {self._rank_of[fd] for fd, _ in self._poll.poll(wait.slice_s * 1000)}
            for rank in sorted(ready, key=lambda rank: not self._children[rank].has_ended()):
                self._receive_from(rank)
            if not ready and (why := wait.reason_to_stop([call.rank for call in waiting])):
                raise self._timed_out(waiting, wait, why, _STACK_DUMP_S)
        wait.finish()
        return [call.outcome() for call in handles]

    def _receive_from(self, rank: int) -> None:
        """Handle one message of a readable rank; raise if its call failed or the rank has ended."""
        channel = self._channels[rank]
        try:
            if self._children[rank].has_ended() and not is_readable(channel.fileno()):
                raise EOFError  # a grandchild may hold the connection open
            (number, failed), open_content = channel.receive()
            content = open_content()
        except EOFError:
            raise self._death(rank) from None
        # by number: answers of a rank come in order, those of several ranks do not
        call = self._calls.pop(number)
        self.traffic.add(call.role, call.method, received=channel.last_received)
        if failed:
            call.finish(error=content)
            raise self._cause(content)
        call.finish(output=content)

    def _cause(self, error: WorkerError) -> WorkerError | WorkerDied:
        """Return the death of another rank, if one caused this error; it may be seen later than the lost connection."""
        deadline = time.monotonic() + (_DEATH_GRACE_S if self.world_size > 1 else 0)
        while True:
            for rank, child in enumerate(self._children):
                if child.has_ended():
                    return self._death(rank)
            if time.monotonic() >= deadline:
                return error
            time.sleep(0.01)

    def _death(self, rank: int) -> WorkerDied:
        # the oldest: a rank runs its calls in the order they were sent
        call = next((call for call in self._calls.values() if call.rank == rank), None)
        role, method = (call.role, call.method) if call else ("the group", None)
        child = self._children[rank]
        if not child.await_end(2.0):  # it closed the connection, and still runs
            child.end()
        how, stderr_end = child.outcome(), self._tails[rank].end()
        report = self._diagnostics.report(rank)
        return WorkerDied(role, rank, self.world_size, method, child.pid, *how, stderr_end, report)

    def _stop(self, at_once: bool) -> None:
        _end_all(self._children, self._channels, self._tails, 0 if at_once else _LEAVE_GRACE_S)
        self._diagnostics.close()
        self._memory_pool.close()


class _Rank:
    """Child process of one rank: runs calls until the driver closes the connection."""

    def __init__(
        self,
        channel: Channel,
        rank_env: dict[str, str],
        roles: Mapping[str, ClassWithInitArgs],
        first_call: int,
        processes: int,
    ):
        self._channel, self._rank_env, self._roles, self._first_call = channel, rank_env, roles, first_call
        self._processes = processes
        self._host = WorkerHost()

    def serve(self) -> None:
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR1, file=2)
        os.environ.update(self._rank_env)
        # One of so many shares of the cores, unless OMP_NUM_THREADS says how many threads a rank gets
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = int(os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // self._processes))))
        if "torch" in sys.modules:  # loaded by the driver, which had all cores
            sys.modules["torch"].set_num_threads(threads)
        setup = partial(self._host.setup, self._rank_env, self._roles)
        self._answer(self._first_call, "+".join(self._roles), "__init__", setup)
        while True:
            try:
                (number, role, method, keep), open_content = self._channel.receive()
            except EOFError:
                return
            self._answer(number, role, method, partial(self._call, role, method, keep, open_content))

    def _call(self, role: str, method: str, keep: bool, open_content: Callable[[], tuple]) -> Any:
        args, kwargs = open_content()
        return self._host.call(role, method, keep, *args, **kwargs)

    def _answer(self, number: int, role: str, method: str, action: Callable[[], Any]) -> None:
        """Run and send the outcome. Arguments are freed first, so that the answer reports their memory as released."""
        try:
            failed, content = False, action()
        except WorkerError as error:
            failed, content = True, error
        except Exception as error:
            failed, content = True, self._cannot(role, method, "unpickle the arguments", error)
        try:
            self._send(number, failed, content)
        except Exception as error:
            what = f"send the output, a {type(content).__name__}"
            self._send(number, True, self._cannot(role, method, what, error))

    def _send(self, number: int, failed: bool, content: Any) -> None:
        with suppress(OSError):  # the driver has ended: the next read raises EOFError
            self._channel.send((number, failed), content)

    def _cannot(self, role: str, method: str, what: str, error: Exception) -> WorkerError:
        rank, world_size = int(self._rank_env["RANK"]), int(self._rank_env["WORLD_SIZE"])
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return WorkerError(role, rank, world_size, method, f"cannot {what}: {type(error).__name__}: {error}", text)


class LocalController:
    """The controller of forked processes; the Ray one has the same names."""

    name = "local"
    driver_host = "127.0.0.1"
    """Address at which the workers reach the driver."""
    ResourcePool = ResourcePool
    ClassWithInitArgs = ClassWithInitArgs
    WorkerGroup = LocalWorkerGroup
    create_colocated_worker_cls = staticmethod(create_colocated_worker_cls)

    def start(
        self, ray_init: Mapping | None = None, env: Mapping[str, str] | None = None, batch_bytes: int = 0
    ) -> None:
        """Put ``env`` into the environment, which every worker inherits. ``ray_init`` and ``batch_bytes`` have no
        effect here."""
        os.environ.update({name: str(value) for name, value in (env or {}).items()})

    def stop(self) -> None:
        """End the processes of all groups, and leave the process group of a single rank, which lives in this one."""
        for hosts in list(_LIVE):
            hosts.stop()
        _leave_process_group()


def _leave_process_group() -> None:
    """Leave the process group that this process is a member of, if any, without importing torch for it."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


def rank_environment(rank: int, world_size: int, prefix: str, port: int | str, first_device: int = 0) -> dict[str, str]:
    """Environment variables of a rank on a single node, as torch reads them; its device is ``first_device + rank``."""
    rank_env: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": first_device + rank}
    rank_env |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    rank_env |= {"WG_PREFIX": prefix, "WG_BACKEND": "local"}
    if sys.platform == "linux" and world_size > 1:
        # gloo would look up the host's name, which laptops and containers often cannot resolve
        rank_env["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return {name: str(value) for name, value in rank_env.items()}


def _end_all(children: list[Child], channels: list[Channel], tails: list[StderrTail], grace: float = 0.0) -> None:
    for channel in channels:
        channel.close()
    deadline = time.monotonic() + grace
    # the channels are closed: all leave at the same time, within one grace
    for child in children:
        child.end(max(0.0, deadline - time.monotonic()))
    for tail in tails:
        tail.pass_on()
