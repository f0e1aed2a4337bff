"""Which accelerator this process computes on. The only module that spells "cuda".

Knows no process groups; those are in ``distributed.py``.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch

is_cuda_available: bool = torch.cuda.is_available()
"""True where an NVIDIA or ROCm device can be used."""

is_npu_available: bool = False
"""Ascend devices are not supported; the name is kept for code that asks."""


def get_device_name() -> str:
    """``"cuda"`` where one is available, else ``"cpu"``; the environment variable VERL_FORCE_DEVICE overrides it."""
    forced = os.environ.get("VERL_FORCE_DEVICE")
    return check_device(forced) if forced else ("cuda" if is_cuda_available else "cpu")


def check_device(name: str) -> str:
    """Return ``name`` if this process can compute on it.

    Raises:
        ValueError: for a device that is unknown or not present.
    """
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not supported: choose 'cpu' or 'cuda'")
    if name == "cuda" and not is_cuda_available:
        raise ValueError("device='cuda' was asked for, but torch sees no CUDA device: set trainer.device=cpu")
    return name


def get_torch_device() -> ModuleType:
    """The torch module of the current device, as ``torch.cuda``."""
    return getattr(torch, get_device_name())


def get_device_id() -> int:
    """Index of the current device; 0 on CPU."""
    return torch.cuda.current_device() if get_device_name() == "cuda" else 0


def auto_set_device(config: Any) -> None:
    """Set ``trainer.device`` of a tree to "cpu" where torch finds no accelerator; Ascend devices are not supported."""
    if not is_cuda_available and config.trainer.device != "cpu":
        config.trainer.device = "cpu"


def get_nccl_backend() -> str:
    """Name of the collective backend: ``"nccl"`` on CUDA, ``"gloo"`` on CPU."""
    return collective_backend(get_device_name())


def collective_backend(device: str) -> str:
    """The process group backend for tensors on ``device``."""
    return "nccl" if device == "cuda" else "gloo"


def get_visible_devices_keyword() -> str:
    """The environment variable that restricts which devices a process sees."""
    return "CUDA_VISIBLE_DEVICES"


def current_device(device: str) -> torch.device:
    """The device of this rank, made current: ``cuda:LOCAL_RANK`` (or the only visible one), or ``cpu``.

    Raises:
        ValueError: for a device that is unknown or not present.
        RuntimeError: in a fork of a process that had started CUDA.
    """
    if check_device(device) == "cpu":
        return torch.device("cpu")
    if torch.cuda._is_in_bad_fork():
        raise RuntimeError(
            "device='cuda' cannot be used in this process: it was forked from one that had started CUDA. Let the "
            "driver leave CUDA alone (torch.cuda.is_available() starts it where NVML is missing), or set "
            "trainer.controller=ray."
        )
    index, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if index >= count > 1:
        raise ValueError(
            f"device='cuda': this is process {index} of its node (LOCAL_RANK), and torch sees {count} CUDA devices. "
            "Start no more processes than devices: lower trainer.n_gpus_per_node."
        )
    index = min(index, count - 1)  # one device, and the others hidden: each process has its own under the number 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def empty_cache(device: torch.device) -> None:
    """Return cached device memory to the driver; nothing on CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
