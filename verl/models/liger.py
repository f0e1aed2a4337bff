"""Triton kernels of liger-kernel (Hsu et al. 2024, arXiv:2410.10989) for a model's layers and for its logits.

The one module that imports liger_kernel, and only when a function here is called. Its losses are not used: policy
losses need the log-probability of each token.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from verl.utils.distribution import install_command


def check_liger(option: str, device: str, instead: str) -> None:
    """Check that the kernels of ``option`` can run on ``device``.

    Raises:
        ValueError: it is no CUDA device.
        ImportError: liger-kernel is not installed.
    """
    if device != "cuda":
        raise ValueError(
            f"{option} runs Triton kernels, which need a CUDA device, and this engine is on {device}: {instead}."
        )
    if find_spec("liger_kernel") is None:
        raise ImportError(
            f"{option} needs the package liger-kernel, which is not installed. Install it with "
            f"`{install_command('liger')}`, or {instead}."
        )


# -- layers -------------------------------------------------------------------------------------------------------


def choose_liger(device: str, model_type: str, is_compiled: bool = False) -> tuple[bool, str]:
    """Decide ``model.use_liger=null``, and say why.

    Args:
        is_compiled: whether torch.compile fuses the layers' operations.
    """
    if device != "cuda":
        return False, f"its kernels do not run on {device}"
    if is_compiled:
        return False, "torch.compile fuses the layers (model.compile_layers=true)"
    if find_spec("liger_kernel") is None:
        return False, f"the package liger-kernel is not installed (`{install_command('liger')}`)"
    if model_type not in known_families():
        return False, f"it has no layers for models of type {model_type!r}"
    return True, "set model.use_liger=false to train without"


def known_families() -> frozenset[str]:
    """Types of models that liger-kernel has layers for."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return frozenset(MODEL_TYPE_TO_APPLY_LIGER_FN)


def use_liger_layers(model: Any) -> None:
    """Replace the norms, gated MLPs and rotary embedding of ``model`` by liger's; weights keep their names.

    Norms and MLPs are those of this model alone; the rotary embedding is a function that all models of its family in
    this process share.

    Raises:
        ValueError: liger does not support the family.
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    kind = model.config.model_type
    if kind not in known_families():
        raise ValueError(
            f"model.use_liger=true: liger-kernel has no layers for models of type {kind!r}, only for "
            f"{', '.join(sorted(known_families()))}. Set use_liger=false."
        )
    names = vars(sys.modules[type(model).__module__])
    classes = {name: value for name, value in names.items() if isinstance(value, type)}
    try:
        _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
    finally:
        names.update(classes)  # or models that are built later would be changed too


# -- logits -------------------------------------------------------------------------------------------------------


def target_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target (t,) under softmax(logits), of fp32 logits (t, V) in one pass."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    return -liger_cross_entropy(logits, targets, reduction="none")


def target_log_probs_gradient(logits: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """Gradient of ``target_log_probs`` by the logits (t, V), which are overwritten, for an incoming ``grad`` (t,)."""
    logits = logits.detach().requires_grad_()
    with torch.enable_grad():
        log_probs = target_log_probs(logits, targets)
    return torch.autograd.grad(log_probs, logits, grad)[0]
