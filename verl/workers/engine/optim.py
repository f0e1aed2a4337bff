"""The optimizer, its learning-rate schedule, its state by parameter name.

Knows parameters and the optimizer section of a config; knows no model and no ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.checkpoint.shards import share_like
from verl.config.engine import OptimConfig
from verl.utils.distribution import install_command

logger = logging.getLogger(__name__)

Curve = Callable[[int], float]
"""Number of a step -> share of the peak learning rate."""

DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "exponential": lambda x: 2 * 0.5**x - 1,
    "minus_sqrt": lambda x: 1 - math.sqrt(x),
}
"""Ways from 1 to 0 as x goes from 0 to 1. ``minus_sqrt`` is that of Hagele et al. 2024 (arXiv:2405.18392)."""

STYLES = ("constant", "cosine", "linear", "wsd", "inverse-square-root")


def build_optimizer(parameters: Iterable[Tensor], config: OptimConfig) -> Optimizer:
    """Build the optimizer ``config.optimizer`` over the trained parameters, all with the same weight decay.

    ``AdamW`` is torch's, one fused pass over memory a step (Loshchilov & Hutter 2019, arXiv:1711.05101).
    ``AdamW8bit`` is torchao's (Dettmers et al. 2021, arXiv:2110.02861).

    Args:
        config: ``optimizer``, ``lr``, ``betas``, ``eps``, ``weight_decay``.

    Raises:
        ValueError: for an unknown name.
        ImportError: torchao is needed and not installed.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": tuple(config.betas),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    name = config.optimizer
    if name == "AdamW":
        return AdamW(trained, fused=True, **options)
    if name == "AdamW8bit":
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise ImportError(
                f"optim.optimizer=AdamW8bit needs the package torchao, which cannot be imported ({error}). Install it "
                f"with `{install_command('torchao')}`, or set optim.optimizer=AdamW."
            ) from error
        return AdamW8bit(trained, **options)
    raise ValueError(f"optim.optimizer={name!r} is unknown: use 'AdamW' or 'AdamW8bit'")


def build_schedule(optimizer: Optimizer, config: OptimConfig, total_steps: int) -> LambdaLR:
    """The schedule of ``config.warmup_style`` over ``total_steps`` calls of ``step``.

    Args:
        config: ``warmup_style``, ``lr_warmup_steps`` (negative or None: ``lr_warmup_steps_ratio`` of the total),
            ``min_lr_ratio`` (None: 0), ``min_lr``, ``lr_warmup_init``, ``num_cycles``, ``lr_wsd_decay_steps``,
            ``lr_wsd_decay_style``.

    Raises:
        ValueError: for an unknown style, or one that falls over an unknown number of steps.
    """
    return LambdaLR(optimizer, learning_rate_curve(config, total_steps))


