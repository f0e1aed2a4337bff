"""AdamW and its learning-rate schedule.

Knows parameters and the optimizer section of a config; knows no model and no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from verl.utils.checkpoint.pieces import share_like


def build_optimizer(parameters: Iterable[Tensor], config: Any) -> AdamW:
    """AdamW over the parameters that need a gradient, one fused pass over memory a step.

    Args:
        config: ``lr``, ``betas``, ``eps``, ``weight_decay``.

    Source: Loshchilov & Hutter 2019 (arXiv:1711.05101).
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return AdamW(
        trained,
        lr=config.lr,
        betas=tuple(getattr(config, "betas", (0.9, 0.999))),
        eps=getattr(config, "eps", 1e-8),
        weight_decay=getattr(config, "weight_decay", 0.01),
        fused=True,
    )


def build_schedule(optimizer: AdamW, config: Any, total_steps: int) -> LambdaLR:
    """The schedule of ``config.warmup_style`` over ``total_steps`` calls of ``step``.

    Args:
        config: ``warmup_style``, ``lr_warmup_steps`` (negative or None: ``lr_warmup_steps_ratio`` of the total),
            ``min_lr_ratio`` (None: 0), ``num_cycles``.

    Raises:
        ValueError: for an unknown style, or a cosine over an unknown number of steps.
    """
    warmup = getattr(config, "lr_warmup_steps", -1)
    if warmup is None or warmup < 0:
        warmup = int(getattr(config, "lr_warmup_steps_ratio", 0.0) * max(total_steps, 0))
    style = getattr(config, "warmup_style", "constant")
    if style == "constant":
        return LambdaLR(optimizer, constant_with_warmup(warmup))
    if style == "cosine":
        if total_steps <= 0:
            raise ValueError(
                f"optim.warmup_style=cosine needs the length of the run, and total_training_steps={total_steps}: set it"
            )
        low = getattr(config, "min_lr_ratio", None) or 0.0
        return LambdaLR(optimizer, cosine_with_warmup(warmup, total_steps, low, getattr(config, "num_cycles", 0.5)))
    raise ValueError(f"optim.warmup_style={style!r} is unknown: use 'constant' or 'cosine'")


def constant_with_warmup(warmup: int) -> Callable[[int], float]:
    """Step n runs at min(1, n / warmup) of the learning rate: the first of a warm-up does not move the weights."""
    return lambda step: min(1.0, step / warmup) if warmup else 1.0


def cosine_with_warmup(warmup: int, total: int, low: float = 0.0, cycles: float = 0.5) -> Callable[[int], float]:
    """After the warm-up fall from 1 to ``low`` along ``cycles`` waves of a cosine.

    Step n, with x = (n - warmup) / (total - warmup), runs at low + (1 - low) (1 + cos(2 pi cycles x)) / 2; during the
    warm-up at low + (1 - low) n / warmup.

    Source: Loshchilov & Hutter 2017, SGDR (arXiv:1608.03983).
    """

    def ratio(step: int) -> float:
        if step < warmup:
            return low + (1 - low) * step / warmup
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return low + (1 - low) * 0.5 * (1 + math.cos(2 * math.pi * cycles * done))

    return ratio


def optimizer_state(optimizer: AdamW, names: list[str]) -> dict[str, Any]:
    """The optimizer's state by parameter name.

    Args:
        names: of the parameters, in the optimizer's order.
    """
    state = optimizer.state_dict()
    by_name = {names[index]: entry for index, entry in state["state"].items()}
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
    return {"state": by_name, "param_groups": groups}


def load_optimizer_state(optimizer: AdamW, names: list[str], state: dict[str, Any]) -> None:
    """Take back what ``optimizer_state`` gave, or whole tensors in its place.

    Raises:
        ValueError: if the parameters are others.
    """
    number = {name: index for index, name in enumerate(names)}
    groups = []
    for group in state["param_groups"]:
        unknown = [name for name in group["params"] if name not in number]
        if unknown or len(group["params"]) != len(names):
            raise ValueError(
                f"the optimizer state is of {len(group['params'])} parameters, this model has {len(names)}"
                f"{f', and none named {unknown[0]!r}' if unknown else ''}: resume with the model it was saved from"
            )
        # torch pairs parameters by their place in the list, so the list must be in this optimizer's order
        groups.append({**group, "params": sorted(number[name] for name in group["params"])})
    parameters = dict(zip(names, (p for group in optimizer.param_groups for p in group["params"]), strict=True))
    by_number = {
        number[name]: {key: share_like(parameters[name], value) for key, value in entry.items()}
        for name, entry in state["state"].items()
    }
    optimizer.load_state_dict({"state": by_number, "param_groups": groups})


def clip_gradients(parameters: list[Tensor], limit: float | None) -> float:
    """Norm of all gradients before clipping; they are scaled down to ``limit`` where it is finite and larger.

    Gradients that are not finite are left as they are: the caller skips the step.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return 0.0
    total = torch.nn.utils.get_total_norm(grads)
    if hasattr(total, "full_tensor"):
        total = total.full_tensor()
    norm = float(total)
    if limit is not None and math.isfinite(norm) and norm > limit:
        torch._foreach_mul_(grads, limit / (norm + 1e-6))
    return norm
