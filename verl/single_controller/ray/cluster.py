"""Start of Ray on this machine, closed to others, or the connection to a cluster; errors that a user can act on."""

import os
import secrets
import shutil
from collections.abc import Mapping
from typing import Any

import ray
from ray._private import ray_constants

from verl.utils.exit_codes import ExitCode

_FRUGAL = {
    "RAY_prestart_worker_first_driver": "0",  # no idle workers, a third of a CPU-second each
    "RAY_enable_worker_prestart": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SCHEDULER_EVENTS": "0",  # its advice on clusters; what a pool lacks is an error of ours
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


def start_own_cluster(options: Mapping[str, Any], runtime_env: Mapping[str, Any]) -> None:
    """Start Ray on this machine, closed to others.

    Args:
        options: num_cpus, object_store_memory_mb, include_dashboard.
        runtime_env: Ray's own.

    Raises:
        ClusterNotStarted: as `init_ray`.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in _FRUGAL.items()})
    _close_to_others()
    init_ray(
        address="local",  # without it Ray joins a cluster that somebody has started on this machine
        num_cpus=options.get("num_cpus") or max(8, os.cpu_count() or 1),
        object_store_memory=_object_store_bytes(options.get("object_store_memory_mb")),
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


def _object_store_bytes(size_MiB: float | None) -> int:
    """Size of the object store: as requested, else 1 GiB, or half of the shared memory if that is less."""
    if size_MiB:
        return int(size_MiB * 1024**2)
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 1 << 31
    return max(80 << 20, min(1 << 30, free // 2))
