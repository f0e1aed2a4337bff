"""Offloading to host memory: the options, and moving optimizer state. Needs no sharding library."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def read(config: Any, name: str, default: Any) -> Any:
    """Entry ``name`` of a mapping or a dataclass, or ``default``."""
    if config is None:
        return default
    return config.get(name, default) if hasattr(config, "get") else getattr(config, name, default)


def wants_offload(config: Any, name: str, device: torch.device) -> bool:
    """True if ``config`` enables offload ``name`` and the device has a memory of its own."""
    enabled = bool(read(config, name, False))
    if enabled and device.type == "cpu":
        logger.info("fsdp_config.%s has no effect on a CPU device", name)  # verl.config.checks tells the user, once
        return False
    return enabled


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move every tensor of the optimizer's state to ``device``."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(device, non_blocking=True)
    if device.type == "cpu" and torch.cuda.is_initialized():
        torch.cuda.synchronize()
