"""Metrics of a step: lists of numbers reduced to one each, and FLOPs, the two sides of MFU.

FLOPs are those of matrix products only, forward and backward (a multiply and an add are two operations).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.utils.device import get_device_name


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """One number for each name: the largest for names with ``max``, the least for ``min``, else the mean.

    The rule looks at the last part of the name (``actor/kl_max``, ``response_length/min``), not at the whole path, so
    ``minmax_diff`` is averaged.

    Args:
        metrics: name -> number, or a list of numbers (Python, numpy or torch scalars).

    Raises:
        ValueError: a metric has no values, or a value is not a number.
    """
    reduced: dict[str, float] = {}
    for name, values in metrics.items():
        if hasattr(values, "tolist"):  # numpy and torch, any number of dimensions
            values = values.reshape(-1).tolist()
        try:
            items = values if isinstance(values, list | tuple) else [values]
            numbers = np.asarray([float(value) for value in items], dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"metric {name!r}={values!r} cannot be reduced: give a number or a list of numbers"
            ) from error
        if numbers.size == 0:
            raise ValueError(f"metric {name!r} has no values: leave it out, or give it at least one number")
        words = name.rsplit("/", 1)[-1].split("_")
        reduce = np.max if "max" in words else np.min if "min" in words else np.mean
        reduced[name] = float(reduce(numbers))
    return reduced


_DENSE_BF16_TFLOPS = (  # first match wins, so longer names stand first; vendors' data sheets, without sparsity
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("GH200", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L20", 119.5),
    ("A40", 149.7),
    ("RTX 4090", 165.0),
    ("RTX 3090", 71.0),
    ("MI300X", 1307.0),
)


def get_device_flops(unit: str = "T", device: str | None = None) -> float:
    """Dense bf16 operations a second of the current device; infinity when it is not known, so that MFU reads 0.

    Args:
        device: ``cpu`` or ``cuda``; None: ``cuda`` where there is one.
    """
    scale = {"B": 1e9, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}[unit]
    if (device or get_device_name()) == "cpu":
        return float("inf")
    name = torch.cuda.get_device_name()
    return next((tflops * 1e12 / scale for key, tflops in _DENSE_BF16_TFLOPS if key in name), float("inf"))


class FlopsCounter:
    """Estimate achieved and promised FLOPS for one model.

    Args:
        config: a Hugging Face config of a decoder (its text config, for a model with several).
    """

    def __init__(self, config: Any) -> None:
        self.config = config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.head_size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.attention_width: int = self.head_size * config.num_attention_heads * config.num_hidden_layers

    def flops_per_token(self) -> float:
        """Operations of all weight matrices for one token, forward and backward: 6 a weight in use."""
        config = self.config
        hidden, heads = config.hidden_size, config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        attention = hidden * self.head_size * (2 * heads + 2 * kv_heads)
        experts = getattr(config, "num_experts_per_tok", None)
        if experts:  # of a mixture a token meets the experts it is sent to, the shared ones and the router
            width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
            shared = getattr(config, "shared_expert_intermediate_size", None) or 0
            total = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
            mlp = hidden * (3 * (experts * width + shared) + total)
        else:
            mlp = 3 * hidden * (getattr(config, "intermediate_size", None) or 4 * hidden)
        return 6.0 * (config.num_hidden_layers * (attention + mlp) + config.vocab_size * hidden)

    def break_even(self) -> int:
        """Tokens at which attention is as much work as all weight matrices."""
        return round(self.flops_per_token() / (12.0 * self.attention_width))

    def estimate_flops(self, batch_seqlens: Sequence[int], delta_time: float) -> tuple[float, float]:
        """Achieved and promised TFLOPS.

        Args:
            batch_seqlens: tokens of each sequence trained on in ``delta_time`` seconds on this device.
        """
        # causal attention touches half of each square, but is quoted in full by convention
        attention = 12.0 * self.attention_width * sum(length * length for length in batch_seqlens)
        total = self.flops_per_token() * sum(batch_seqlens) + attention
        return total / delta_time / 1e12, get_device_flops("T")
