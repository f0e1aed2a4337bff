"""Registry of training backends by the name of ``strategy``, and ``build_engine``, which builds one of them.

A backend's module is imported only when its name is looked up.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from verl.config.engine import FSDPConfig, OptimConfig
from verl.models.compilation import check_compiler
from verl.models.liger import check_liger, choose_liger
from verl.models.loader import ModelSpec, load_config
from verl.utils.distributed import get_rank

if TYPE_CHECKING:
    from verl.workers.engine.engine import Engine

logger = logging.getLogger(__name__)

MODULES = {
    "local": "verl.workers.engine.local",
    "fsdp2": "verl.workers.engine.fsdp",
    "fsdp": "verl.workers.engine.fsdp",
    "fsdp1": "verl.workers.engine.fsdp1",
    "deepspeed": "verl.workers.engine.deepspeed",
    "megatron": "verl.workers.engine.megatron",
}
"""Module that registers each built-in backend."""
_ENGINES: dict[str, type[Engine]] = {}


def register_engine(*names: str) -> Callable[[type[Engine]], type[Engine]]:
    """Class decorator: make an ``Engine`` available under the given values of ``strategy``."""

    def register(engine_class: type[Engine]) -> type[Engine]:
        _ENGINES.update(dict.fromkeys(names, engine_class))
        return engine_class

    return register


def get_engine_class(strategy: str) -> type[Engine]:
    """Return the class registered under ``strategy``.

    Raises:
        ValueError: the name is unknown.
    """
    # imported here and not above: DeepSpeed and FSDP1 cost seconds, and may not be installed
    if strategy not in _ENGINES and strategy in MODULES:
        importlib.import_module(MODULES[strategy])
    if strategy not in _ENGINES:
        names = ", ".join(dict.fromkeys([*MODULES, *_ENGINES]))
        raise ValueError(f"strategy={strategy!r} is not supported; supported training backends: {names}")
    return _ENGINES[strategy]


def build_engine(
    strategy: str,
    spec: ModelSpec,
    engine_config: FSDPConfig | Mapping[str, Any] | None = None,
    optim_config: OptimConfig | None = None,
    *,
    backend_config: Any = None,
    total_steps: int = -1,
    grad_clip: float | None = None,
    l2_coef: float = 0.0,
    device: str = "cpu",
    seed: int = 0,
    sp_size: int = 1,
) -> Engine:
    """Load a model and place it on its mesh. All ranks call it together.

    Args:
        strategy: name of a backend: ``local`` (one process), ``fsdp2`` or ``fsdp`` (any number of processes:
            ``fully_shard``), ``fsdp1`` (the older ``FullyShardedDataParallel``), ``deepspeed`` (ZeRO), ``megatron``
            (megatron-core), or another that was registered.
        engine_config: the ``fsdp_config`` section, a mapping of its entries, or None for defaults.
        optim_config: the ``optim`` section; None builds an engine that only scores.
        backend_config: the section of the backend's own options, such as ``deepspeed``; None for defaults.
        total_steps: training steps of the run, the length of the learning-rate schedule.
        grad_clip: largest gradient norm; None for no limit.
        l2_coef: half of it times the squared weights is added to the loss; with ``local`` and FSDP2 only.
        device: ``cpu`` or ``cuda``.
        seed: of weights the checkpoint does not hold, such as a value head.
        sp_size: ranks that share one sequence (Ulysses); more than 1 needs ``spec.remove_padding``.

    Raises:
        ValueError: for an unknown strategy, a model that cannot be built, kernels that do not run on ``device``, or a
            precision that cannot train.
    """
    is_trained = optim_config is not None
    # a backend may have several classes: ZeRO stage 0 leaves nothing to shard
    engine_class = get_engine_class(strategy).choose(spec, backend_config, is_trained)
    if l2_coef and not engine_class.supports_l2_coef:
        raise ValueError(
            f"l2_coef={l2_coef} with strategy={strategy}: this engine keeps weights and gradients in flat pieces and "
            "does not add the term. Use optim.weight_decay, or strategy=fsdp2 or local."
        )
    if spec.use_liger is None:
        spec = replace(spec, use_liger=_chooses_liger(spec, strategy, device))
    if spec.compile_layers:
        _check_compiled(spec, strategy, backend_config, device)
    if spec.use_liger:
        check_liger("model.use_liger=true", device, "set use_liger=false")
    if spec.head_backend == "triton":
        check_liger("model.fused_kernel_options.impl_backend=triton", device, "set impl_backend=torch")
    if sp_size > 1 and not spec.remove_padding:
        raise ValueError(
            f"ulysses_sequence_parallel_size={sp_size} with model.use_remove_padding=false: ranks can share one packed "
            "sequence, not padded rows. Set model.use_remove_padding=true, or the size to 1."
        )
    if is_trained and torch.float16 in (spec.compute_torch_dtype, spec.param_torch_dtype):
        raise ValueError(
            f"model_dtype={spec.param_dtype}, mixed_precision.param_dtype={spec.compute_dtype}: fp16 gradients vanish "
            "without loss scaling, which is not built: train in bf16 or fp32"
        )
    if is_trained and spec.param_torch_dtype is torch.bfloat16:
        # bf16 has 8 significant bits, and a step at lr=1e-6 is far smaller than the last of them
        logger.warning("model_dtype=bf16: updates smaller than 1/256 of a weight are rounded away; fp32 keeps them")
    return engine_class(
        spec,
        engine_config,
        optim_config,
        backend_config=backend_config,
        total_steps=total_steps,
        grad_clip=grad_clip,
        l2_coef=l2_coef,
        device=device,
        seed=seed,
        sp_size=sp_size,
    )


def _chooses_liger(spec: ModelSpec, strategy: str, device: str) -> bool:
    """Decide ``use_liger=None``, and say so on a device where it could be."""
    if device != "cuda" or strategy == "megatron":
        return False
    is_on, reason = choose_liger(device, load_config(spec).model_type, spec.compile_layers)
    if get_rank() == 0:
        print(f"{spec.path}: liger-kernel is {'on' if is_on else 'off'}: {reason}", flush=True)
    return is_on


def _check_compiled(spec: ModelSpec, strategy: str, backend_config: Any, device: str) -> None:
    """Refuse ``compile_layers`` with what it was not made for, or without a compiler."""
    option, instead = "model.compile_layers=true", "set model.compile_layers=false"
    stage = getattr(backend_config, "zero_stage", 0)
    if strategy == "megatron" or strategy == "deepspeed" and stage == 3:
        raise ValueError(
            f"{option} with strategy={strategy}{' and zero_stage=3' * bool(stage)}: it gathers weights inside of "
            f"layers, where torch.compile cannot follow. Use strategy=fsdp2, or {instead}."
        )
    if spec.use_liger:
        raise ValueError(
            f"{option} with model.use_liger=true: both fuse the operations of layers. Leave use_liger null or false, "
            f"or {instead}."
        )
    check_compiler(option, device, instead)
