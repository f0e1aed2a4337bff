"""The controller on Ray: pools are placement groups (`pools.py`), ranks are actors.

Only this folder knows Ray. Every actor is a `WorkerHost`: it takes its rank from environment variables, and builds its
roles there. Batches go to actors of this node through shared memory, to others through the
object store.
"""

import faulthandler
import gc
import os
import pickle
import signal
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # of clusters that others started; read when ray is imported

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.protocol import DataProto
from verl.single_controller.base.worker import WorkerHost, free_port
from verl.single_controller.base.worker_group import (
    ClassWithInitArgs,
    ColocatedClasses,
    Hosts,
    Request,
    ResourcePool,
    WorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_raw_cls,  # noqa: F401  its public address
)
from verl.single_controller.batch_cache import BatchLedger, CacheState, KeptOutput, SentBatch
from verl.single_controller.channel import (
    INLINE_BYTES,
    ArgumentMessages,
    MessageEndpoint,
    SharedMemoryPool,
    WireMessage,
)
from verl.single_controller.errors import (
    WorkerDiagnostics,
    WorkerDied,
    WorkerError,
    WorkerGroupError,
    end_of_stderr,
)
from verl.single_controller.processes import is_readable, open_pidfd, outcome_by_pidfd
from verl.single_controller.ray.cluster import init_ray, small_store_note, start_own_cluster
from verl.single_controller.ray.pools import (  # noqa: F401  users import pools from here
    BegunActors,
    RayResourcePool,
    end_begun,
    extract_pg_from_exist,
    lend,
    merge_resource_pool,
    sort_placement_group_by_node_ip,
)
from verl.single_controller.ray.reaper import start_reaper
from verl.telemetry.run_record import say_early

_STACK_DUMP_S = 0.5

_DEATH_GRACE_S = 1.0
"""Seconds to look for a dead rank when another one raised: the loss of a peer is the cause, its error the echo."""

create_colocated_worker_cls_fused = create_colocated_worker_cls


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class (plain, or wrapped by ``ray.remote``) with its arguments and the resources of its actor."""

    def __init__(self, cls: Any, *args, **kwargs):
        super().__init__(cls, *args, **kwargs)
        self.options: dict[str, Any] = {}

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Add Ray actor options."""
        self.options.update(options)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        self.options.setdefault("resources", {}).update(additional_resource)


class RayWorkerGroup(WorkerGroup):
    """A `WorkerGroup` of Ray actors."""

    controller = "ray"
    _hosts: "RayHosts"

    def _start(
        self,
        resource_pool: RayResourcePool,
        roles: Mapping[str, ClassWithInitArgs],
        timeout: float,
        *,
        bin_pack: bool = True,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        profile_steps: Sequence[int] | None = None,
        worker_nsight_options: Mapping[str, Any] | None = None,
        **options,
    ) -> "RayHosts":
        if options:
            raise TypeError(f"RayWorkerGroup does not know the options {sorted(options)}.")
        if worker_names or worker_handles:
            raise ValueError("RayWorkerGroup: to attach to running workers use RayWorkerGroup.from_detached.")
        prefix = self.name_prefix or uuid.uuid4().hex[:6]
        nsight = dict(worker_nsight_options or {}) if profile_steps else {}
        if profile_steps and nsight.get("capture-range-end") == "repeat-shutdown:":  # one range for each profiled step
            nsight["capture-range-end"] += str(6 * len(profile_steps))
        actor_options = _actor_options(resource_pool, roles, self.device_name, detached, nsight)
        pgs = resource_pool.get_placement_groups("STRICT_PACK" if bin_pack else "PACK", self.device_name)
        name = prefix + (next(iter(roles.values())).cls.__name__ if len(roles) == 1 else "WorkerHost")
        actors = resource_pool.take_actors(actor_options) or _start_actors(pgs, name, list(roles), actor_options)
        hosts = RayHosts([actor for _, actor in actors], [name for name, _ in actors], owned=not detached)
        hosts.setup(roles, resource_pool, prefix, timeout)
        return hosts

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: "ClassWithInitArgs | ColocatedClasses | None" = None,
        timeout: float | None = None,
        **kwargs,
    ) -> "RayWorkerGroup":
        """Attach to the running actors of a group: by the ``worker_names`` of that group, or by their handles.

        ``name_prefix`` must be that group's, if it had one: it names the role.
        """
        if ray_cls_with_init is None or not (worker_names or worker_handles):
            raise ValueError("from_detached needs ray_cls_with_init, and worker_names or worker_handles.")
        actors = list(worker_handles or map(ray.get_actor, worker_names))
        group = object.__new__(cls)
        group.resource_pool, group.name_prefix, group.device_name = None, name_prefix, None
        hosts = RayHosts(actors, list(worker_names or ()), owned=False)
        roles = ray_cls_with_init.roles(name_prefix)
        hosts.meet("+".join(roles), timeout)
        group._adopt(hosts, roles, timeout)
        return group

    @property
    def worker_names(self) -> list[str]:
        """Actor name of each rank, for `from_detached`."""
        return list(self._hosts.names)

    @property
    def workers(self) -> list[Any]:
        """Actor handle of each rank."""
        return list(self._hosts.actors)

    @property
    def master_address(self) -> str:
        return self._hosts.master[0]

    @property
    def master_port(self) -> str:
        return str(self._hosts.master[1])


