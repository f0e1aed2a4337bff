"""The checkpoint manager for workers of users that hold model and optimizer themselves; verl's own have engines."""

import os
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from verl.checkpoint.checkpoint_manager import CheckpointManager, random_state, set_random_state
from verl.checkpoint.shards import Joined
from verl.utils.distributed import get_rank, get_world_size


class FSDPCheckpointManager(CheckpointManager):
    """A `CheckpointManager` for a user's worker that holds model and optimizer itself: plain, or sharded by torch.

    Args:
        model: a Hugging Face model.
        optimizer, lr_scheduler: what trains it, if anything does.
        processing_class: saved next to the weights: a tokenizer or processor.
        checkpoint_config: has ``save_contents`` and ``load_contents``; None: the defaults of `CheckpointManager`.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        processing_class: Any = None,
        checkpoint_config: Any = None,
    ) -> None:
        save, load = (getattr(checkpoint_config, name, None) for name in ("save_contents", "load_contents"))
        held = _HeldModel(model, optimizer, lr_scheduler)
        super().__init__(held, processing_class, ("model", "optimizer", "extra") if save is None else save, load)

    def save_checkpoint(
        self,
        local_path: str | os.PathLike,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write the folder ``local_path``; all ranks call it together. ``hdfs_path`` has no effect."""
        self.save(local_path, global_step, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str | os.PathLike | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Continue from the folder ``local_path``; None: load nothing. ``hdfs_path`` has no effect."""
        if local_path is not None:
            self.load(local_path, del_local_after_load)


class _HeldModel:
    """Engine interface of `CheckpointManager`, for a model that a user's worker holds."""

    has_adapter = False
    source_dtype = None
    spec = SimpleNamespace(head="lm")

    def __init__(self, model: Any, optimizer: Any, schedule: Any) -> None:
        self.module, self.optimizer, self.schedule = model, optimizer, schedule
        self.topology = SimpleNamespace(rank=get_rank(), world_size=get_world_size())
        self.device = next(model.parameters()).device
        # never that of an engine of ours, whose files are cut otherwise
        self.layout = f"own {type(model).__name__}"

    def state(self, parts: Sequence[str]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if "model" in parts:
            state["model"] = get_model_state_dict(self.module)
        if "optimizer" in parts and self.optimizer is not None:
            # by parameter name, as in the files of engines; optimizer.state_dict() has numbers
            state["optimizer"] = get_optimizer_state_dict(self.module, self.optimizer)
        if "extra" in parts:
            schedule = None if self.schedule is None else self.schedule.state_dict()
            state["extra"] = {"lr_scheduler": schedule, "rng": random_state(self.device)}
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        if any(isinstance(part, Joined) for part in state.values()):
            raise ValueError(
                "the checkpoint was saved by another number of ranks, or of another class of model: a worker that "
                "holds its model itself reads its own pieces only. Load it with as many ranks as saved it."
            )
        if "model" in state:
            set_model_state_dict(self.module, state["model"])
        if "optimizer" in state and self.optimizer is not None:
            set_optimizer_state_dict(self.module, self.optimizer, state["optimizer"])
        if "extra" in state:
            if self.schedule is not None and state["extra"].get("lr_scheduler"):
                self.schedule.load_state_dict(state["extra"]["lr_scheduler"])
            set_random_state(state["extra"]["rng"], self.device)

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        # collective, and with both options the whole comes to rank 0 only: others get an empty dict
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole: dict[str, Any] = get_model_state_dict(self.module, options=options)
        yield from ((name, tensor.to(dtype)) for name, tensor in whole.items())
