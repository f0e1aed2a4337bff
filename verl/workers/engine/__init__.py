"""Training engines: one model on one mesh, behind one interface. ``build_engine`` chooses the backend."""

from __future__ import annotations

import logging
from typing import Any

import torch

from verl.models.loader import ModelSpec
from verl.utils.micro_batching import MicroBatching
from verl.workers.engine.base import Engine, LossFn, Topology, Want

__all__ = ["Engine", "LossFn", "MicroBatching", "ModelSpec", "Topology", "Want", "build_engine"]

logger = logging.getLogger(__name__)


def build_engine(
    strategy: str,
    spec: ModelSpec,
    engine_config: Any = None,
    optim_config: Any | None = None,
    *,
    total_steps: int = -1,
    grad_clip: float | None = None,
    device: str = "cpu",
    seed: int = 0,
    sp_size: int = 1,
) -> Engine:
    """Load a model and put it on its mesh. All ranks call it together.

    Args:
        strategy: ``local`` (one process), ``fsdp2`` (any number), or ``fsdp``, an older name for the same.
        engine_config: the ``fsdp_config`` section, or None for defaults.
        optim_config: the ``optim`` section; None builds an engine that only scores.
        total_steps: training steps of the run, the length of the learning-rate schedule.
        grad_clip: largest gradient norm; None for no limit.
        device: ``cpu`` or ``cuda``.
        seed: of weights the checkpoint does not hold, such as a value head.
        sp_size: ranks that share one sequence (Ulysses); more than 1 needs ``spec.remove_padding``.

    Raises:
        ValueError: for an unknown strategy, a model that cannot be built, or a precision that cannot train.
    """
    if strategy == "local":
        from verl.workers.engine.local import LocalEngine as Backend
    elif strategy in ("fsdp", "fsdp2"):
        if strategy == "fsdp":
            logger.info("strategy=fsdp runs on FSDP2 (fully_shard)")
        from verl.workers.engine.fsdp import FSDPEngine as Backend
    else:
        raise ValueError(f"strategy={strategy!r} is not built: use 'local', 'fsdp2' or 'fsdp'")
    if sp_size > 1 and not spec.remove_padding:
        raise ValueError(
            f"ulysses_sequence_parallel_size={sp_size} with model.use_remove_padding=false: ranks can share one packed "
            "sequence, not padded rows. Set model.use_remove_padding=true, or the size to 1."
        )
    if optim_config is not None:
        _check_precision(spec)
    return Backend(
        spec,
        engine_config,
        optim_config,
        total_steps=total_steps,
        grad_clip=grad_clip,
        device=device,
        seed=seed,
        sp_size=sp_size,
    )


def _check_precision(spec: ModelSpec) -> None:
    if torch.float16 in (spec.computed_in, spec.kept_in):
        raise ValueError(
            f"model_dtype={spec.param_dtype}, mixed_precision.param_dtype={spec.compute_dtype}: fp16 gradients vanish "
            "without loss scaling, which is not built: train in bf16 or fp32"
        )
    if spec.kept_in is torch.bfloat16:
        logger.warning("model_dtype=bf16: updates smaller than 1/256 of a weight are rounded away; fp32 keeps them")
