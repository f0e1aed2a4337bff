"""Which entries of DeepSpeed's own configuration are decided by options of verl. Does not import the library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MICRO_BATCHES = "rows are cut by ppo_mini_batch_size, and by ppo_micro_batch_size_per_gpu or a token budget"
_FORMATS = "set fsdp_config.mixed_precision.param_dtype"
_OPTIONS = (
    "offload_optimizer",
    "offload_param",
    "overlap_comm",
    "contiguous_gradients",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "zero_hpz_partition_size",
)
OWN_KEYS = {
    "train_batch_size": _MICRO_BATCHES,
    "train_micro_batch_size_per_gpu": _MICRO_BATCHES,
    "gradient_accumulation_steps": _MICRO_BATCHES,
    "managed_gradient_accumulation": _MICRO_BATCHES,
    "gradient_clipping": "set grad_clip",
    "optimizer": "set optim.*",
    "scheduler": "set optim.*",
    "zero_allow_untested_optimizer": "AdamW is the optimizer of every engine",
    "zero_force_ds_cpu_optimizer": "AdamW is the optimizer of every engine",
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "amp", "torch_autocast", "data_types"), _FORMATS),
    "communication_data_type": "set fsdp_config.mixed_precision.reduce_dtype",
    "zero_optimization.stage": "set deepspeed.zero_stage",
    "zero_optimization.memory_efficient_linear": "it would replace torch's linear layer in the whole process",
    **{f"zero_optimization.{name}": f"set deepspeed.{name}" for name in _OPTIONS},
}
"""Key -> what to do instead."""


def conflicts(entries: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, str]]:
    """(key, value, way out) of every entry of ``deepspeed.config`` that is decided elsewhere."""
    for name, value in entries.items():
        key = f"{path}{name}"
        if key in OWN_KEYS:
            yield key, value, OWN_KEYS[key]
        elif isinstance(value, Mapping):
            yield from conflicts(value, f"{key}.")