NVMegatronRayWorkerGroup = MegatronRayWorkerGroup = RayWorkerGroup
"""Names of the worker groups for Megatron. Meshes made them needless: any group splits along dp."""


def _actor_options(
    pool: RayResourcePool, roles: Mapping[str, Any], device_name: str | None, detached: bool, nsight: dict[str, Any]
) -> dict[str, Any]:
    """Return options of an actor: the share of a bundle that lets ``max_colocate_count`` groups live in a pool."""
    share = 1.0 / pool.max_colocate_count
    accelerator = pool.accelerator(device_name)
    options: dict[str, Any] = {"num_cpus": share}
    if accelerator == "GPU":
        options["num_gpus"] = share
    elif accelerator:
        options["resources"] = {accelerator: share}
    if detached:
        options["lifetime"] = "detached"
    if nsight:
        options["runtime_env"] = {"nsight": nsight}
    for classes in roles.values():
        options.update(getattr(classes, "options", {}))
    return options


def _start_actors(
    pgs: Sequence[Any], name: str, roles: Sequence[str], options: Mapping[str, Any], modules: Sequence[str] = ()
) -> list[tuple[str, Any]]:
    """Start an actor on each bundle of the placement groups; returns name and handle of each, by rank."""
    # rank k takes the k-th seat, nodes in the order of their addresses: the same place in every run
    seats = [(number, pg, local) for number, pg in enumerate(pgs) for local in range(pg.bundle_count)]
    actor_cls = ray.remote(RayWorkerHost)
    actors = []
    for rank, (number, pg, local) in enumerate(seats):
        strategy = PlacementGroupSchedulingStrategy(placement_group=pg, placement_group_bundle_index=local)
        actor_name = f"{name}_{number}:{local}"
        placed = actor_cls.options(name=actor_name, scheduling_strategy=strategy, **options)
        actors.append((actor_name, placed.remote(f"{'+'.join(roles)}:{rank}", modules)))
    return actors


