"""Worker, the base of every role, and WorkerHost, the process side that holds one or more roles.

A worker learns its place (rank, world size, address of rank 0) from environment variables, as under torchrun, so role
code runs the same under Ray, under forked processes and inside the driver. Knows no Ray.
"""

import asyncio
import inspect
import os
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.single_controller.base.decorator import Dispatch, Execute, register
from verl.single_controller.batch_cache import BatchCache
from verl.single_controller.errors import WorkerError, describe
from verl.telemetry.flight_recorder import RECORDER_VARIABLE, flight_recorder, watchdog
from verl.telemetry.profiler import TraceFile, process_trace
from verl.utils.exit_codes import exit_code
from verl.utils.process import explanation

MESH_POSITIONS = "__mesh_positions__"
"""Name that asks a `WorkerHost` for the meshes a role registered, in place of a method name."""


FETCH_COLUMN = "__fetch_column__"
"""Name that asks a `WorkerHost` for a column that it keeps, in place of a method name."""


class Worker:
    """One rank of one role. Subclasses call ``super().__init__()`` and mark their methods with `register`.

    Attributes:
        fused_worker_dict: role name -> worker, for all roles living in this process.
    """

    fused_worker_dict: Mapping[str, "Worker"] = {}

    def __init__(self, cuda_visible_devices: str | None = None):
        if cuda_visible_devices is not None:
            # before anything here touches CUDA, which reads it once
            os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices
        self._rank = int(os.environ.get("RANK", "0"))
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def local_rank(self) -> int:
        """Number of this worker's device on its node (torchrun's LOCAL_RANK)."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def get_master_addr_port(self) -> tuple[str, str]:
        return os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "0")

    def get_cuda_visible_devices(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    # Meshes: what the dispatcher needs to split a batch -----------------------------------------------------------

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Register this rank's position on a mesh: its part of a batch, and whether its output is collected for it.

        Exactly one rank of each dp rank collects. Call it on every rank, before the first call that uses the mesh.
        """
        # made here: a subclass may register before, or without, `Worker.__init__`
        positions = self.__dict__.setdefault("_mesh_positions", {})
        if mesh_name in positions:
            raise ValueError(f"mesh {mesh_name!r} is already registered by this worker, as {positions[mesh_name]}.")
        positions[mesh_name] = (int(dp_rank), bool(is_collect))

    def _query_dispatch_info(self, mesh_name: str) -> int:
        """The dp rank registered for a mesh."""
        return self.__dict__.get("_mesh_positions", {})[mesh_name][0]

    def _query_collect_info(self, mesh_name: str) -> bool:
        """True if this rank's output is collected for its part of a mesh."""
        return self.__dict__.get("_mesh_positions", {})[mesh_name][1]

    # Functions sent to the workers ------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable, *args, **kwargs):
        """Run ``func(worker, ...)`` on every rank, DataProtos split over the ranks."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable, *args, **kwargs):
        """Run ``func(...)`` on rank 0."""
        return func(*args, **kwargs)


class TracedWorker(Worker):
    """A worker whose process can be recorded in profiled steps."""

    role = ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_trace(self, settings: Mapping[str, Any], ranks: Sequence[int] | None, parts: Sequence[str]) -> None:
        """Record from now on, on the named ranks (None: all); see `verl.telemetry.profiler.ProcessTrace.begin`."""
        if ranks is None or self.rank in ranks:
            process_trace.begin(self.role, self.rank, settings, parts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_trace(self) -> list[TraceFile]:
        """End what ``begin_trace`` began; returns the files that this process wrote."""
        return process_trace.end(self.role)


class DistProfilerExtension:
    """Base of workers whose driver switches their profiler on and off.

    Args:
        profiler: a ``verl.telemetry.profiler.DistProfiler``.
    """

    def __init__(self, profiler: Any):
        self.profiler = profiler

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, **kwargs: Any) -> None:
        """Begin to record."""
        self.profiler.start(**kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self) -> None:
        """End what ``start_profile`` began."""
        self.profiler.stop()


class FusedWorker(Worker):
    """Several roles as one worker; subclasses name them in ``fused_classes``, role name -> class with arguments."""

    fused_classes: Mapping[str, Callable[[], Any]] = {}

    def __init__(self):
        super().__init__()
        self.fused_worker_dict = {role: build() for role, build in self.fused_classes.items()}
        for role, worker in self.fused_worker_dict.items():
            setattr(self, role, worker)
            if isinstance(worker, Worker):
                worker.fused_worker_dict = self.fused_worker_dict

    def _fuw_execute(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run ``<role>_fwmn_<method>``, as verl spells a method of a role."""
        role, _, method = method_name.partition("_fwmn_")
        return getattr(self.fused_worker_dict[role], method)(*args, **kwargs)


