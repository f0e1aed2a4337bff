"""Pools of processes on a Ray cluster: a placement group for each node, one bundle for each process."""

import gc
import os
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from verl.single_controller.base.worker_group import ResourcePool
from verl.single_controller.errors import NodesMissing
from verl.telemetry.run_record import say_early

_PLACEMENT_PATIENCE_S = 60.0
"""Seconds a pool waits for nodes and free resources of a cluster that the run has joined."""

_OWN_CLUSTER_PATIENCE_S = 5.0
"""The same in a cluster started for this run, which does not grow."""

_SAID_EVERY_S = 15.0
"""Seconds between two lines about what is waited for."""


class RayResourcePool(ResourcePool):
    """Processes on the nodes of a Ray cluster: a placement group for each node, one bundle for each process."""

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool | None = None,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
    ):
        """Describe the pool; placement groups are made at the first `get_placement_groups`.

        Args:
            use_gpu: whether each process reserves a GPU; None: if the device of the group is not "cpu".
            accelerator_type: a Ray resource name every node must offer.
        """
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu, self.detached, self.accelerator_type = use_gpu, detached, accelerator_type
        self.name_prefix = name_prefix or f"pool_{uuid.uuid4().hex[:6]}"
        self.pgs: list[PlacementGroup] | None = None
        self.begun: BegunActors | None = None
        """Actors that were started on these placement groups before the pool was made."""

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", device_name: str | None = None
    ) -> list[PlacementGroup]:
        """The placement groups, made at the first call; nodes in the order of their addresses."""
        if self.pgs is None and (begun := _take_begun(self, strategy, device_name)):
            self.begun, self.pgs = begun, begun.pool.pgs
        if self.pgs is None:
            pgs = [self._make(number, count, strategy, device_name) for number, count in enumerate(self._store)]
            _wait_for_placement(self, pgs, device_name)
            self.pgs = sort_placement_group_by_node_ip(pgs)
            if not self.detached:
                # not at exit: Ray may be gone by then, and takes its placement groups along
                weakref.finalize(self, _give_back, pgs).atexit = False
        return self.pgs

    def take_actors(self, options: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return name and handle of the actors that were started ahead with these ``options``, once; others end."""
        begun = self.begun
        if begun is None:
            return []
        actors, begun.actors = begun.actors, []
        if begun.options != options:
            _end(actors)
            return []
        return actors

    def accelerator(self, device_name: str | None) -> str | None:
        """Ray's name of the device each process of a group on ``device_name`` reserves, or None."""
        uses_it = self.use_gpu
        if uses_it is None:
            uses_it = device_name != "cpu" if device_name else "GPU" in ray.cluster_resources()
        return ("NPU" if device_name == "npu" else "GPU") if uses_it else None

    def bundle(self, device_name: str | None) -> dict[str, float]:
        """Resources of one process."""
        accelerator = self.accelerator(device_name)
        return (
            {"CPU": 1.0}
            | ({accelerator: 1.0} if accelerator else {})
            # so little that only its presence counts
            | ({self.accelerator_type: 1e-4} if self.accelerator_type else {})
        )

    def _make(self, number: int, count: int, strategy: str, device_name: str | None) -> PlacementGroup:
        name = f"{self.name_prefix}verl_group_{'_'.join(map(str, self._store))}:{number}"
        lifetime = "detached" if self.detached else None
        return placement_group([self.bundle(device_name)] * count, strategy=strategy, name=name, lifetime=lifetime)


@dataclass
class BegunActors:
    """Actors of a pool that the run has not made yet, on placement groups that go over to it with them."""

    pool: RayResourcePool
    """Has the placement groups; gives them back when it is collected."""
    strategy: str
    device_name: str | None
    options: Mapping[str, Any]
    """The options of the actors."""
    actors: list[tuple[str, Any]]
    """Name and handle of each, by rank."""


_begun: list[BegunActors] = []


def lend(begun: Sequence[BegunActors]) -> None:
    """Keep actors for the first pools that have the same processes."""
    _begun.extend(begun)


def end_begun() -> None:
    """End the actors that no pool has taken, and give back what they reserve."""
    while _begun:
        _end(_begun.pop().actors)


def _take_begun(pool: RayResourcePool, strategy: str, device_name: str | None) -> BegunActors | None:
    """Return actors begun for a pool like this one. If there are only others they end: their resources are needed."""
    for begun in _begun:
        is_placed = (begun.pool.store, begun.strategy, False) == (pool.store, strategy, pool.detached)
        if is_placed and begun.pool.bundle(begun.device_name) == pool.bundle(device_name):
            _begun.remove(begun)
            return begun
    end_begun()
    return None


def _end(actors: Sequence[tuple[str, Any]]) -> None:
    for _, actor in actors:
        ray.kill(actor)


def _wait_for_placement(pool: RayResourcePool, pgs: Sequence[PlacementGroup], device_name: str | None) -> None:
    """Wait until every bundle has its resources; in a cluster that the run has joined, say for what.

    Raises:
        NodesMissing: that cluster has not had them in time.
        ValueError: a cluster started for this run has not so many.
    """
    address = os.environ.get("RAY_ADDRESS")
    patience = _PLACEMENT_PATIENCE_S if address else _OWN_CLUSTER_PATIENCE_S
    deadline = time.monotonic() + patience
    if all(pg.wait(0.5) for pg in pgs):
        return
    gc.collect()  # unreferenced pools return their resources
    needed = Counter({name: amount * pool.world_size for name, amount in pool.bundle(device_name).items()})
    needs = ", ".join(f"{name}: {amount:g}" for name, amount in needed.items())
    what, said_at = f"resource pool {pool.store} (processes by node) needs {needs}", -_SAID_EVERY_S
    while (left := deadline - time.monotonic()) > 0:
        if all(pg.wait(1) for pg in pgs):  # whole seconds: Ray takes 0.9 for 0, and would not wait
            return
        if address and time.monotonic() > said_at + _SAID_EVERY_S:
            said_at = time.monotonic()
            offered = _offered(pool.bundle(device_name), pgs)
            say_early(f"waiting for nodes: {what}; {offered}. {left:.0f} s are left")
    offered = _offered(pool.bundle(device_name), pgs)
    _give_back(pgs)
    if address:
        raise NodesMissing(
            f"{what}; after {patience:g} s {offered} (RAY_ADDRESS={address}). Start Ray on the "
            "nodes that are missing (ray start --address; `ray status` lists those that are there), wait until other "
            "runs end, or ask for less (trainer.nnodes, trainer.n_gpus_per_node). trainer.max_restarts=N tries again."
        )
    raise ValueError(
        f"{what}; {offered}. Ask for fewer processes (trainer.n_gpus_per_node, trainer.nnodes), or on CPU "
        "raise ray_init.num_cpus."
    )


def _offered(bundle: Mapping[str, float], pgs: Sequence[PlacementGroup]) -> str:
    """What the cluster has of a bundle's resources in all, its nodes, and how many processes have a place on them."""
    placed = sum(pg.bundle_count for pg in pgs if placement_group_table(pg)["state"] == "CREATED")
    has = ray.cluster_resources()
    resources = ", ".join(f"{name}: {has.get(name, 0):g}" for name in bundle)
    alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    nodes = f"{len(alive)} node{'s' * (len(alive) != 1)} ({', '.join(sorted(set(alive)))})"
    total = sum(pg.bundle_count for pg in pgs)
    return f"the cluster has {resources} on {nodes}, and {placed} of {total} processes have a place there"


def _give_back(pgs: Sequence[PlacementGroup]) -> None:
    if ray.is_initialized():
        for pg in pgs:
            remove_placement_group(pg)


def sort_placement_group_by_node_ip(pgs: Sequence[PlacementGroup]) -> list[PlacementGroup]:
    """Placement groups in the order of their nodes' addresses, so that ranks keep their nodes from run to run."""
    if len(pgs) == 1:
        return list(pgs)
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return sorted(pgs, key=lambda pg: address[placement_group_table(pg)["bundles_to_node_id"][0]])


def extract_pg_from_exist(
    resource_pools: Mapping[str, RayResourcePool], src_role_names: Sequence[str], resource_pool: RayResourcePool
) -> list[PlacementGroup]:
    """Return placement groups of the named pools that are large enough for ``resource_pool``, one for each node.

    Raises:
        ValueError: none that is left is large enough for a node.
    """
    named = [pool for name, pool in resource_pools.items() if name in src_role_names]
    free = sorted((pg for pool in named for pg in pool.get_placement_groups()), key=lambda pg: pg.bundle_count)
    found: dict[int, PlacementGroup] = {}
    # the smallest first, and into the smallest that holds it: larger ones are left for larger nodes
    for node, count in sorted(enumerate(resource_pool.store), key=lambda item: item[1]):
        fitting = next((pg for pg in free if pg.bundle_count >= count), None)
        if fitting is None:
            raise ValueError(
                f"no placement group of {list(src_role_names)} holds the {count} processes of node {node}."
            )
        free.remove(fitting)
        found[node] = fitting
    return [found[node] for node in sorted(found)]


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """Return one pool over the placement groups of both.

    Raises:
        ValueError: they differ in use_gpu, max_colocate_count, n_gpus_per_node or detached.
    """
    kinds = [(pool.use_gpu, pool.max_colocate_count, pool.n_gpus_per_node, pool.detached) for pool in (rp1, rp2)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"pools of different kinds cannot be merged: (use_gpu, max_colocate_count, ...) are {kinds}.")
    merged = RayResourcePool(
        rp1.store + rp2.store, rp1.use_gpu, f"{rp1.name_prefix}_{rp2.name_prefix}", rp1.max_colocate_count, rp1.detached
    )
    # keep rp1 and rp2: their placement groups are given back when they are collected
    merged.pgs = rp1.get_placement_groups() + rp2.get_placement_groups()
    return merged
