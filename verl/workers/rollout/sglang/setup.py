"""SGLang's arguments: of the engine from the rollout section, of its environment, and of each request.

Imports no SGLang.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.workers.rollout.base import (
    Completion,
    PromptLogProbs,
    Request,
    SamplingParams,
    check_log_probs,
    longest_response,
)
from verl.workers.rollout.sampling import _mix
from verl.workers.rollout.vision import VisionRequest
from verl.workers.rollout.vllm.setup import LOAD_FORMATS

if TYPE_CHECKING:
    from verl.config.rollout import RolloutConfig

_KEY = "actor_rollout_ref.rollout"


CONTEXT_KEPT = 8
"""Positions of its context, and some to spare, that SGLang keeps from prompts and responses; they are requested too."""


_DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The trainer's place in its process group, which SGLang's own processes must not use."""


_FIXED = {
    "base_gpu_id": "the engine runs on the GPUs of its workers",
    "device": "trainer.device sets it",
    "ep_size": "a weight sync does not reach experts that are spread",
    "enable_lora": "LoRA weights are merged before a sync",
    "model_path": "actor_rollout_ref.model.path sets it",
    "dp_size": "workers are the replicas",
    "pp_size": "a weight sync does not reach every stage",
    "quantization": "quantized weights cannot be updated in place",
    "sampling_backend": "every response has a random stream of its own, which SGLang's samplers do not",
    "speculative_algorithm": "a weight sync does not reach a draft model",
    "tp_size": f"{_KEY}.tensor_model_parallel_size sets it",
}
"""Arguments of SGLang that are not the user's here, and why."""


def engine_arguments(config: RolloutConfig, device: str, model_path: str, **derived: Any) -> dict[str, Any]:
    """The arguments of ``sglang.Engine``: from the rollout section, then ``engine_kwargs.sglang`` untouched over them.

    Args:
        derived: values computed by the caller: dtype, lengths, cache size.

    Raises:
        ValueError: an argument that cannot be chosen.
    """
    is_dummy = config.load_format.startswith("dummy")
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
        "load_format": "dummy" if is_dummy else LOAD_FORMATS.get(config.load_format, config.load_format),
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


