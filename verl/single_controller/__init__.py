"""One driver, n workers: how one call becomes n calls, on Ray or on forked processes."""

from verl.single_controller.errors import (
    WorkerDied,
    WorkerError,
    WorkerGroupError,
    WorkerGroupStopped,
    WorkerTimeout,
)

__all__ = ["WorkerDied", "WorkerError", "WorkerGroupError", "WorkerGroupStopped", "WorkerTimeout", "get_controller"]


def get_controller(name: str):
    """The controller of this name: "ray", "local", or "torchrun" in ranks that torchrun started.

    It has the classes ``ResourcePool``, ``ClassWithInitArgs``, ``WorkerGroup``, the function
    ``create_colocated_worker_cls``, and ``start(ray_init, env)`` and ``stop()``. Ray is imported only if asked for.
    """
    if name == "ray":
        from verl.single_controller.ray.base import RayController

        return RayController()
    if name == "local":
        from verl.single_controller.local import LocalController

        return LocalController()
    if name == "torchrun":
        from verl.single_controller.torchrun import TorchrunController

        return TorchrunController()
    raise ValueError(
        f"trainer.controller={name!r} is not a controller. Use 'ray', or 'local' for one machine without Ray."
    )
