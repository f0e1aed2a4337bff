"""WorkerGroup: n processes of one role that look like one object, and what they are started from.

The group owns the meaning of a call: which arguments go where, what is padded, how outputs are joined, what an error
ends. A `Hosts` subclass owns the transport: it starts processes, carries one call to one rank, and detects a death.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.base.decorator import (
    MAGIC_ATTR,
    ONLY_MESH,
    Execute,
    Mesh,
    Registration,
    dispatch_all_to_all,
    drop_padding,
    keep_columns,
    map_batches,
    pad_rows,
    plan_partition,
    restore_rows,
    split_rows,
)
from verl.single_controller.base.worker import FETCH_COLUMN, MESH_POSITIONS, FusedWorker
from verl.single_controller.batch_cache import (
    BatchLedger,
    BatchPart,
    KeptOutput,
    RemoteColumn,
    SplitCall,
    map_arguments,
)
from verl.single_controller.deadlines import Deadlines, Wait, waiting_for
from verl.single_controller.errors import WorkerDiagnostics, WorkerGroupError, WorkerGroupStopped, WorkerTimeout

T = TypeVar("T")


class ResourcePool:
    """Number of processes on each node."""

    def __init__(
        self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ):
        """``max_colocate_count``: how many worker groups may share the pool, each with processes of its own."""
        self._store = list(process_on_nodes or [])
        if any(not isinstance(count, int) or count < 1 for count in self._store):
            raise ValueError(f"process_on_nodes={self._store}: every node needs a number of processes of at least 1.")
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node
        self.concurrent = 0
        """Processes of the run's other pools. Their roles work at the same time as those of this pool, so even a single
        process is one of its own and never the driver."""
        self.first_device = 0
        """Number of the device of each node's first process, where nothing else assigns them."""

    def add_node(self, process_count: int) -> None:
        self._store.append(process_count)

    @property
    def store(self) -> list[int]:
        return self._store

    @property
    def world_size(self) -> int:
        return sum(self._store)

    def local_world_size_list(self) -> list[int]:
        """For each rank the number of processes on its node."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For each rank its number on its node."""
        return [local for count in self._store for local in range(count)]


class ClassWithInitArgs:
    """A worker class and the arguments of its constructor, to be called in another process."""

    def __init__(self, cls: type, *args, **kwargs):
        # a class wrapped by ray.remote carries the plain one
        self.cls = getattr(cls, "__ray_actor_class__", cls)
        self.args, self.kwargs = args, kwargs
        self.fused_worker_used = False

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)

    def roles(self, name: str | None = None) -> dict[str, ClassWithInitArgs]:
        """Role name -> class to build in every process; a single class is named ``name`` or after itself."""
        return {name or self.cls.__name__: self}


class ColocatedClasses:
    """Several roles that share the processes of one group. `WorkerGroup.spawn` gives each role its own view."""

    def __init__(self, class_dict: Mapping[str, ClassWithInitArgs]):
        if not class_dict:
            raise ValueError("create_colocated_worker_cls({}): name at least one role.")
        self.class_dict = dict(class_dict)
        self.cls = WorkerGroup
        self.fused_worker_used = True

    def roles(self, name: str | None = None) -> dict[str, ClassWithInitArgs]:
        return dict(self.class_dict)


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ColocatedClasses:
    """Put several roles, name -> class with arguments, into the processes of one group.

    Raises:
        ValueError: no role is named.
    """
    return ColocatedClasses(class_dict)


def create_colocated_worker_raw_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> type[FusedWorker]:
    """A worker class whose instances hold several roles, name -> class with arguments, to be subclassed.

    A subclass reaches them as ``self.<name>`` and may have methods of its own. A group of it calls its own methods, and
    after ``fuse(names)`` those of each role: ``group.<name>.<method>()``.
    """
    name = "_".join(["FusedWorker", *(classes.cls.__name__ for classes in class_dict.values())])
    return type(name, (FusedWorker,), {"fused_classes": dict(class_dict)})


class Request(NamedTuple):
    """One call on one rank."""

    rank: int
    args: tuple
    kwargs: dict
    keep: bool
    """True: the output is sent back."""