class RayWorkerHost(WorkerHost):
    """A `WorkerHost` as an actor."""

    def __init__(self, label: str, modules: Sequence[str] = ()):
        """Make the host.

        Args:
            label: what Ray puts before each line this actor prints.
            modules: imported at once, before a role asks for them.
        """
        super().__init__()
        gc.disable()  # until the roles are here: their arguments bring their modules
        for module in modules:
            import_module(module)
        self._label = label
        faulthandler.register(signal.SIGUSR1, file=2)
        self._address = (ray.util.get_node_ip_address(), free_port())
        self._driver = MessageEndpoint(SharedMemoryPool(_dumps))

    def __repr__(self) -> str:
        return self._label

    def setup(self, env: Mapping[str, str], roles: Mapping[str, Callable[[], Any]]) -> int:
        pid = super().setup({**env, "LOCAL_RANK": self._device(env["LOCAL_RANK"])}, roles)
        gc.freeze()
        gc.enable()
        return pid

    def identity(self) -> tuple[int, str, tuple[str, int]]:
        """Process id, id of the node it runs on, and the address at which it can be rank 0 of a process group."""
        return os.getpid(), ray.get_runtime_context().get_node_id(), self._address

    def can_open(self, wire_message: WireMessage, expected: bytes) -> bool:
        """True if this process can read the driver's shared memory: same node, same user, same view of /proc."""
        try:
            return bytes(self._driver.open(wire_message)()) == expected
        except OSError:
            return False

    def call_shared(self, role: str, method: str, keep: bool, wire_message: WireMessage) -> WireMessage:
        """`call` with arguments and output in shared memory."""
        output = self._call_opened(role, method, keep, self._driver.open(wire_message))
        return self._driver.address(self._driver.memory_pool.pack(output))

    def call_stored(self, role: str, method: str, keep: bool, /, *args, **kwargs) -> Any:
        """`call` with a batch in the output pickled here, where its bytes are counted."""
        output = self.call(role, method, keep, *args, **kwargs)
        return _Pickled.of(output) if isinstance(output, DataProto | KeptOutput) else output

    def _call_opened(self, role: str, method: str, keep: bool, open_content: Callable[[], tuple]) -> Any:
        args, kwargs = open_content()  # freed with this frame: the answer then reports their memory as released
        return self.call(role, method, keep, *args, **kwargs)

    def _device(self, local_rank: str) -> str:
        """Number under which torch sees the device of this actor: 0 if Ray hides the others."""
        ids = next((ids for ids in ray.get_runtime_context().get_accelerator_ids().values() if ids), None)
        if ids is None:
            return local_rank
        # torch counts the visible devices from 0; where none are named it sees all of them
        names = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("ASCEND_RT_VISIBLE_DEVICES") or ""
        visible, device = names.split(","), str(ids[0])
        return str(visible.index(device)) if device in visible else device


class _RayCall:
    """One call on one rank. ``endpoint``: opens the output, if it is in shared memory."""

    def __init__(self, ref: ray.ObjectRef, rank: int, role: str, method: str, endpoint: MessageEndpoint | None = None):
        self.ref, self.rank, self.role, self.method = ref, rank, role, method
        self._endpoint = endpoint
        self._output: list = []

    def problem(self) -> Exception | None:
        """Return the exception of a finished call."""
        if ray.wait([self.ref], timeout=0)[0]:
            try:
                ray.get(self.ref)
            except (RayTaskError, RayActorError) as error:
                return error
        return None

    def output(self, answer: Any) -> Any:
        """Return the method's output from Ray's answer. A message is opened once."""
        if isinstance(answer, _Pickled):
            return answer.content
        if self._endpoint is None:
            return answer
        if not self._output:
            self._output.append(self._endpoint.open(answer)())
        return self._output[0]


