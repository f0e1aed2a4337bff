"""The group of all ranks of a role, and the few collectives the engines need.

Every function works without a process group too: one process is then a world of its own.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from verl.utils.device import collective_backend, current_device, get_device_name
from verl.utils.py_functional import is_loopback

logger = logging.getLogger(__name__)


def ensure_process_group(device: str = "cpu", timeout_s: float = 600.0) -> None:
    """Join the process group named by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, unless already a member.

    Without RANK in the environment this process becomes a group of one, which needs no network.

    Args:
        device: ``cpu`` (gloo) or ``cuda`` (nccl for device tensors, gloo for the rest).
        timeout_s: seconds a collective may wait for the slowest rank before it raises.
    """
    if dist.is_initialized():
        return
    current_device(device)  # first, or every rank would open a context on device 0
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:{collective_backend(device)}"
    timeout = timedelta(seconds=timeout_s)
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if is_loopback(os.environ.get("MASTER_ADDR", "")):
            # gloo would listen at the address of the host's name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = _rendezvous(rank, world_size, timeout)
        # no device_id: the groups of a mesh would then be split off this one, gloo's part included
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    else:
        hook = sys.excepthook
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        sys.excepthook = hook  # torch's puts [rank0] before each line of a traceback; there is one rank only


def _rendezvous(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store by which the ranks meet. Rank 0 serves it at MASTER_ADDR alone: it has no authentication.

    torch's own listens on all interfaces; it is taken where rank 0 does not have that address, or torchrun serves it.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return dist.PrefixStore("default_pg", open_store(address, port, world_size, is_master, timeout))


def open_store(address: str, port: int, world_size: int, is_master: bool, timeout: timedelta) -> dist.TCPStore:
    """The store at ``address``, which the master serves there and, where it can, nowhere else."""
    options: dict[str, Any] = {}
    if is_master:
        try:
            # backlog: all ranks come at once
            listener = socket.create_server((address, port), family=_family(address), backlog=2048)
            options["master_listen_fd"] = listener.detach()
        except OSError as error:  # a name of another interface, or a port that a store of this process serves already
            logger.warning("the store of the process group listens on all interfaces: %s:%d: %s", address, port, error)
    return dist.TCPStore(address, port, world_size, is_master, timeout, multi_tenant=True, **options)


def _family(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]


def initialize_global_process_group(timeout_second: float = 36000) -> tuple[int, int, int]:
    """Join the group torchrun describes; returns local rank, rank, world size."""
    ensure_process_group(get_device_name(), timeout_s=timeout_second)
    return int(os.environ.get("LOCAL_RANK", 0)), dist.get_rank(), dist.get_world_size()


def destroy_global_process_group() -> None:
    """Leave the process group, if a member of one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def get_rank() -> int:
    """This process's rank; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """Number of ranks; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_node_leader() -> bool:
    """True on one rank of each node: the one that renames and deletes files."""
    # LOCAL_RANK is the number of the device, which is 0 in every process where the others are hidden
    return int(os.environ.get("RAY_LOCAL_RANK") or os.environ.get("LOCAL_RANK") or get_rank()) == 0


def ranks_per_node() -> int:
    """Ranks of each node, where all nodes have as many and they are neighbours; else 0. All ranks call it together."""
    names = ("RAY_LOCAL_RANK", "LOCAL_RANK"), ("RAY_LOCAL_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    place = [next((int(os.environ[name]) for name in kind if name in os.environ), -1) for kind in names]
    places = all_gather_objects(place)
    size = places[0][1]
    return size if size > 0 and all(one == [rank % size, size] for rank, one in enumerate(places)) else 0


def barrier() -> None:
    """Wait for all ranks."""
    if get_world_size() > 1:
        dist.barrier()


def all_reduce_numbers(values: list[float], op: str, group: dist.ProcessGroup | None, device: torch.device) -> list:
    """Combine a list of numbers over ``group`` in one collective.

    Args:
        values: as many on every rank.
        op: ``"sum"`` or ``"max"``.
    """
    if not values or get_world_size() == 1 or dist.get_world_size(group) == 1:
        return list(values)
    packed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(packed, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op], group=group)
    return packed.tolist()


def all_gather_objects(value: object, group: dist.ProcessGroup | None = None) -> list:
    """``value`` of every rank of ``group``, in rank order; for small things, they are pickled."""
    if get_world_size() == 1:
        return [value]
    gathered: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


# -- Where a process stands among those that hold a model: its rank, its share of a batch, its part of each sequence -


@contextmanager
def raised_together() -> Iterator[None]:
    """Raise a rank's ValueError of the block on all ranks, which call it together: none waits for one that ended."""
    problem: ValueError | None = None
    try:
        yield
    except ValueError as error:
        problem = error
    problems = all_gather_objects(None if problem is None else str(problem))
    if found := next(filter(None, problems), None):
        raise problem or ValueError(found)


class Topology(NamedTuple):
    """Place of this process among those that hold the model."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    """Number of its share of a batch."""
    dp_size: int = 1
    is_output_rank: bool = True
    """Whether its results count; False on ranks that repeat another's work."""
    dp_group: dist.ProcessGroup | None = None
    """Ranks that hold other shares and the same part of each sequence; None: all ranks."""
    sp_rank: int = 0
    """Number of the part of each sequence that it runs."""
    sp_size: int = 1
    """Ranks that share one sequence: neighbours. All of them get the same rows."""
    sp_group: dist.ProcessGroup | None = None
    """None: no other rank."""

    @classmethod
    def of_ranks(cls, sp_size: int, device: str) -> Topology:
        """All ranks of the process group, ``sp_size`` neighbours to a sequence; all ranks call it together.

        Raises:
            ValueError: the ranks do not divide so.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size % sp_size:
            raise ValueError(
                f"ulysses_sequence_parallel_size={sp_size} does not divide the {world_size} ranks: use a divisor"
            )
        dp_rank, sp_rank = divmod(rank, sp_size)
        if sp_size == 1:
            return cls(rank, world_size, dp_rank, world_size)
        mesh = init_device_mesh(device, (world_size // sp_size, sp_size), mesh_dim_names=("dp", "sp"))
        groups = {"dp_group": mesh.get_group("dp"), "sp_group": mesh.get_group("sp")}
        is_output = sp_rank == 0
        return cls(
            rank, world_size, dp_rank, world_size // sp_size, is_output, sp_rank=sp_rank, sp_size=sp_size, **groups
        )