class WorkerHost:
    """The roles of one process, by name. Every call names a role and a method."""

    def __init__(self):
        self._workers: dict[str, Any] = {}
        self._place = (0, 1)
        self._batches = BatchCache()
        self._loop: asyncio.AbstractEventLoop | None = None

    def setup(self, env: Mapping[str, str], roles: Mapping[str, Callable[[], Any]]) -> int:
        """Set the environment of this rank and build each role in it; returns the process id."""
        # before the roles are built: their constructors read rank and address
        os.environ.update(env)
        if RECORDER_VARIABLE in env:  # a process of its own, whose driver will ask how it lived
            watchdog().start()
        self._place = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        for role, build in roles.items():
            self._workers[role] = worker = self._guarded(role, "__init__", build, (), {})
            if isinstance(worker, FusedWorker):
                self._workers.update(worker.fused_worker_dict)
            elif isinstance(worker, Worker):
                worker.fused_worker_dict = self._workers
        return os.getpid()

    def call(self, role: str, method: str, keep: bool, /, *args, **kwargs) -> Any:
        """Run a method of a role; the output is None unless ``keep``.

        Raises:
            WorkerError: whatever the method raised, as text.
        """
        # role, method and keep are positional only: a method may have arguments of these names
        worker = self._workers[role]
        if method == MESH_POSITIONS:
            self._batches.opened(args, kwargs)
            return dict(vars(worker).get("_mesh_positions", {}))
        args, kwargs, sent = self._guarded(role, method, self._batches.opened, (args, kwargs), {})
        if method == FETCH_COLUMN:
            return self._guarded(role, method, self._batches.column, args, kwargs)
        with process_trace.call(role, method):
            output = self._guarded(role, method, getattr(worker, method), args, kwargs)
        if not keep:
            return None
        return output if sent is None else self._batches.kept(sent, output)

    def _guarded(self, role: str, method: str, function: Callable, args, kwargs) -> Any:
        try:
            output = function(*args, **kwargs)
            if not inspect.isawaitable(output):
                return output
            # one event loop for all async methods, so that what they share stays usable
            self._loop = self._loop or asyncio.new_event_loop()
            return self._loop.run_until_complete(output)
        except KeyboardInterrupt:  # Ctrl-C where the only rank lives in the driver: no failure of a worker
            raise
        except BaseException as error:  # also SystemExit and torch's CheckpointException: the driver must hear of it
            inner = error.__traceback__  # from the first frame that is the worker's own
            while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
                inner = inner.tb_next
            lines = traceback.format_exception(type(error), error, inner or error.__traceback__)
            cause = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
            explained = explanation(error)
            doing = describe(flight_recorder().notes)
            where = (role, *self._place, method)
            raise WorkerError(*where, cause[0], "".join(lines), explained, doing, exit_code(error)) from error


_RESERVED: list[socket.socket] = []


def free_port() -> int:
    """A TCP port for a server of this process or of one that it forks: while it lives, the system gives it to no other.

    The server sets SO_REUSEADDR, as `socket.create_server` and torch's stores do.
    """
    reserved = socket.socket()
    # bound and not listened on: a server may bind it too, and the system gives it out no more
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    _RESERVED.append(reserved)
    return reserved.getsockname()[1]
