"""The accelerator of this process. The only module that spells "cuda".

Knows no process groups; those are in ``distributed.py``.
"""

from __future__ import annotations

import ctypes
import logging
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def count_cuda_devices() -> int:
    """CUDA devices that this process may use, counted without starting CUDA here.

    Where NVML cannot count (MIG slices, some containers) torch would start CUDA to do so, and a process that has cannot
    fork its workers; a child counts then.
    """
    if torch.version.cuda is None or torch.cuda.is_initialized() or torch.cuda._device_count_nvml() >= 0:
        return torch.cuda.device_count()
    # the child's CUDA context ends with it
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, bytes([min(torch.cuda.device_count(), 255)]))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read(1)
    os.waitpid(child, 0)
    return found[0] if found else 0


is_cuda_available: bool = torch.cuda._is_compiled() and count_cuda_devices() > 0
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


def driver_cuda_version() -> tuple[int, int] | None:
    """The newest CUDA version that this machine's NVIDIA driver runs, as (13, 0); None where NVML cannot say.

    NVML is asked because it starts no CUDA context, after which a process cannot fork its workers. It reads the
    version from libcuda, so forward-compatibility packages count.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    try:
        if nvml.nvmlInit_v2() != 0:
            return None
        failed = nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version))
        nvml.nvmlShutdown()
    except AttributeError:  # a driver of 2017 or earlier
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def cuda_problem() -> str | None:
    """Return why this process cannot compute on CUDA and what to do, as a sentence; None where it can."""
    built = torch.version.cuda
    if built is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} is a build without CUDA. Run `bash scripts/setup_env.sh` on this machine, with "
            "VERL_TORCH_INDEX=https://download.pytorch.org/whl/cu130 if the package index has CPU builds only, or pass "
            "trainer.device=cpu."
        )
    driver = driver_cuda_version() if built is not None else None
    if built is not None and driver is not None and driver[0] < int(built.split(".")[0]):
        index = {12: "cu126", 11: "cu118"}.get(driver[0], "cu130")  # PyTorch's wheels for that version of CUDA
        return (
            f"the NVIDIA driver runs CUDA {driver[0]}.{driver[1]}, and torch {torch.__version__} is built for CUDA "
            f"{built}. Update the driver (CUDA 13 needs 580 or newer), or take a build for CUDA {driver[0]}: "
            f"VERL_TORCH_INDEX=https://download.pytorch.org/whl/{index} bash scripts/setup_env.sh"
        )
    if count_cuda_devices() == 0:
        return (
            "torch finds no CUDA device on this machine. Pass trainer.device=cpu to run here, or check the driver with "
            "`nvidia-smi` and the torch build with "
            '`python -c "import torch; print(torch.version.cuda, torch.cuda.device_count())"`.'
        )
    return None


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


def use_deterministic_algorithms() -> None:
    """Have torch, cuBLAS and flash-attn give the same bits for the same numbers, in this process from now on.

    Where torch has no such algorithm for an operation it warns, with the operation's name.
    """
    # read when cuBLAS begins, and when flash-attn computes a gradient
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # slow
    torch.backends.cudnn.benchmark = False


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
    # torchrun and the controllers set LOCAL_RANK
    index, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if index >= count > 1:
        raise ValueError(
            f"device='cuda': this is process {index} of its node (LOCAL_RANK), and torch sees {count} CUDA devices. "
            "Start no more processes than devices: lower trainer.n_gpus_per_node."
        )
    index = min(index, count - 1)  # one device, and the others hidden: each process has its own under the number 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def device_memory(device: torch.device) -> int | None:
    """Bytes of memory of a device; None where it is the host's."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def empty_cache(device: torch.device) -> None:
    """Return cached device memory to the driver; nothing on CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -- Offloading to host memory: the options, and moving optimizer state. Needs no sharding library -------------------

logger = logging.getLogger(__name__)


def has_own_memory(device: torch.device) -> bool:
    """True if a device's memory is not the host's, so that something can be moved from one to the other."""
    return device.type != "cpu"


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move every tensor of the optimizer's state to ``device``."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(device, non_blocking=True)
    if device.type == "cpu" and torch.cuda.is_initialized():
        torch.cuda.synchronize()
