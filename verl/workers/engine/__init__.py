"""Training engines: one model on one mesh, behind one interface. ``build_engine`` chooses the backend."""

from __future__ import annotations

import logging
from typing import Any

import torch

from verl.batch.micro_batching import MicroBatching
from verl.models.liger import check_liger
from verl.models.loader import ModelSpec
from verl.utils.offload import read
from verl.workers.engine.base import Engine, LossFn, Want
from verl.workers.engine.reference import Reference
from verl.workers.engine.topology import Topology

__all__ = ["Engine", "LossFn", "MicroBatching", "ModelSpec", "Reference", "Topology", "Want", "build_engine"]

logger = logging.getLogger(__name__)


def build_engine(
    strategy: str,
    spec: ModelSpec,
    engine_config: Any = None,
    optim_config: Any | None = None,
    *,
    total_steps: int = -1,
    grad_clip: float | None = None,
    l2_coef: float = 0.0,
    device: str = "cpu",
    seed: int = 0,
    sp_size: int = 1,
    deepspeed_config: Any = None,
) -> Engine:
    """Load a model and put it on its mesh. All ranks call it together.

    Args:
        strategy: ``local`` (one process), ``fsdp2`` or ``fsdp`` (any number of processes: ``fully_shard``), ``fsdp1``
            (the older ``FullyShardedDataParallel``), or ``deepspeed`` (ZeRO).
        engine_config: the ``fsdp_config`` section, or None for defaults.
        optim_config: the ``optim`` section; None builds an engine that only scores.
        total_steps: training steps of the run, the length of the learning-rate schedule.
        grad_clip: largest gradient norm; None for no limit.
        l2_coef: half of it times the squared weights joins the loss; with ``local`` and FSDP2 only.
        device: ``cpu`` or ``cuda``.
        seed: of weights the checkpoint does not hold, such as a value head.
        sp_size: ranks that share one sequence (Ulysses); more than 1 needs ``spec.remove_padding``.
        deepspeed_config: the ``deepspeed`` section, which other strategies do not read; None for defaults.

    Raises:
        ValueError: for an unknown strategy, a model that cannot be built, kernels that do not run on ``device``, or a
            precision that cannot train.
    """
    if strategy == "local":
        from verl.workers.engine.local import LocalEngine as Backend
    elif strategy == "fsdp1":
        from verl.workers.engine.fsdp1 import FSDP1Engine as Backend
    elif strategy in ("fsdp", "fsdp2"):
        from verl.workers.engine.fsdp import FSDPEngine as Backend
    elif strategy == "deepspeed":
        Backend = _deepspeed_backend(deepspeed_config, spec, train=optim_config is not None)
    else:
        raise ValueError(f"strategy={strategy!r} is not built: use 'local', 'fsdp2', 'fsdp1' or 'deepspeed'")
    if l2_coef and Backend.__name__ not in ("LocalEngine", "FSDPEngine"):
        raise ValueError(
            f"l2_coef={l2_coef} with strategy={strategy}: this engine keeps weights and gradients in flat pieces and "
            "does not add the term. Use optim.weight_decay, or strategy=fsdp2 or local."
        )
    _check_kernels(spec, device)
    if sp_size > 1 and not spec.remove_padding:
        raise ValueError(
            f"ulysses_sequence_parallel_size={sp_size} with model.use_remove_padding=false: ranks can share one packed "
            "sequence, not padded rows. Set model.use_remove_padding=true, or the size to 1."
        )
    if optim_config is not None:
        _check_precision(spec)
    engine = Backend(
        spec,
        engine_config,
        optim_config,
        total_steps=total_steps,
        grad_clip=grad_clip,
        device=device,
        seed=seed,
        sp_size=sp_size,
        **({"deepspeed_config": deepspeed_config} if strategy == "deepspeed" else {}),
    )
    engine.l2_coef = l2_coef
    return engine


def _check_kernels(spec: ModelSpec, device: str) -> None:
    if spec.use_liger:
        check_liger("actor_rollout_ref.model.use_liger=true", device, "set use_liger=false")
    if spec.head_backend == "triton":
        option = "actor_rollout_ref.model.fused_kernel_options.impl_backend=triton"
        check_liger(option, device, "set impl_backend=torch")


def _deepspeed_backend(config: Any, spec: ModelSpec, train: bool) -> type[Engine]:
    """ZeRO's engine, or that of whole models where the stage leaves nothing to shard."""
    stage = read(config, "zero_stage", 2)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"deepspeed.zero_stage={stage!r} is no stage of ZeRO: use 0, 1, 2 or 3")
    if stage == 0 or (stage < 3 and not train):
        from verl.workers.engine.local import ReplicaEngine as Backend
    else:
        if train and spec.param_torch_dtype != torch.float32:
            raise ValueError(
                f"model_dtype={spec.param_dtype} with strategy=deepspeed: the sharded optimizer keeps the weights in "
                "fp32. Set model_dtype=fp32; mixed_precision.param_dtype is the format of forward and backward"
            )
        from verl.workers.engine.deepspeed import DeepSpeedEngine as Backend
    return Backend


def _check_precision(spec: ModelSpec) -> None:
    if torch.float16 in (spec.compute_torch_dtype, spec.param_torch_dtype):
        raise ValueError(
            f"model_dtype={spec.param_dtype}, mixed_precision.param_dtype={spec.compute_dtype}: fp16 gradients vanish "
            "without loss scaling, which is not built: train in bf16 or fp32"
        )
    if spec.param_torch_dtype is torch.bfloat16:
        logger.warning("model_dtype=bf16: updates smaller than 1/256 of a weight are rounded away; fp32 keeps them")
