"""Fragments of trained weights in DeepSpeed's flat buffers, checkpoints made of them, and offload of the buffers.

Pieces are those of ``verl.checkpoint``: ``{"flat": (n,), "start": i, "shape": (...)}``, the numbers from i on,
laid out in a row. Knows the two layouts of DeepSpeed's sharded optimizers; needs no collective.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from verl.utils.device import move_optimizer_state


@dataclass(frozen=True)
class Fragment:
    """This rank's part of one weight: ``count`` numbers from ``start`` on, at ``offset`` of the buffer ``flat``."""

    flat: Tensor
    offset: int
    start: int
    count: int
    shape: torch.Size

    def view(self, tensor: Tensor) -> Tensor:
        """The part in a tensor laid out as ``flat``: in the buffer of weights, or of one of the optimizer's moments."""
        return tensor.narrow(0, self.offset, self.count)

    def piece(self, tensor: Tensor) -> dict[str, Any]:
        """The part in ``tensor`` as a checkpoint holds it."""
        return {"flat": self.view(tensor.detach()).clone(), "start": self.start, "shape": tuple(self.shape)}

    def local_part(self, name: str, saved: Any) -> Tensor:
        """This rank's numbers of what was saved: the whole tensor, or the same piece.

        Raises:
            ValueError: if it is of another shape, or another piece.
        """
        shape = tuple(saved["shape"] if isinstance(saved, Mapping) else saved.shape)
        if shape != tuple(self.shape):
            raise ValueError(
                f"{name} has shape {shape} in the checkpoint and {tuple(self.shape)} in this model: they are different "
                "models. Set model.path to the one the run was started from"
            )
        if not isinstance(saved, Mapping):
            return saved.reshape(-1).narrow(0, self.start, self.count)
        if (saved["start"], saved["flat"].numel()) != (self.start, self.count):
            raise ValueError(
                f"the checkpoint holds the numbers from {saved['start']} of {name} for this rank, which needs those "
                f"from {self.start}: its pieces are of another number of ranks or another ZeRO stage, and must be "
                "joined first"
            )
        return saved["flat"]


def find_fragments(module: nn.Module, zero_optimizer: Any, is_sliced: bool) -> dict[str, Fragment]:
    """This rank's parts of the trained weights by name; those it has no part of are left out.

    Args:
        zero_optimizer: DeepSpeed's sharded optimizer.
        is_sliced: whether every weight is split (stage 3), not the row of all of them (stages 1 and 2).
    """
    found = {}
    parameter: Any  # with attributes that DeepSpeed adds
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if is_sliced:
            group, offset, size = zero_optimizer.grad_position[zero_optimizer.get_param_id(parameter)]
            start = size * parameter.ds_zero_partition_rank
            count = min(size, parameter.ds_numel - start)  # the last slices are padded, or nothing but padding
            if count > 0:
                flat = zero_optimizer.fp32_partitioned_groups_flat[group]
                found[name] = Fragment(flat, offset, start, count, parameter.ds_shape)
        elif (mapping := parameter._hp_mapping) is not None:
            [flat] = zero_optimizer.optimizer.param_groups[mapping.param_group_index]["params"]
            here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
            found[name] = Fragment(flat, here.start, there.start, here.numel, parameter.shape)
    return found


# -- the state of an optimizer over flat buffers ------------------------------------------------------------------
def flat_optimizer_state(
    optimizer: Optimizer, fragments: Mapping[str, Fragment], groups: Sequence[list[str]]
) -> dict[str, Any]:
    """The optimizer's state by parameter name, as ``optimizer_state`` returns it, of this rank's parts.

    Args:
        groups: names of the parameters of each group of the optimizer.
    """
    by_name = {}
    for name, fragment in fragments.items():
        entry = optimizer.state.get(fragment.flat, {})
        if entry:
            # counts of steps are copied: one tensor under many names would be raised once for each after loading
            by_name[name] = {
                key: fragment.piece(value) if value.shape == fragment.flat.shape else value.clone()
                for key, value in entry.items()
            }
    saved = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {
        "state": by_name,
        "param_groups": [{**group, "params": names} for group, names in zip(saved, groups, strict=True)],
    }


