"""Names of the Megatron worker groups of verl. Meshes made them needless: any group splits along dp."""

from verl.single_controller.ray.base import RayWorkerGroup

NVMegatronRayWorkerGroup = RayWorkerGroup
MegatronRayWorkerGroup = RayWorkerGroup