class RayHosts(Hosts):
    """The actors of a group."""

    def __init__(self, actors: Sequence[Any], names: Sequence[str], owned: bool):
        """``owned``: whether they end with this group."""
        super().__init__()
        self.actors, self.names, self._owned = list(actors), list(names), owned
        self.world_size = len(self.actors)
        self.pids = [0] * self.world_size
        """By rank, 0 before `meet`."""
        self.master: tuple[str, int] = ("", 0)
        self._memory_pool = SharedMemoryPool(_dumps)
        self.ledger = BatchLedger(_dumps) if owned else None  # others may call actors that outlive their driver
        self._endpoints: dict[int, MessageEndpoint] = {}  # ranks that share memory with this process
        self._watched: dict[int, int] = {}  # rank -> pidfd, of those on this node
        self._nodes: dict[int, str] = {}  # rank -> Ray's id of its node
        self._diagnostics = WorkerDiagnostics(self.world_size if owned else 0)

    def setup(self, roles: Mapping, pool: ResourcePool, prefix: str, timeout: float) -> None:
        """Send every actor its rank and have it build the roles, within ``timeout`` seconds."""
        begin = time.monotonic()
        role = "+".join(roles)
        self.meet(role, timeout)
        roles_ref = ray.put(dict(roles))
        sizes, locals_ = pool.local_world_size_list(), pool.local_rank_list()
        rank_envs = [self._rank_env(rank, locals_[rank], sizes[rank], prefix) for rank in range(self.world_size)]
        refs = [actor.setup.remote(rank_env, roles_ref) for actor, rank_env in zip(self.actors, rank_envs, strict=True)]
        left = max(1.0, timeout - (time.monotonic() - begin))
        self.wait([_RayCall(ref, rank, role, "__init__") for rank, ref in enumerate(refs)], left)

    def meet(self, role: str, timeout: float | None) -> None:
        """Fetch process ids; watch the processes on this node by pidfd; find the ranks that can open shared memory."""
        calls = [_RayCall(actor.identity.remote(), rank, role, "__init__") for rank, actor in enumerate(self.actors)]
        here = ray.get_runtime_context().get_node_id()
        for rank, (pid, node, address) in enumerate(self.wait(calls, timeout)):
            self.pids[rank], self._nodes[rank] = pid, node
            self.master = self.master if rank else address
            if node == here and (fd := open_pidfd(pid)) is not None:
                self._watched[rank] = fd
        # which ranks can open our shared memory; to the others batches go through the object store
        # a byte too long to travel inline
        expected = os.urandom(INLINE_BYTES + 1)
        packed = self._memory_pool.pack(pickle.PickleBuffer(expected))
        endpoints = {rank: MessageEndpoint(self._memory_pool) for rank in self._watched}
        calls = [
            _RayCall(self.actors[rank].can_open.remote(endpoint.address(packed), expected), rank, role, "__init__")
            for rank, endpoint in endpoints.items()
        ]
        able = self.wait(calls, timeout)
        self._endpoints = {rank: endpoint for (rank, endpoint), can in zip(endpoints.items(), able, strict=True) if can}

    def as_futures(self, handles: Sequence) -> list:
        """Plain ObjectRefs: `ray.get` takes them."""
        return [handle.ref for handle in handles]

    def _rank_env(self, rank: int, local_rank: int, local_world_size: int, prefix: str) -> dict[str, str]:
        rank_env: dict[str, Any] = {
            "RANK": rank,
            "WORLD_SIZE": self.world_size,
            "WG_PREFIX": prefix,
            "WG_BACKEND": "ray",
        }
        rank_env |= {"LOCAL_RANK": local_rank, "RAY_LOCAL_RANK": local_rank}
        rank_env |= {"LOCAL_WORLD_SIZE": local_world_size, "RAY_LOCAL_WORLD_SIZE": local_world_size}
        rank_env |= {"MASTER_ADDR": self.master[0], "MASTER_PORT": self.master[1]}
        rank_env |= self._diagnostics.environment(rank) if self._owned else {}
        return {name: str(value) for name, value in rank_env.items()}

    def _submit(self, role: str, method: str, requests: Sequence[Request], exposed: bool) -> list[_RayCall]:
        stored, messages = _Stored(requests), ArgumentMessages(self._memory_pool, f"{role}.{method}")
        calls = []
        for rank, args, kwargs, keep in requests:
            # a user reads an exposed future with ray.get, which cannot open a segment
            actor, endpoint = self.actors[rank], None if exposed else self._endpoints.get(rank)
            if endpoint is not None:
                ref = actor.call_shared.remote(role, method, keep, endpoint.address(messages.pack(args, kwargs)))
            else:
                kwargs = {name: stored(value) for name, value in kwargs.items()}
                call = actor.call if exposed else actor.call_stored
                ref = call.remote(role, method, keep, *map(stored, args), **kwargs)
            calls.append(_RayCall(ref, rank, role, method, endpoint))
        self.traffic.add(role, method, sent=messages.nbytes + stored.nbytes)
        return calls

    def _wait(self, handles: Sequence, timeout: float | None) -> list:
        # users may bring plain ObjectRefs of their own calls: of those no rank is known
        calls = [h if isinstance(h, _RayCall) else _RayCall(h, -1, "the group", "a call") for h in handles]
        if not calls:
            return []
        wait = self._begin_wait(calls, timeout, self._diagnostics, self._local_pid)
        refs = [call.ref for call in calls]
        while True:
            try:
                answers = ray.get(refs, timeout=wait.slice_s)
                break
            except GetTimeoutError:
                _, pending = ray.wait(refs, num_returns=len(refs), timeout=0)
                late = [call for call in calls if call.ref in pending]
                if late and (why := wait.reason_to_stop([call.rank for call in late])):
                    raise self._timed_out(late, wait, why, _STACK_DUMP_S) from None
            except RayActorError as error:
                raise self._death(calls, error) from None
            except RayTaskError as error:
                raise self._failure(calls, error) from None
        wait.finish()
        for call, answer in zip(calls, answers, strict=True):
            if isinstance(answer, WireMessage | _Pickled):
                self.traffic.add(call.role, call.method, received=answer.nbytes)
        return [call.output(answer) for call, answer in zip(calls, answers, strict=True)]

    def _local_pid(self, rank: int) -> int | None:
        """Process id of a rank on this node."""
        return self.pids[rank] if rank in self._watched else None

    def _failure(self, calls: list[_RayCall], error: RayTaskError) -> WorkerGroupError:
        """Return the error of a method that raised, or the death of a rank just before, which is its cause."""
        _, pending = ray.wait([call.ref for call in calls], num_returns=len(calls), timeout=0)
        all_seen_alive = len(self._watched) == self.world_size and not any(map(is_readable, self._watched.values()))
        # where a rank has ended, or cannot be watched, Ray's answer to its call tells how it is, and may take a moment
        if pending and not all_seen_alive:
            ray.wait(pending, timeout=_DEATH_GRACE_S)
        problems = [(call, call.problem()) for call in calls]
        for call, problem in problems:
            if isinstance(problem, RayActorError):
                return self._death([call], problem)
        # others fail at once when a node dies; Ray itself notices later
        for call in (call for call, problem in problems if problem is None and call.ref in pending and call.rank >= 0):
            if lost := _why_lost(self._nodes.get(call.rank)):
                pid = self.pids[call.rank] or None
                return WorkerDied(call.role, call.rank, self.world_size, call.method, pid, lost_node=lost)
        if isinstance(error.cause, WorkerError):
            return error.cause
        call = next((call for call, problem in problems if problem is not None), calls[0])
        cause = f"{type(error.cause).__name__}: {error.cause}"
        return WorkerError(call.role, call.rank, self.world_size, call.method, cause, str(error))

    def _death(self, calls: list[_RayCall], error: RayActorError) -> WorkerDied:
        call = next((call for call in calls if isinstance(call.problem(), RayActorError)), calls[0])
        pid = (self.pids[call.rank] or None) if call.rank >= 0 else None
        how: tuple[int | None, int | None] = (None, None)  # signal, exit code
        for _ in range(20 if call.rank in self._watched else 0):  # known once Ray has collected the process
            if (how := outcome_by_pidfd(self._watched[call.rank])) != (None, None):
                break
            time.sleep(0.02)
        stderr_end = _stderr_of_worker(pid) or (str(error) if how == (None, None) else "")
        report = self._diagnostics.report(call.rank) if call.rank in self._watched else ""
        lost = _why_lost(self._nodes.get(call.rank)) if how == (None, None) else ""
        return WorkerDied(call.role, call.rank, self.world_size, call.method, pid, *how, stderr_end, report, lost)

    def _stop(self, at_once: bool) -> None:
        if self._owned and ray.is_initialized():
            for actor in self.actors:
                ray.kill(actor)
        for fd in self._watched.values():
            os.close(fd)
        for endpoint in self._endpoints.values():
            endpoint.close()
        self._memory_pool.close()
        self._diagnostics.close()
        self._watched, self._endpoints = {}, {}


