"""The library DeepSpeed: importing it, and what it is told. The only module that imports it.

Knows no model and no batch.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from verl.utils.deepspeed_keys import conflicts
from verl.utils.distribution import install_command
from verl.utils.offload import read

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def import_deepspeed(device: torch.device) -> ModuleType:
    """The library, set up for ``device``.

    Raises:
        ImportError: it is not installed.
    """
    os.environ["DS_ACCELERATOR"] = device.type  # or it would guess from what the machine has
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator, set_accelerator
    except ImportError as error:
        raise ImportError(
            f"strategy=deepspeed needs the package deepspeed, which cannot be imported ({error}). Install it with "
            f"`{install_command('deepspeed')}`, or use strategy=fsdp2."
        ) from error
    if get_accelerator().device_name() != device.type:  # another library imported it before, and it guessed
        set_accelerator(_accelerator(device))
    # names of collectives that torch has renamed and this release still calls, at every step
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    # its collective over shared memory is compiled at first use, for minutes; gloo needs no compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _accelerator(device: torch.device) -> Any:
    if device.type == "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        return CPU_Accelerator()
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    return CUDA_Accelerator()


@contextmanager
def launch_variables(device: torch.device) -> Iterator[None]:
    """What DeepSpeed reads of its launcher's environment variables: the number of this process's device."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before


def deepspeed_settings(
    config: Any,
    device: torch.device,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    grad_clip: float | None,
    numbers: int,
) -> dict[str, Any]:
    """DeepSpeed's own configuration.

    Args:
        config: the section ``deepspeed`` of a role, or None for defaults.
        reduce_dtype: in which gradients are summed over ranks.
        numbers: parameters of the model; a bucket of more would be memory for nothing.

    Raises:
        ValueError: if ``config.config`` has a key that is decided here.
    """
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": grad_clip if grad_clip is not None and math.isfinite(grad_clip) else 0.0,
        "communication_data_type": _NAMES[reduce_dtype],
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero_settings(config, device, numbers),
    }
    if compute_dtype == torch.bfloat16:
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True}
    if compute_dtype == torch.float16:
        settings["fp16"] = {"enabled": True}
    further = read(config, "config", None) or {}
    for key, value, way_out in conflicts(further):
        raise ValueError(f"deepspeed.config.{key}={value!r} is decided by verl: {way_out}")
    return _merged(settings, further)


def _zero_settings(config: Any, device: torch.device, numbers: int) -> dict[str, Any]:
    stage = read(config, "zero_stage", 2)
    host = {"device": "cpu", "pin_memory": device.type != "cpu"}
    settings = {
        "stage": stage,
        "contiguous_gradients": read(config, "contiguous_gradients", True),
        "reduce_bucket_size": min(read(config, "reduce_bucket_size", 500_000_000), numbers),
        "allgather_bucket_size": read(config, "allgather_bucket_size", 500_000_000),
        # it would replace torch's linear layer in the whole process
        "memory_efficient_linear": False,
    }
    if read(config, "overlap_comm", None) is not None:
        settings["overlap_comm"] = config["overlap_comm"]
    if read(config, "offload_optimizer", False):
        settings["offload_optimizer"] = host
    if stage == 3:
        names = ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
        for name in (f"stage3_{name}" for name in names):
            if read(config, name, None) is not None:
                settings[name] = config[name]
        settings["zero_hpz_partition_size"] = read(config, "zero_hpz_partition_size", 1)
        if read(config, "offload_param", False):
            settings["offload_param"] = host
    return settings


def _merged(own: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(own)
    for name, value in changes.items():
        nested = isinstance(value, Mapping)
        merged[name] = _merged(dict(own.get(name) or {}), value) if nested else value
    return merged
