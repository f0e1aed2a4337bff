"""Taking to host memory, between phases, what DeepSpeed keeps on the device, and bringing it back.

Not ZeRO-Offload, with which it lies in host memory during training too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from verl.utils.offload import move_optimizer_state

Part = Literal["weights", "state"]
"""``weights``: the module's. ``state``: fp32 weights, the optimizer's moments, and buffers of gradients."""


class ZeroOffload:
    """Where the parts of one engine are, and moving them.

    Args:
        library: DeepSpeed.
        leaves: parts to take away.
        zero_optimizer: DeepSpeed's sharded optimizer, or what gathers the weights of a model that is not trained.
        optimizer: torch's, which the former steps; None for a model that is not trained.

    Raises:
        ValueError: if this optimizer of DeepSpeed cannot be moved.
    """

    def __init__(
        self,
        library: Any,
        leaves: Collection[Part],
        module: nn.Module,
        zero_optimizer: Any,
        optimizer: Optimizer | None,
        device: torch.device,
    ) -> None:
        if leaves and optimizer is not None and not hasattr(zero_optimizer, "offload_states"):
            raise ValueError(
                "deepspeed.zero_stage=1 in bf16: DeepSpeed's optimizer for it stays on the device, so there can be no "
                "param_offload and no optimizer_offload. Use zero_stage=2, or deepspeed.offload_optimizer=true"
            )
        self._kinds = library.runtime.zero.offload_config.OffloadStateTypeEnum
        self._leaves = leaves
        self._module, self._zero, self._optimizer, self._device = module, zero_optimizer, optimizer, device
        self.away: set[Part] = set()

    def leave(self, *parts: Part) -> bool:
        """Take those of ``parts`` away that are to leave; returns whether there was one."""
        leaving = [part for part in parts if part in self._leaves and part not in self.away]
        for part in leaving:
            self._move(part, torch.device("cpu"), away=True)
            self.away.add(part)
        return bool(leaving)

    def come_back(self, *parts: Part) -> None:
        """Bring back those of ``parts`` that are away."""
        for part in self.away & set(parts):
            self._move(part, self._device, away=False)
            self.away.discard(part)

    def _move(self, part: Part, device: torch.device, away: bool) -> None:
        kinds, is_sliced = self._kinds, hasattr(self._zero, "empty_partition_cache")
        if part == "weights" and self._optimizer is None:
            for parameter in self._module.parameters():
                parameter.ds_tensor.data = parameter.ds_tensor.data.to(device)
        elif part == "weights":
            self._move_by_library({kinds.lp_params}, away)
        elif is_sliced:
            # DeepSpeed would do these for its own fused AdamW only
            for flat in self._zero.fp32_partitioned_groups_flat:
                flat.data = flat.data.to(device)
            move_optimizer_state(self._optimizer, device)
            self._move_by_library({kinds.lp_grads, kinds.contiguous_grad_buffer}, away)
        else:
            self._move_by_library({kinds.hp_params, kinds.optim_states}, away)

    def _move_by_library(self, kinds: set[Any], away: bool) -> None:
        if away:
            self._zero.offload_states(include=kinds, pin_memory=False)
            return
        # it would bring all back, so show it only what is wanted
        held = self._zero.offloaded_states
        others = set(held) - kinds
        held -= others
        self._zero.reload_states()
        held |= others