def _dumps(content: Any, protocol: int, buffer_callback: Callable) -> bytes:
    """Pickle by name where that is enough; by value what lives in ``__main__``, which is another module in a worker."""
    arrays: list = []
    try:
        # into a list of its own: if cloudpickle takes over, the caller must not get each array twice
        stream = pickle.dumps(content, protocol=protocol, buffer_callback=arrays.append)
    except (pickle.PicklingError, AttributeError):  # a function inside a function
        stream = b"__main__"
    # text of a batch that has the word costs time, and nothing else
    if b"__main__" in stream:
        return ray.cloudpickle.dumps(content, protocol=protocol, buffer_callback=buffer_callback)
    for array in arrays:
        buffer_callback(array)
    return stream


class _Stored:
    """Arguments of one call as they are sent: what several ranks get goes into the object store once."""

    def __init__(self, requests: Sequence[Request]):
        # identity is enough: the requests hold the values while this lives
        self._users = Counter(id(value) for request in requests for value in (*request.args, *request.kwargs.values()))
        self._refs: dict[int, ray.ObjectRef] = {}
        self.nbytes = 0
        """Bytes of the DataProtos so far, each once."""

    def __call__(self, value: Any) -> Any:
        small = isinstance(value, str | bytes | int | float | bool | ray.ObjectRef | CacheState | None)
        if small:
            return value
        if id(value) not in self._refs:
            pickled = value
            if isinstance(value, DataProto | SentBatch):
                pickled = _Pickled.of(value, opens=True)
                self.nbytes += pickled.nbytes
            if self._users[id(value)] < 2:
                return pickled
            self._refs[id(value)] = ray.put(pickled)
        return self._refs[id(value)]


