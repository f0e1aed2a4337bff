"""megatron-core's groups of ranks, made once a process, and this rank's place in them."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist

from verl.config.megatron import MegatronMesh
from verl.utils.distributed import Topology
from verl.utils.distribution import install_command

logger = logging.getLogger(__name__)

_made: list[MegatronMesh] = []
"""The mesh of this process's groups; empty before the first model."""


_NOTES = (
    "Apex is not installed",
    "full scope is deprecated",
    r"`torch\.distributed\.\w+_tensor` is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf",
)
"""Beginnings of warnings about the libraries' own code, which no user can act on."""


def import_megatron() -> Any:
    """megatron-core's ``parallel_state``.

    Raises:
        ImportError: megatron-core or mbridge is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import mbridge  # noqa: F401
        from megatron.core import parallel_state
    except ImportError as error:
        raise ImportError(
            f"strategy=megatron needs megatron-core and mbridge, which cannot be imported ({error}). Install them with "
            f"`bash scripts/install_engines.sh megatron` or `{install_command('megatron')}`, or use strategy=fsdp2."
        ) from error
    for text in _NOTES:
        warnings.filterwarnings("ignore", text)
    # its note that random states of several models are forked comes with every model
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    return parallel_state


def start_groups(mesh: MegatronMesh, seed: int) -> None:
    """Make the groups of ``mesh``, unless this process has them; all ranks call it together.

    Args:
        seed: of weights that are split over ranks, and of dropout.

    Raises:
        ValueError: the ranks do not divide so, the process has groups of another mesh, or no device to run on.
    """
    state = import_megatron()
    try:
        torch.cuda.current_device()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"strategy=megatron on this machine: megatron-core runs on CUDA devices only ({error}). Use strategy=fsdp2 "
            "or deepspeed, which run on a CPU too."
        ) from error
    if not mesh.fits:
        raise ValueError(
            f"megatron: the {mesh.world} ranks are no multiple of tp {mesh.tp} x pp {mesh.pp} x cp {mesh.cp}, or of "
            f"etp {mesh.etp} x ep {mesh.ep} x pp {mesh.pp}. Take a multiple of {mesh.divisor} ranks."
        )
    if state.model_parallel_is_initialized() and _made:
        if _made[0]._replace(vpp=1) != mesh._replace(vpp=1):
            raise ValueError(
                f"megatron: this process has groups of {_made[0]}, and a model of {mesh} was asked for. Give the roles "
                "of one process the same sizes."
            )
        return
    state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        context_parallel_size=mesh.cp,
        expert_model_parallel_size=mesh.ep,
        expert_tensor_parallel_size=mesh.etp,
    )
    _made[:] = [mesh]
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed)


def end_groups() -> None:
    """Forget the groups, so that another mesh can be made; all ranks call it together."""
    state = import_megatron()
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    _made.clear()


def use_virtual_pipeline(pieces: int) -> None:
    """Let the following calls of megatron-core see ``pieces`` of a model on each pipeline rank; models may differ."""
    state = import_megatron()
    state.set_virtual_pipeline_model_parallel_world_size(pieces if pieces > 1 else None)
    state.set_virtual_pipeline_model_parallel_rank(0 if pieces > 1 else None)


def place_of_rank() -> Topology:
    """This rank's place: the data-parallel ranks share a batch, and the last pipeline stage has the results."""
    state = import_megatron()
    is_output = (
        state.is_pipeline_last_stage()
        and state.get_tensor_model_parallel_rank() == 0
        and state.get_context_parallel_rank() == 0
    )
    return Topology(
        dist.get_rank(),
        dist.get_world_size(),
        state.get_data_parallel_rank(),
        state.get_data_parallel_world_size(),
        is_output,
        state.get_data_parallel_group(),
    )