class Traffic:
    """Bytes that travelled between the driver and the processes of a group, by role and method.

    What several ranks read from one place counts once. A rank in the driver's own process is sent nothing.
    """

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, str]] = Counter()
        self.received: Counter[tuple[str, str]] = Counter()

    def add(self, role: str, method: str, sent: int = 0, received: int = 0) -> None:
        self.sent[role, method] += sent
        self.received[role, method] += received

    @property
    def nbytes(self) -> int:
        return self.sent.total() + self.received.total()


class Hosts(ABC):
    """The n processes behind one or several worker groups, each a `WorkerHost`.

    The first failure ends them all: a rank that raised has left the others alone in their collectives.
    """

    world_size: int
    pids: list[int]

    def __init__(self):
        self.failure: WorkerGroupError | None = None
        self.stopped = False
        self.deadlines = Deadlines()
        self.traffic = Traffic()
        self.ledger: BatchLedger | None = None
        """Of hosts whose ranks keep batches; None: every call brings all it needs."""
        self._sent: weakref.WeakSet = weakref.WeakSet()  # handles that nobody has waited for
        self._pid, self._is_sending = os.getpid(), False
        self._lock = threading.RLock()  # threads of the driver take turns: a rank answers one call at a time anyway

    def submit(self, role: str, method: str, requests: Sequence[Request], exposed: bool = False) -> list:
        """Send one call to several ranks; returns a handle for each. ``exposed``: `as_futures` will give them away."""
        if self.stopped:
            why = f" after this failure: {str(self.failure).splitlines()[0]}" if self.failure else ""
            raise WorkerGroupStopped(
                f"{role}.{method}: the {self.world_size} processes of this group were stopped{why}. Start a new group."
            ) from self.failure
        with self._lock:  # ranks get messages in the order in which the ledger wrote them
            try:
                encoded = self._encoded(requests)
                for request in encoded:
                    map_arguments(DataProto, DataProto.fetched, request.args, request.kwargs)
                self._is_sending = True
                handles = self._stopping_on_failure(lambda: self._submit(role, method, encoded, exposed))
            except BaseException:
                if self.ledger is not None:
                    self.ledger.reset()  # some ranks may not have got what it has written
                raise
            finally:
                self._is_sending = False
        if not exposed:
            self._sent.update(handles)
        return handles

    def _encoded(self, requests: Sequence[Request]) -> Sequence[Request]:
        if self.ledger is not None:
            return self.ledger.encoded(requests)
        plain = [map_arguments(BatchPart, BatchPart.taken, request.args, request.kwargs) for request in requests]
        return [request._replace(args=args, kwargs=kw) for request, (args, kw) in zip(requests, plain, strict=True)]

    def bind(self, call: SplitCall, outputs: Sequence, role: str) -> None:
        """Let the columns that a call's outputs have left with the ranks be fetched when they are read."""
        if self.ledger is not None:
            with self._lock:
                self.ledger.bind(call, outputs, role, self._fetch)

    def _fetch(self, column: RemoteColumn) -> None:
        with self._lock:
            if self.stopped or os.getpid() != self._pid:
                why = "were stopped" if self.stopped else "answer to the process that started them"
                raise WorkerGroupStopped(
                    f"{column}, and these {why}. Read it, or pickle its batch, before."
                ) from self.failure
            if self._is_sending:  # ranks that have the call may wait for those that do not
                raise ValueError(f"{column}, and is in an argument that is being sent. Read it before the call.")
            requests = [Request(rank, (column.key,), {}, keep=True) for rank in column.ranks]
            outputs = self.run(column.role, FETCH_COLUMN, requests)
            column.fetched([output.ragged(column.key[1]) for output in outputs])
            if self.ledger is not None:
                self.ledger.remote.discard(column)

    def adopt(self, call: SplitCall, outputs: Sequence, result: Any) -> None:
        """Note which columns of a call's result its ranks have kept."""
        if self.ledger is not None:
            with self._lock:
                self.ledger.adopt(call, outputs, result)

    def release_batches(self) -> None:
        """Let the ranks drop the columns of batches that they keep."""
        if self.ledger is not None:
            with self._lock:
                self.ledger.release()

    def wait(self, handles: Sequence, timeout: float | None = None) -> list:
        """Outputs of the handles, in order.

        Args:
            timeout: seconds the wait may take. None: as long as ``deadlines`` say.

        Raises:
            WorkerError, WorkerDied, WorkerTimeout: the first failure, also while other ranks hang.
        """
        outputs = self._stopping_on_failure(lambda: self._wait(handles, timeout))
        self._sent.difference_update(handle for handle in handles if handle in self._sent)
        return outputs

    def _begin_wait(
        self, handles: Sequence, timeout: float | None, diagnostics: WorkerDiagnostics, pid: Callable[[int], int | None]
    ) -> Wait:
        """The patience of a wait for calls, which have ``role``, ``method`` and ``rank``."""
        waited_for, first = set(map(id, handles)), handles[0]
        return Wait(
            self.deadlines,
            first.role,
            first.method,
            self.world_size,
            ahead=[(call.role, call.method) for call in self._sent if id(call) not in waited_for],
            timeout=timeout,
            progress=diagnostics.progress,
            pid=pid,
            describe=lambda rank: diagnostics.report(rank, pid(rank)),
        )

    def _timed_out(self, late: Sequence, wait: Wait, why: str, grace_s: float) -> WorkerTimeout:
        """The error of calls that are waited for no longer; their ranks are asked for the stacks of all threads."""
        ranks = sorted({call.rank for call in late})
        for rank in ranks:
            if (pid := wait.pid(rank)) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)  # faulthandler prints them to stderr
        time.sleep(grace_s)
        role, method = late[0].role, late[0].method
        known = [f"Rank {rank}:\n{text}" for rank in ranks if (text := wait.describe(rank))]
        place = waiting_for(role, method, ranks, self.world_size)
        report = "\n".join([f"{place[0].upper()}{place[1:]}.", *known])
        return WorkerTimeout(role, method, ranks, self.world_size, wait.waited, why, report)

    def run(self, role: str, method: str, requests: Sequence[Request], timeout: float | None = None) -> list:
        return self.wait(self.submit(role, method, requests), timeout)

    def stop(self) -> None:
        """End all processes. May be called twice."""
        if not self.stopped:
            self.stopped = True
            self._stop(at_once=self.failure is not None)

    def _stopping_on_failure(self, action: Callable[[], T]) -> T:
        with self._lock:
            try:
                return action()
            except WorkerGroupError as error:
                # the first failure stays: those after it are its consequences
                self.failure = self.failure or error
                self.stop()
                raise

    def as_futures(self, handles: Sequence) -> list:
        """Handles in the form handed to users: an object with ``get()`` for each rank."""
        return list(handles)

    @abstractmethod
    def _submit(self, role: str, method: str, requests: Sequence[Request], exposed: bool) -> list: ...

    @abstractmethod
    def _wait(self, handles: Sequence, timeout: float | None) -> list: ...

    @abstractmethod
    def _stop(self, at_once: bool) -> None: ...


