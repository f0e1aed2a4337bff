"""Where a process stands among those that hold a model: its rank, its share of a batch, its part of each sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


class Topology(NamedTuple):
    """Where this process stands among those that hold the model."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    """Which share of a batch it gets."""
    dp_size: int = 1
    is_output_rank: bool = True
    """Whether its results count; False on ranks that repeat another's work."""
    dp_group: dist.ProcessGroup | None = None
    """Ranks that hold other shares and the same part of each sequence; None: all ranks."""
    sp_rank: int = 0
    """Which part of each sequence it runs."""
    sp_size: int = 1
    """Ranks that share one sequence: neighbours. All of them get the same rows."""
    sp_group: dist.ProcessGroup | None = None
    """None: no other rank."""

    @classmethod
    def of_ranks(cls, sp_size: int, device: str) -> Topology:
        """All ranks of the process group, ``sp_size`` neighbours to a sequence; all ranks call it together.

        Raises:
            ValueError: the ranks do not divide so.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size % sp_size:
            raise ValueError(
                f"ulysses_sequence_parallel_size={sp_size} does not divide the {world_size} ranks: use a divisor"
            )
        dp_rank, sp_rank = divmod(rank, sp_size)
        if sp_size == 1:
            return cls(rank, world_size, dp_rank, world_size)
        mesh = init_device_mesh(device, (world_size // sp_size, sp_size), mesh_dim_names=("dp", "sp"))
        groups = {"dp_group": mesh.get_group("dp"), "sp_group": mesh.get_group("sp")}
        is_output = sp_rank == 0
        return cls(
            rank, world_size, dp_rank, world_size // sp_size, is_output, sp_rank=sp_rank, sp_size=sp_size, **groups
        )
