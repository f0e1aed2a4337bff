"""Start of SGLang: its arguments from the rollout section, its environment, unsupported models."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.vllm.setup import LOAD_FORMATS

_KEY = "actor_rollout_ref.rollout"

CONTEXT_KEPT = 8
"""Positions of its context, and some to spare, that SGLang keeps from prompts and responses; they are requested too."""

_DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The trainer's place in its process group, which SGLang's own processes must not use."""

_FIXED = {
    "base_gpu_id": "the engine runs on the GPUs of its workers",
    "device": "trainer.device says it",
    "ep_size": "a weight sync does not reach experts that are spread",
    "enable_lora": "LoRA weights are merged before a sync",
    "model_path": "actor_rollout_ref.model.path says it",
    "dp_size": "workers are the replicas",
    "pp_size": "a weight sync does not reach every stage",
    "quantization": "quantized weights cannot be updated in place",
    "sampling_backend": "every response has a random stream of its own, which SGLang's samplers do not",
    "speculative_algorithm": "a weight sync does not reach a draft model",
    "tp_size": f"{_KEY}.tensor_model_parallel_size says it",
}
"""Arguments of SGLang that are not the user's here, and why."""


def engine_arguments(config: Any, device: str, model_path: str, **derived: Any) -> dict[str, Any]:
    """The arguments of ``sglang.Engine``: from the rollout section, then ``engine_kwargs.sglang`` untouched over them.

    Args:
        config: ``actor_rollout_ref.rollout``.
        derived: values computed by the caller: dtype, lengths, cache size.

    Raises:
        ValueError: an argument that cannot be chosen.
    """
    arguments = {
        "model_path": model_path,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "device": device,
        "tp_size": config.tensor_model_parallel_size,
        "mem_fraction_static": config.gpu_memory_utilization,
        "max_running_requests": config.max_num_seqs,
        "chunked_prefill_size": config.max_num_batched_tokens if config.enable_chunked_prefill else -1,
        "max_prefill_tokens": config.max_num_batched_tokens,
        "load_format": _load_format(config.load_format),
        "log_level": "error" if config.disable_log_stats else "info",
        "sampling_backend": "pytorch",  # the name that `sampler` takes over
        "grammar_backend": "none",
        "sleep_on_idle": True,  # else its processes keep a core each busy while the actor trains
        "random_seed": 0,
        **derived,
    }
    if device == "cpu":
        # one batch ahead of the other costs more than it hides where both share the cores
        arguments |= {"attention_backend": "torch_native", "disable_overlap_schedule": True}
    else:
        arguments |= {"disable_cuda_graph": config.enforce_eager, "enable_memory_saver": config.free_cache_engine}
    given = given_arguments(config)
    for name in _FIXED.keys() & given.keys():
        raise ValueError(f"{_KEY}.engine_kwargs.sglang.{name}={given[name]!r} cannot be set: {_FIXED[name]}.")
    return arguments | given


def given_arguments(config: Any) -> dict[str, Any]:
    """The entries of ``engine_kwargs.sglang`` that are set: null is left out."""
    return {name: value for name, value in (config.engine_kwargs.get("sglang") or {}).items() if value is not None}


def _load_format(name: str) -> str:
    return "dummy" if name.startswith("dummy") else LOAD_FORMATS.get(name, name)


def model_overrides(override_config: Mapping[str, Any]) -> str:
    """``model.override_config`` as SGLang takes it."""
    return json.dumps({name: value for name, value in override_config.items() if name != "attn_implementation"})


def environment(device: str, ranks: int, visible_devices: str | None) -> dict[str, str | None]:
    """Environment of the engine's processes, on top of the worker's; None unsets.

    Args:
        ranks: processes of its tensor parallel group.
        visible_devices: CUDA devices of the workers that share the engine, one each; None: as they are.
    """
    changes: dict[str, str | None] = dict.fromkeys(_DISTRIBUTED)
    changes["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = (
        "1"  # by CONTEXT_KEPT, and no sequence is longer than requested
    )
    if device == "cuda":
        return changes | ({"CUDA_VISIBLE_DEVICES": visible_devices} if visible_devices else {})
    changes |= {"TORCH_COMPILE_DISABLE": "1", "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}
    if ranks > 1 and "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ:
        # SGLang would want a NUMA node for each rank
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // ranks)
        groups = [cores[rank * share % len(cores) :][:share] for rank in range(ranks)]
        changes["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, group)) for group in groups)
    return changes


_RESHAPED = {
    "kv_lora_rank": "latent attention",
    "quantization_config": "quantized weights",
}
"""Entries of a model's config that make SGLang keep weights in another form than they are sent in."""


def check_model(model_config: Any) -> None:
    """Refuse at the start a model whose weights could not be updated in place.

    Raises:
        ValueError: names the entry of its config.
    """
    text = model_config.get_text_config(decoder=True)
    for name, what in _RESHAPED.items():
        if getattr(text, name, None) or getattr(model_config, name, None):
            raise ValueError(
                f"{_KEY}.name=sglang cannot update {what} ({name} in the model's config) in place: not supported yet. "
                f"Use {_KEY}.name=hf."
            )