class WorkerGroup(ABC):
    """All ranks of a role as one object: registered methods of its class are methods of the group.

    Attributes:
        timeout: seconds a call may take; None: as `set_deadlines` says. May be changed between calls.
        after_start: called when `restart` has started processes; None: nothing is.
    """

    after_start: Callable[[], Any] | None = None
    _start_hosts: partial[Hosts] | None = None

    def __init__(
        self,
        resource_pool: ResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | ColocatedClasses | None = None,
        *,
        cls_with_init: ClassWithInitArgs | ColocatedClasses | None = None,
        name_prefix: str | None = None,
        timeout: float | None = None,
        ray_wait_register_center_timeout: float = 300,
        device_name: str | None = None,
        **options,
    ):
        """Start the processes and build the roles in them.

        Args:
            resource_pool: how many processes, and where.
            ray_cls_with_init, cls_with_init: two names for the class and its arguments, or several of them from
                `create_colocated_worker_cls`.
            name_prefix: role name of a single class (default: the class name), and begin of the names of processes.
            timeout: seconds a call may take.
            ray_wait_register_center_timeout: seconds the start may take, constructors of the roles included.
            device_name: "cpu", "cuda", ...; the pool decides unless it is given.
            options: what only one kind of group knows.
        """
        classes = cls_with_init or ray_cls_with_init
        if resource_pool is None or classes is None:
            raise ValueError(
                f"{type(self).__name__} needs resource_pool and cls_with_init, to know what to start where."
            )
        if resource_pool.world_size < 1:
            raise ValueError(f"{type(self).__name__}: the resource pool has no processes; add_node first.")
        self.resource_pool, self.name_prefix, self.device_name = resource_pool, name_prefix, device_name
        roles = classes.roles(name_prefix)
        self._start_hosts = partial(self._start, resource_pool, roles, ray_wait_register_center_timeout, **options)
        self._adopt(self._start_hosts(), roles, timeout)

    @abstractmethod
    def _start(self, resource_pool: Any, roles: Mapping[str, ClassWithInitArgs], timeout: float, **options) -> Hosts:
        """Start the processes of the pool and build the roles in each."""

    def _adopt(self, hosts: Hosts, roles: Mapping[str, ClassWithInitArgs], timeout: float | None) -> None:
        """Make this group a view of these roles on running processes: bind their registered methods."""
        self._hosts, self._roles, self.timeout = hosts, dict(roles), timeout
        self._meshes: dict[str, Mesh] = {}
        self._positions: list[dict] | None = None
        self.role = next(iter(roles)) if len(roles) == 1 else None
        for role, classes in roles.items():
            for name in dir(classes.cls):
                # of the class, not of an object: the driver has none, and properties are not to run
                registration = getattr(getattr(classes.cls, name, None), MAGIC_ATTR, None)
                if not isinstance(registration, Registration):
                    continue
                shown = f"{role}_{name}" if self.role is None else name
                if hasattr(type(self), shown):
                    raise ValueError(
                        f"{classes.cls.__name__}.{name}: a group has a {name} of its own. Rename the method."
                    )
                setattr(self, shown, self._bound(role, name, registration))

    # What a group is --------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return self._hosts.world_size

    @property
    def pids(self) -> list[int]:
        """Process id of every rank."""
        return list(self._hosts.pids)

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """Return a view for each named role, on the same processes.

        Raises:
            ValueError: the group has no such role.
        """
        known = self._roles | self._fused_roles()
        if unknown := sorted(set(prefix_set) - set(known)):
            raise ValueError(f"spawn: roles {unknown} are not in this group; it holds {sorted(known)}.")
        return {role: self._view(role) for role in prefix_set}

    spawn_fused = spawn

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Give this group an attribute for each named role: ``group.actor.update()``."""
        for role, view in self.spawn(prefix_set).items():
            setattr(self, role, view)

    def set_deadlines(self, seconds: Mapping[str, float | None]) -> None:
        """Set limits of the calls to these processes by class; see `verl.single_controller.deadlines`."""
        self._hosts.deadlines.seconds = dict(seconds)

    def stop(self) -> None:
        """End the processes of this group, and of every view of them."""
        self._hosts.stop()

    def release_batches(self) -> None:
        """Let its processes drop the columns of batches that they keep for later calls, when they are next called."""
        self._hosts.release_batches()

    @property
    def traffic(self) -> Traffic:
        """Bytes to and from its processes since they were started; views of the same processes share it."""
        return self._hosts.traffic

    @property
    def failure(self) -> WorkerGroupError | None:
        """The first failure of its processes, which ended them all; None: there was none."""
        return self._hosts.failure

    @property
    def is_running(self) -> bool:
        """Whether its processes have neither failed nor been stopped."""
        return not self._hosts.stopped

    def restart(self) -> None:
        """Start processes in the place of this group's, whose roles are just built; other views keep the old ones.

        Raises:
            ValueError: the processes hold other roles too, or were not started by this group.
        """
        if self._start_hosts is None or len(self._roles) != 1 or set(self._start_hosts.args[1]) != set(self._roles):
            raise ValueError(f"restart: the group of {sorted(self._roles)} does not have its processes for itself.")
        self._hosts.stop()
        deadlines = self._hosts.deadlines.seconds
        self._adopt(self._start_hosts(), self._roles, self.timeout)
        self.set_deadlines(deadlines)
        if self.after_start is not None:
            self.after_start()

    def _view(self, role: str) -> WorkerGroup:
        # without __init__, which would start processes
        view = object.__new__(type(self))
        view._start_hosts = self._start_hosts
        view.resource_pool, view.name_prefix, view.device_name = self.resource_pool, self.name_prefix, self.device_name
        view._adopt(self._hosts, {role: (self._roles | self._fused_roles())[role]}, self.timeout)
        return view

    def _fused_roles(self) -> dict[str, ClassWithInitArgs]:
        """The roles inside the workers of `create_colocated_worker_raw_cls`."""
        return {
            role: classes
            for of_group in self._roles.values()
            for role, classes in getattr(of_group.cls, "fused_classes", {}).items()
        }

    # Calls by name ----------------------------------------------------------------------------------------------------

    def execute_all(self, method_name: str, *args, **kwargs) -> list:
        """Same as `execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_all_async(self, method_name: str, *args, **kwargs) -> list:
        """Call a method on every rank and return a future for each.

        If every argument is a list of world_size elements, each rank gets its own; else all get the same.
        """
        handles = self._submit_all(self._only_role(method_name), method_name, args, kwargs, exposed=True)
        return self._hosts.as_futures(handles)

    def execute_all_sync(self, method_name: str, *args, **kwargs) -> list:
        """Call a method on every rank and return the outputs by rank; arguments as in `execute_all_async`."""
        return self._hosts.wait(self._submit_all(self._only_role(method_name), method_name, args, kwargs), self.timeout)

    def execute_rank_zero(self, method_name: str, *args, **kwargs):
        """Same as `execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def execute_rank_zero_async(self, method_name: str, *args, **kwargs):
        """Call a method on rank 0 and return its future."""
        requests = [Request(0, args, kwargs, keep=True)]
        handles = self._hosts.submit(self._only_role(method_name), method_name, requests, exposed=True)
        return self._hosts.as_futures(handles)[0]

    def execute_rank_zero_sync(self, method_name: str, *args, **kwargs) -> Any:
        """Call a method on rank 0 and return its output."""
        requests = [Request(0, args, kwargs, keep=True)]
        return self._hosts.run(self._only_role(method_name), method_name, requests, self.timeout)[0]

    def wait(self, futures: Sequence) -> list:
        """Outputs of futures of this group, with its errors and its timeout."""
        return self._hosts.wait(futures, self.timeout)

    def _only_role(self, method_name: str) -> str:
        if self.role is None:
            raise ValueError(
                f"{method_name}: this group holds the roles {sorted(self._roles)}; spawn() one to call it."
            )
        return self.role

    # Meshes -----------------------------------------------------------------------------------------------------------

    def mesh(self, name: str | None = None) -> Mesh:
        """Return the mesh of this name that the workers registered; one part per rank if none did, or for None.

        Raises:
            ValueError: only some ranks registered it, or their positions make no mesh.
        """
        if name == ONLY_MESH:
            known = sorted({mesh for positions in self._mesh_positions() for mesh in positions})
            if len(known) > 1:
                raise ValueError(f"role {self.role} registered the meshes {known}: name one with register(..., mesh=).")
            name = known[0] if known else None
        if name is None:
            return Mesh.over_world(self.world_size)
        if name not in self._meshes:
            positions = [positions.get(name) for positions in self._mesh_positions()]
            if not any(positions):
                # not kept in `_meshes`: the role may register it in a later call
                return Mesh.over_world(self.world_size)
            self._meshes[name] = Mesh.from_positions(name, positions)
        return self._meshes[name]

    def _mesh_positions(self) -> list[dict]:
        """Return the meshes that each rank registered, name -> (dp_rank, is_collect).

        They are fetched once between two `clear_mesh_positions`.
        """
        if self._positions is None:
            requests = [Request(rank, (), {}, keep=True) for rank in range(self.world_size)]
            self._positions = self._hosts.run(self._only_role("mesh"), MESH_POSITIONS, requests, self.timeout)
        return self._positions

    def clear_mesh_positions(self) -> None:
        """Fetch mesh positions again at the next use: the call just made may have registered new ones."""
        self._positions = None

    # A registered method ----------------------------------------------------------------------------------------------

    def _bound(self, role: str, name: str, registration: Registration) -> Callable:
        group = self if self.role == role else _RoleView(self, role)

        def call(*args, **kwargs):
            return invoke(group, name, registration, args, kwargs)

        call.__name__, call.__doc__ = name, getattr(self._roles[role].cls, name).__doc__
        return call

    def _submit_all(
        self,
        role: str,
        method: str,
        args: tuple,
        kwargs: dict,
        sources: Sequence[int] | None = None,
        exposed: bool = False,
    ) -> list:
        """Send a call to every rank, arguments as in `execute_all_async`; only ``sources`` (None: all) send outputs."""
        ranks = range(self.world_size)
        values = [*args, *kwargs.values()]
        if all(isinstance(value, list) and len(value) == self.world_size for value in values):
            mine = [(tuple(a[r] for a in args), {k: v[r] for k, v in kwargs.items()}) for r in ranks]
        else:
            mine = [(args, kwargs)] * self.world_size
        # what no collect function reads is not sent back: outputs of tensor parallel ranks can be large
        requests = [Request(rank, *mine[rank], keep=sources is None or rank in sources) for rank in ranks]
        return self._hosts.submit(role, method, requests, exposed)


