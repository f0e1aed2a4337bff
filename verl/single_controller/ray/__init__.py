"""The controller on Ray, under the names users of verl know. Importing this package imports ray."""

from verl.utils.process import no_collection

with no_collection():  # an actor's first import is this one
    from verl.single_controller.ray.base import (
        RayClassWithInitArgs,
        RayController,
        RayWorkerGroup,
        create_colocated_worker_cls,
        create_colocated_worker_cls_fused,
        create_colocated_worker_raw_cls,
    )
    from verl.single_controller.ray.pools import RayResourcePool, extract_pg_from_exist, merge_resource_pool

__all__ = [
    "RayClassWithInitArgs",
    "RayController",
    "RayResourcePool",
    "RayWorkerGroup",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "extract_pg_from_exist",
    "merge_resource_pool",
]