def learning_rate_curve(config: OptimConfig, total_steps: int) -> Curve:
    """The share of ``config.lr`` at each step; arguments and errors are those of ``build_schedule``.

    ``constant``: stays at the peak after its warm-up from zero. All others rise from ``min_lr_ratio`` to 1 and fall no
    lower than ``low``, the greater of it and ``min_lr / lr``. ``lr_warmup_init``, if above 0, is where they rise from.

    - ``linear``: falls from 1 to ``low`` by the same amount each step.
    - ``cosine``: falls along ``num_cycles`` waves. Step n, with x = (n - warmup) / (total - warmup), runs at
      low + (1 - low) (1 + cos(2 pi cycles x)) / 2. Source: Loshchilov & Hutter 2017, SGDR (arXiv:1608.03983).
    - ``wsd``, warmup-stable-decay: stays at the peak and falls only over the last ``lr_wsd_decay_steps`` (None: a tenth
      of those after the warm-up, rounded up). Source: Hu et al. 2024, MiniCPM (arXiv:2404.06395).
    - ``inverse-square-root``: step n runs at sqrt(warmup / n), both at least 1. Source: Vaswani et al. 2017
      (arXiv:1706.03762).
    """
    warmup, style = warmup_steps(config, total_steps), config.warmup_style
    if style not in STYLES:
        raise ValueError(f"optim.warmup_style={style!r} is unknown: use {', '.join(STYLES)}")
    peak = config.lr or 1.0  # 0: weights stay as they are, whatever the curve
    first = config.lr_warmup_init / peak
    if style == "constant":
        return lambda step: first + (1 - first) * min(1.0, step / warmup) if warmup else 1.0
    if total_steps <= 0:
        raise ValueError(
            f"optim.warmup_style={style} needs the length of the run, and total_training_steps={total_steps} does not "
            "give it: set optim.total_training_steps, or use warmup_style=constant"
        )
    first = first or config.min_lr_ratio or 0.0
    low = max(config.min_lr_ratio or 0.0, config.min_lr / peak)
    start, decay = warmup, DECAYS["linear"]
    if style == "cosine":
        decay = lambda x: (1 + math.cos(2 * math.pi * config.num_cycles * x)) / 2  # noqa: E731
    if style == "wsd":
        # a decay longer than the run begins at the end of the warm-up
        after, steps = max(0, total_steps - warmup), config.lr_wsd_decay_steps
        start = total_steps - (math.ceil(after / 10) if steps is None else min(steps, after))
        decay = DECAYS[config.lr_wsd_decay_style]

    def factor(step: int) -> float:
        if step < warmup:
            return first + (1 - first) * step / warmup
        if style == "inverse-square-root":
            return max(low, math.sqrt(max(1, warmup) / max(1, step)))
        x = min(1.0, max(0, step - start) / max(1, total_steps - start))
        return low + (1 - low) * decay(x)

    return factor


def warmup_steps(config: OptimConfig, total_steps: int) -> int:
    """Steps of the warm-up: ``lr_warmup_steps``, or where that is negative or None ``lr_warmup_steps_ratio``."""
    steps = config.lr_warmup_steps
    if steps is None or steps < 0:
        return int(config.lr_warmup_steps_ratio * max(total_steps, 0))
    return steps


def warn_of_endless_warmup(config: OptimConfig, total_steps: int) -> None:
    """Warn where the run ends before its learning rate has reached ``config.lr``."""
    # an unknown length (-1) cannot be compared
    warmup = warmup_steps(config, total_steps)
    if 0 < total_steps <= warmup:
        logger.warning(
            "optim.lr_warmup_steps=%d is not less than the %d training steps of the run: the learning rate never "
            "reaches optim.lr=%g. Lower it, or train longer.",
            warmup,
            total_steps,
            config.lr,
        )


def optimizer_state(optimizer: Optimizer, names: list[str]) -> dict[str, Any]:
    """The optimizer's state by parameter name.

    Args:
        names: of the parameters, in the optimizer's order.
    """
    # torch numbers parameters across groups, in the order in which they were given
    state = optimizer.state_dict()
    by_name = {names[index]: entry for index, entry in state["state"].items()}
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
    return {"state": by_name, "param_groups": groups}


def load_optimizer_state(optimizer: Optimizer, names: list[str], state: Mapping[str, Any]) -> None:
    """Load the result of ``optimizer_state``, or whole tensors in its place.

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
    # of torchao: its moments are 8-bit tensors
    if hasattr(optimizer, "_new_buffer"):
        _quantise_again(optimizer)


@torch.no_grad()
def _quantise_again(optimizer: Any) -> None:
    """Bring moments of a torchao optimizer that came in fp32, joined from slices of other ranks, back to its format."""
    for parameter, state in optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            own = optimizer._new_buffer(parameter, key == "exp_avg")
            kinds = [type(getattr(tensor, "_local_tensor", tensor)) for tensor in (own, state[key])]
            if kinds[0] is not kinds[1]:
                state[key] = own.copy_(state[key])