def given_arguments(config: RolloutConfig) -> dict[str, Any]:
    """The entries of ``engine_kwargs.sglang`` that are set: null is left out."""
    return {name: value for name, value in (config.engine_kwargs.get("sglang") or {}).items() if value is not None}


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
    # longer by CONTEXT_KEPT than the model's context; no sequence is longer than requested
    changes["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
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


# -- Requests and completions as SGLang takes and returns them -------------------------------------------------------


_GOLDEN = 0x9E3779B97F4A7C15


_WORD = (1 << 64) - 1


STOP = "verl_stop"
"""Name among ``custom_params`` under which stop texts reach the scheduler; see `stop`."""


_TEXT_FIELDS = ("stop", "stop_regex", "min_new_tokens")


@dataclass(frozen=True)
class EngineRequest:
    """One request as SGLang takes it."""

    ids: list[int]
    phases: list[dict[str, Any]]
    """``sampling_params`` of each part the response is generated in."""
    image_data: list[dict[str, Any]] | None
    """All images of the prompt, as the model's processor gave them."""
    prompt_log_probs: int | None = None
    """As `SamplingParams.prompt_log_probs`."""


def engine_request(
    request: Request, max_model_len: int, stop_token_ids: set[int], image_token: int | None
) -> EngineRequest:
    """A request that went through `vision.ImageReader.read`, as SGLang takes it.

    Args:
        stop_token_ids: the model's own end tokens.
        image_token: stands for each feature of an image; None for a model of text.
    """
    images = None
    if isinstance(request, VisionRequest) and request.vision is not None:
        positions = [position for position, token in enumerate(request.prompt_ids) if token == image_token]
        # first and last position of each image in the prompt; images may stand side by side
        sizes = request.vision.sizes
        offsets = [(positions[end - n], positions[end - 1]) for end, n in zip(accumulate(sizes), sizes, strict=True)]
        media = {"format": "processor_output", "modality": "IMAGE", **request.vision.inputs, "offsets": offsets}
        images = [media]
    parts = phases(request, max_model_len, stop_token_ids)
    return EngineRequest(list(request.prompt_ids), parts, images, request.sampling.prompt_log_probs)


def needs_tokenizer(sampling: SamplingParams) -> str | None:
    """The first of SGLang's own fields in ``extra`` that works on text."""
    return next((name for name in _TEXT_FIELDS if sampling.extra.get(name)), None)


def stream_key(seed: int, prompt_length: int) -> int:
    """The int64 whose stream, counted by positions in the sequence, is that of ``seed`` counted by generated tokens."""
    mixed = int(_mix(np.array([seed & _WORD], dtype=np.uint64))[0])
    key = (mixed + (2 - prompt_length) * _GOLDEN) & _WORD
    return key - (1 << 64) if key >> 63 else key


def sampling_arguments(request: Request, max_model_len: int, stop_token_ids: set[int]) -> dict[str, Any]:
    """SGLang's ``sampling_params`` for one request.

    Args:
        stop_token_ids: the model's own end tokens.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": longest_response(request, max_model_len),
        "sampling_seed": stream_key(request.seed, len(request.prompt_ids)),
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": sorted(stop_token_ids | set(sampling.stop_token_ids)),
    }
    if sampling.repetition_penalty != 1:
        params["repetition_penalty"] = sampling.repetition_penalty
    if sampling.is_greedy:
        params["temperature"] = 0.0
    else:
        params |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        params |= _top_k(sampling.top_k, sampling.min_p)
    params |= sampling.extra
    if sampling.stop:
        params["custom_params"] = {**(params.get("custom_params") or {}), STOP: [0, *sampling.stop]}
    biases = {**(params.get("logit_bias") or {}), **dict.fromkeys(sampling.banned_token_ids, -math.inf)}
    if biases:
        params["logit_bias"] = {str(token): bias for token, bias in biases.items()}
    return params


def phases(request: Request, max_model_len: int, stop_token_ids: set[int]) -> list[dict[str, Any]]:
    """``sampling_params`` for the parts a response is generated in: its first token alone if that has its own
    temperature.

    The parts continue one stream of random numbers, which counts positions.
    """
    params = sampling_arguments(request, max_model_len, stop_token_ids)
    hot, length = request.sampling.first_token_temperature, params["max_new_tokens"]
    if hot is None or request.sampling.is_greedy:
        return [params]
    first_top_k = request.sampling.first_token_top_k
    top_k = _top_k(first_top_k, request.sampling.min_p) if first_top_k > 0 else {}
    first = {**params, **top_k, "temperature": hot, "max_new_tokens": 1}
    rest = {**params, "max_new_tokens": length - 1}
    if least := params.get("min_new_tokens"):
        first["min_new_tokens"], rest["min_new_tokens"] = 1, least - 1
    if request.sampling.stop:
        rest["custom_params"] = {**params["custom_params"], STOP: [1, *request.sampling.stop]}
    return [first, rest] if length > 1 else [first]


def _top_k(top_k: int, min_p: float) -> dict[str, Any]:
    """Both cuts. ``top_k=1`` means greedy to SGLang, with the model's log-probs: the likeliest alone is a min_p."""
    if top_k == 1:
        return {"top_k": -1, "min_p": 1.0}
    return {"top_k": top_k if top_k > 1 else -1, "min_p": min_p}


def completion(request: Request, output: tuple) -> Completion:
    """A `Completion` from SGLang's output: tokens, log-probs, the reason why it ended, and those of the prompt.

    Raises:
        FloatingPointError: a token was sampled from logits that are not finite.
    """
    token_ids, log_probs, reason, *scored = output
    if reason not in ("stop", "length", "abort"):
        raise RuntimeError(f"SGLang ended a request with finish_reason={reason!r}; see its log.")
    check_log_probs(log_probs)
    prompt = None
    if scored and scored[0] is not None:
        own, top = scored[0]  # of the first token there is nothing
        ids = [[token for _, token, *_ in place] for place in top[1:]]
        values = [[value for value, *_ in place] for place in top[1:]]
        empty: list[list] = [[] for _ in own[1:]]  # of no token it gives no lists
        prompt = PromptLogProbs([value for value, *_ in own[1:]], ids or empty, values or empty)
    return Completion(token_ids, log_probs if request.sampling.want_log_probs else None, reason, None, prompt)