class _Pickled:
    """A batch on its way through Ray, pickled here, which tells its bytes; Ray carries the arrays as they are."""

    def __init__(self, stream: bytes, arrays: list[pickle.PickleBuffer], opens: bool):
        self._stream, self._arrays, self._opens = stream, arrays, opens
        self.nbytes = len(stream) + sum(array.raw().nbytes for array in arrays)

    @staticmethod
    def of(content: Any, opens: bool = False) -> "_Pickled":
        """``opens``: it arrives as its content; else as an object that has ``nbytes`` and ``content``."""
        arrays: list[pickle.PickleBuffer] = []
        return _Pickled(_dumps(content, protocol=5, buffer_callback=arrays.append), arrays, opens)

    content: Any

    def __reduce__(self):
        return _arrived, (None if self._opens else self.nbytes, self._stream, *self._arrays)


def _arrived(nbytes: int | None, stream: bytes, *arrays: Any) -> Any:
    content = pickle.loads(stream, buffers=arrays)
    if nbytes is None:
        return content
    pickled = object.__new__(_Pickled)
    pickled.nbytes, pickled.content = nbytes, content
    return pickled


def _why_lost(node: str | None) -> str:
    """Address of a node and why it is taken for lost; empty where its raylet answers, or the node is not known.

    Ray itself gives a node up only after some missed heartbeats, a quarter of a minute later.
    """
    info = next((one for one in ray.nodes() if one["NodeID"] == node), None)
    if info is None:
        return ""
    address = info["NodeManagerAddress"]
    if not info["Alive"]:
        return f"{address} (Ray has given it up)"
    try:
        socket.create_connection((address, info["NodeManagerPort"]), timeout=3).close()
    except OSError as error:
        return f"{address} (its raylet does not answer: {error})"
    return ""


def _stderr_of_worker(pid: int | None) -> str:
    """The end of what a process of this node wrote to stderr."""
    node = getattr(ray._private.worker, "_global_node", None)  # None in a driver that joined a running cluster
    if node is None or pid is None:
        return ""
    files = sorted(Path(node.get_logs_dir_path()).glob(f"worker-*-{pid}.err"))
    text = files[-1].read_text(errors="replace") if files else ""
    return end_of_stderr("\n".join(line for line in text.splitlines() if not line.startswith(":")))


# The controller -------------------------------------------------------------------------------------------------------