class _RoleView:
    """One role of a group that holds several, for its ``<role>_<method>`` names."""

    def __init__(self, group: WorkerGroup, role: str):
        self._group, self.role = group, role
        self._view: WorkerGroup | None = None

    def __getattr__(self, name: str):
        self._view = self._view or self._group._view(self.role)
        return getattr(self._view, name)


def invoke(group, name: str, registration: Registration, args: tuple, kwargs: dict) -> Any:
    """Run a registered method: wait for futures, select columns, pad or split rows, dispatch, run, collect, restore."""
    mode = registration.mode
    # first of all: what follows looks at the number of rows
    if registration.materialize_futures:
        args, kwargs = map_arguments(DataProtoFuture, lambda future: future.get(), args, kwargs)
    padding = partition = None
    if registration.balanced and mode.parts is not None:  # before columns are selected: it reads some of its own
        partition = plan_partition(args, kwargs, name, mode.parts(group))
    split = None
    if partition is not None:
        answer = mode.sources(group) if mode.sources else range(group.world_size)
        # else those that do not answer would have to be sent the column
        stays = registration.stays if len(answer) == group.world_size else ()
        split = SplitCall(partition.num_rows, _has_later_calls(args, kwargs), stays)
    args, kwargs = map_batches(lambda data: keep_columns(data, registration.reads), args, kwargs)
    if partition is not None:
        args, kwargs = map_batches(lambda data: split_rows(data, partition, split), args, kwargs)
    elif mode.parts is not None:
        args, kwargs, padding = pad_rows(args, kwargs, mode.parts(group))
    args, kwargs = mode.dispatch_fn(group, *args, **kwargs)
    is_rank_zero = registration.execute_mode is Execute.RANK_ZERO
    if is_rank_zero or getattr(registration.dispatch_mode, "name", None) == "RANK_ZERO":
        if mode.dispatch_fn is not dispatch_all_to_all:  # the mode spread the arguments
            args, kwargs = tuple(arg[0] for arg in args), {key: value[0] for key, value in kwargs.items()}
        args, kwargs = map_arguments(BatchPart, BatchPart.taken, args, kwargs)
        run = group.execute_rank_zero_sync if registration.blocking else group.execute_rank_zero_async
        return run(name, *args, **kwargs)
    # a call that joins rows gives a GroupFuture, which can open shared memory; other futures go out as they are
    exposed = not registration.blocking and mode.parts is None
    handles = group._submit_all(group.role, name, args, kwargs, mode.sources and mode.sources(group), exposed)
    if mode.parts is None:
        # only calls that split no batch register meshes, such as a role's init_model
        group.clear_mesh_positions()

    def collect(outputs: list) -> Any:
        if split is not None:
            group._hosts.bind(split, outputs, group.role)
        plain = [output.output if isinstance(output, KeptOutput) else output for output in outputs]
        result = restore_rows(drop_padding(mode.collect_fn(group, plain), padding), partition)
        if split is not None:
            group._hosts.adopt(split, outputs, result)
        return result

    if registration.blocking:
        return collect(group._hosts.wait(handles, group.timeout))
    if exposed:
        return mode.collect_fn(group, group._hosts.as_futures(handles))

    return GroupFuture(collect, handles, wait_fn=group.wait)


def _has_later_calls(args: tuple, kwargs: dict) -> bool:
    """Whether the plan of a call's batches names several methods, so that ranks may be called with them again."""
    plans = [value.partition_plan for value in (*args, *kwargs.values()) if isinstance(value, DataProto)]
    return any(plan is not None and len(plan.calls) > 1 for plan in plans)


# -- GroupFuture: the DataProtoFuture of a call on a worker group ----------------------------------------------------


@dataclass
class GroupFuture(DataProtoFuture):
    """DataProtoFuture of a call on a group: raises the group's errors, with role and rank, and keeps its timeout."""

    wait_fn: Callable[[list], list] = list
    """Futures of the group -> their outputs."""

    def _outputs(self) -> list:
        return self.wait_fn(self.futures)
