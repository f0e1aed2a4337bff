"""Start of Ray on this machine, closed to others, or the connection to a cluster; errors that a user can act on."""

import os
import secrets
import shutil
from collections.abc import Mapping
from typing import Any

import ray
from ray._private import ray_constants

from verl.telemetry.run_record import say_early
from verl.utils.exit_codes import ExitCode

_MIB = 1 << 20

_SMALLEST_STORE = 256 * _MIB
"""Bytes of an object store that holds batches of a few MiB: what they need twice over, and what Ray keeps itself."""

_FRUGAL = {
    "RAY_prestart_worker_first_driver": "0",  # no idle workers, a third of a CPU-second each
    "RAY_enable_worker_prestart": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SCHEDULER_EVENTS": "0",  # its advice on clusters; what a pool lacks is an error of ours
    # or all else that computes here, the run's rewards and tools among it, goes before generation and updates
    "RAY_worker_niceness": "0",
}
"""Environment of a cluster of our own."""


class ClusterNotStarted(RuntimeError):
    """Ray did not start, or the cluster could not be reached; the cause is Ray's own error."""

    exit_class = ExitCode.WORKER


def init_ray(**options: Any) -> None:
    """`ray.init`, whose errors say neither which option is behind them nor what to do.

    Raises:
        ClusterNotStarted: the cluster does not answer.
    """
    try:
        ray.init(**options)
    except (TypeError, ValueError, KeyError):  # of an option, which it names
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        address = os.environ.get("RAY_ADDRESS")
        if address:
            what, way_out = f"the cluster of RAY_ADDRESS={address}", "See that it runs (`ray status`), or unset it"
        else:
            what = f"a cluster on this machine (ray_init.num_cpus={options.get('num_cpus')})"
            way_out = (
                "On a loaded machine start it again, with trainer.max_restarts=1 by itself; give what it may use by "
                "ray_init.num_cpus and ray_init.object_store_memory_mb"
            )
        raise ClusterNotStarted(
            f"trainer.controller=ray needs {what}, and Ray says: {reason} {way_out}, or use "
            "trainer.controller=local, which needs no Ray on one machine."
        ) from error


def start_own_cluster(options: Mapping[str, Any], runtime_env: Mapping[str, Any], batch_bytes: int = 0) -> None:
    """Start Ray on this machine, closed to others.

    Args:
        options: num_cpus, object_store_memory_mb, include_dashboard.
        runtime_env: Ray's own.
        batch_bytes: of the largest batch, for which the object store gets room where options do not say its size.

    Raises:
        ClusterNotStarted: as `init_ray`.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in _FRUGAL.items()})
    _close_to_others()
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 1 << 31
    store, note = object_store_size(options.get("object_store_memory_mb"), batch_bytes, free)
    if note:
        say_early(note)
    init_ray(
        address="local",  # without it Ray joins a cluster that somebody has started on this machine
        num_cpus=options.get("num_cpus") or max(8, os.cpu_count() or 1),
        object_store_memory=store,
        include_dashboard=bool(options.get("include_dashboard", False)),
        dashboard_host="127.0.0.1",
        logging_level="WARNING",
        runtime_env=runtime_env or None,
    )


def _close_to_others() -> None:
    """Let the cluster listen on 127.0.0.1 alone, and take calls with this process's token only.

    Ray listens on all interfaces wherever its node has another address, and replaces 127.0.0.1 where it is given; the
    switch by which it takes loopback on macOS and Windows works on Linux too. The token is for other users of the
    machine: who reaches Ray runs code. Ray's own tools reach the cluster with a RAY_AUTH_TOKEN that the user has set.
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # for the processes that Ray starts
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled, no stubs
    except ImportError:  # a Ray without tokens
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # ray has read its environment when it was imported
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def object_store_size(size_MiB: float | None, batch_bytes: int, free: int) -> tuple[int, str]:
    """Return the bytes of the object store, and a note where they are not the usual ones.

    As requested; else room for two batches, that of a step and the one before it, 256 MiB at least; and at most half of
    the shared memory that is ``free``. Memory that holds no object is not taken.
    """
    if size_MiB:
        return int(size_MiB * _MIB), ""
    wanted = max(_SMALLEST_STORE, 2 * batch_bytes)
    size = max(80 * _MIB, min(wanted, free // 2))
    if size < 2 * batch_bytes:
        return size, (
            f"note: Ray's object store has {size // _MIB} MiB, half of the free shared memory, and two batches of this "
            f"run take up to {2 * batch_bytes // _MIB} MiB: what does not fit is written to disk. Give "
            "/dev/shm more (docker run --shm-size), or set ray_init.object_store_memory_mb."
        )
    if size > 1 << 30:
        return size, f"note: Ray's object store may take {size // _MIB} MiB of shared memory, two batches of this run."
    return size, ""


def small_store_note(batch_bytes: int) -> str:
    """Return a note if a node of the cluster that this process has joined has no room for two batches."""
    stores = [node["Resources"].get("object_store_memory", 0) for node in ray.nodes() if node["Alive"]]
    smallest = int(min(stores, default=0))
    if not smallest or smallest >= 2 * batch_bytes:
        return ""
    return (
        f"note: the object store of a node of this cluster has {smallest // _MIB} MiB, and two batches of this run "
        f"take up to {2 * batch_bytes // _MIB} MiB: what does not fit is written to disk. Start "
        "its nodes with a larger --object-store-memory."
    )
