"""Start of Ray, or the connection to a cluster, with errors that a user can act on."""

import os
from typing import Any

import ray

from verl.utils.exit_codes import ExitCode


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