class RayController:
    """The controller on Ray; the local one has the same names."""

    name = "ray"
    _ahead: "RayController | None" = None
    """Has started Ray before the run has a controller; the first that starts takes over."""
    ResourcePool = RayResourcePool
    ClassWithInitArgs = RayClassWithInitArgs
    WorkerGroup = RayWorkerGroup
    create_colocated_worker_cls = staticmethod(create_colocated_worker_cls)

    @property
    def driver_host(self) -> str:
        """Address at which the workers reach the driver."""
        return ray.util.get_node_ip_address()

    def __init__(self):
        self._started = False
        self._timeline: str | None = None
        self._reaper: Any = None

    def start(
        self, ray_init: Mapping[str, Any] | None = None, env: Mapping[str, Any] | None = None, batch_bytes: int = 0
    ) -> None:
        """Connect to the cluster RAY_ADDRESS names, else start one on this machine; not if Ray is already running.

        One of this machine listens on loopback, and takes calls with its own token only (``RAY_AUTH_MODE``).

        Args:
            ray_init: num_cpus (None: the cores, 8 at least: a CPU of Ray is a seat, not a core), object_store_memory_mb
                (MiB), include_dashboard, timeline_json_file (written by `stop`), runtime_env (Ray's own).
            env: environment variables of the workers, and of this process, from where they have them.
            batch_bytes: of the largest batch that will be sent; the object store has room for two such where
                ``object_store_memory_mb`` is None.
        """
        options = dict(ray_init or {})
        env = {name: str(value) for name, value in (env or {}).items()}
        os.environ.update(env)
        self._timeline = options.get("timeline_json_file")
        if ray.is_initialized():
            self._take_over()
            return
        self._started = True
        runtime_env = {name: _unfrozen(value) for name, value in dict(options.get("runtime_env") or {}).items()}
        if "RAY_ADDRESS" in os.environ:
            say_early(
                f"note: this run joins the Ray cluster at {os.environ['RAY_ADDRESS']}: Ray listens where that cluster "
                "was started to, process groups at the addresses of its nodes, and these ask for no key. Let only its "
                "nodes reach them (docs/security.md)."
            )
            init_ray(runtime_env={**runtime_env, "env_vars": env})
            if batch_bytes and (note := small_store_note(batch_bytes)):
                say_early(note)
            return
        runtime_env.pop("env_vars", None)  # they are in this process's environment, which the workers inherit
        start_own_cluster(options, runtime_env, batch_bytes)
        node = ray._private.worker._global_node
        for raylet in node.all_processes.get("raylet", []) if node else ():
            self._reaper = start_reaper(raylet.process.pid, node.get_session_dir_path())

    def begin(self, pools: Sequence[tuple[Sequence[int], Sequence[str]]], device: str, modules: Sequence[str]) -> None:
        """Start the actors of a run's pools, if this controller has started Ray, and do not wait for them.

        The run's own controller, pools and worker groups find Ray and the actors when they start; other actors than
        those they want end then.

        Args:
            pools: processes on each node, and the names of the roles in them.
            modules: what the roles import, so that they find it loaded.

        Raises:
            ValueError: a pool needs more than Ray has.
        """
        if not self._started:
            return
        RayController._ahead = self
        begun = []
        for processes, roles in pools:
            pool = RayResourcePool(processes, max_colocate_count=1)
            options = _actor_options(pool, {}, device, False, {})
            pgs = pool.get_placement_groups("STRICT_PACK", device)
            actors = _start_actors(pgs, f"{uuid.uuid4().hex[:6]}WorkerHost", roles, options, modules)
            begun.append(BegunActors(pool, "STRICT_PACK", device, options, actors))
        lend(begun)

    def _take_over(self) -> None:
        """Own the Ray that another controller has started ahead of this one."""
        ahead, RayController._ahead = RayController._ahead, None
        if ahead not in (None, self):
            self._started, self._reaper = ahead._started, ahead._reaper
            ahead._started, ahead._reaper = False, None

    def stop(self) -> None:
        """Write the timeline if one was requested; end Ray if this controller started it."""
        if self._started:
            RayController._ahead = None
            end_begun()
        if self._timeline and ray.is_initialized():
            ray.timeline(filename=self._timeline)
        if self._started:
            self._started = False
            ray.shutdown()
        if self._reaper is not None:
            self._reaper.communicate(b"ended")
            self._reaper = None


def _unfrozen(value: Any) -> Any:
    """Plain dicts and lists, which Ray may fill in."""
    if isinstance(value, Mapping):
        return {name: _unfrozen(item) for name, item in value.items()}
    return [_unfrozen(item) for item in value] if isinstance(value, list | tuple) else value