@torch.no_grad()
def load_flat_optimizer_state(
    optimizer: Optimizer, fragments: Mapping[str, Fragment], groups: Sequence[list[str]], state: Mapping[str, Any]
) -> None:
    """Load the result of ``flat_optimizer_state``, or whole tensors in its place.

    Raises:
        ValueError: if the parameters are others.
    """
    if len(optimizer.param_groups) != len(state["param_groups"]):
        raise ValueError(
            f"the optimizer state has {len(state['param_groups'])} groups of parameters and this optimizer "
            f"{len(optimizer.param_groups)}: resume with the settings it was saved with"
        )
    for group, names, saved in zip(optimizer.param_groups, groups, state["param_groups"], strict=True):
        if set(names) != set(saved["params"]):
            odd = sorted(set(names) ^ set(saved["params"]))
            raise ValueError(
                f"the optimizer state is of {len(saved['params'])} parameters, this model has {len(names)}, and they "
                f"differ in {odd[0]!r}: resume with the model it was saved from"
            )
        group.update({key: value for key, value in saved.items() if key != "params"})
    optimizer.state.clear()
    for name, fragment in fragments.items():
        if name not in state["state"]:
            continue
        entry = optimizer.state[fragment.flat]
        for key, value in state["state"][name].items():
            if not isinstance(value, Mapping) and value.dim() == 0:
                entry[key] = value.clone()
                continue
            if key not in entry:
                entry[key] = torch.zeros_like(fragment.flat, requires_grad=False)
            fragment.view(entry[key]).copy_(fragment.local_part(f"{name}.{key}", value))


# -- offload between phases -------------------------------------------------------------------------------------------

Part = Literal["weights", "state"]
"""``weights``: the module's. ``state``: fp32 weights, the optimizer's moments, and buffers of gradients."""


class ZeroOffload:
    """Offload of one engine's parts between phases, which DeepSpeed keeps on the device.

    Args:
        library: DeepSpeed.
        parts: to offload.
        zero_optimizer: DeepSpeed's sharded optimizer, or what gathers the weights of a model that is not trained.
        optimizer: torch's, which the former steps; None for a model that is not trained.

    Raises:
        ValueError: if this optimizer of DeepSpeed cannot be moved.
    """

    def __init__(
        self,
        library: Any,
        parts: Collection[Part],
        module: nn.Module,
        zero_optimizer: Any,
        optimizer: Optimizer | None,
        device: torch.device,
    ) -> None:
        if parts and optimizer is not None and not hasattr(zero_optimizer, "offload_states"):
            raise ValueError(
                "deepspeed.zero_stage=1 in bf16: DeepSpeed's optimizer for it stays on the device, so there can be no "
                "param_offload and no optimizer_offload. Use zero_stage=2, or deepspeed.offload_optimizer=true"
            )
        self._kinds = library.runtime.zero.offload_config.OffloadStateTypeEnum
        self._parts = parts
        self._module, self._zero, self._optimizer, self._device = module, zero_optimizer, optimizer, device
        self.offloaded: set[Part] = set()

    def move(self, to_host: bool, parts: Collection[Part]) -> bool:
        """Move those of ``parts`` that are to be offloaded and are not there yet; returns whether there was one."""
        moved = [part for part in parts if part in self._parts and (part in self.offloaded) is not to_host]
        for part in moved:
            self._move(part, to_host)
        self.offloaded ^= set(moved)
        return bool(moved)

    def _move(self, part: Part, to_host: bool) -> None:
        device, kinds = torch.device("cpu") if to_host else self._device, self._kinds
        if part == "weights" and self._optimizer is None:
            parameter: Any  # with attributes that DeepSpeed adds
            for parameter in self._module.parameters():
                parameter.ds_tensor.data = parameter.ds_tensor.data.to(device)
            return
        if part == "weights":
            moved = {kinds.lp_params}
        elif hasattr(self._zero, "empty_partition_cache"):  # of stage 3
            # DeepSpeed would do these for its own fused AdamW only
            for flat in self._zero.fp32_partitioned_groups_flat:
                flat.data = flat.data.to(device)
            move_optimizer_state(self._optimizer, device)
            moved = {kinds.lp_grads, kinds.contiguous_grad_buffer}
        else:
            moved = {kinds.hp_params, kinds.optim_states}
        if to_host:
            self._zero.offload_states(include=moved, pin_memory=False)
            return
        # it would bring all back, so show it only the parts to move
        held = self._zero.offloaded_states
        others = set(held) - moved
        held -= others
        self._zero.reload_states()
        held |= others
