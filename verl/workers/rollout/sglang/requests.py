"""Requests and completions as SGLang takes and returns them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.workers.rollout.base import Completion, Request, SamplingParams, check_log_probs, longest_response
from verl.workers.rollout.sampling import _mix

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


def engine_request(
    request: Request, max_model_len: int, stop_token_ids: set[int], image_token: int | None
) -> EngineRequest:
    """A request that went through `vision.ImageReader.read`, as SGLang takes it.

    Args:
        stop_token_ids: the model's own end tokens.
        image_token: stands for each feature of an image; None for a model of text.
    """
    images = None
    if request.media:
        images = [{"format": "processor_output", "modality": "IMAGE", **request.media.inputs}]
        images[0]["offsets"] = _spans(request, image_token)
    return EngineRequest(list(request.prompt_ids), phases(request, max_model_len, stop_token_ids), images)


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
    params = {
        "max_new_tokens": longest_response(request, max_model_len),
        "sampling_seed": stream_key(request.seed, len(request.prompt_ids)),
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": sorted(stop_token_ids | set(sampling.stop_token_ids)),
    }
    if sampling.repetition_penalty != 1:
        params["repetition_penalty"] = sampling.repetition_penalty
    params |= _distribution(request) | dict(sampling.extra)
    if sampling.stop:
        params["custom_params"] = {**(params.get("custom_params") or {}), STOP: [0, *sampling.stop]}
    if biases := {**(params.get("logit_bias") or {}), **dict.fromkeys(sampling.banned_token_ids, -math.inf)}:
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


def _distribution(request: Request) -> dict[str, Any]:
    sampling = request.sampling
    if sampling.is_greedy:
        return {"temperature": 0.0}
    params = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    return params | _top_k(sampling.top_k, sampling.min_p)


def _top_k(top_k: int, min_p: float) -> dict[str, Any]:
    """Both cuts. ``top_k=1`` means greedy to SGLang, with the model's log-probs: the likeliest alone is a min_p."""
    if top_k == 1:
        return {"top_k": -1, "min_p": 1.0}
    return {"top_k": top_k if top_k > 1 else -1, "min_p": min_p}


def completion(request: Request, token_ids: list[int], log_probs: list[float], reason: str) -> Completion:
    """A `Completion` from SGLang's output.

    Raises:
        FloatingPointError: a token was sampled from logits that are not finite.
    """
    if reason not in ("stop", "length", "abort"):
        raise RuntimeError(f"SGLang ended a request with finish_reason={reason!r}; see its log.")
    check_log_probs(log_probs)
    return Completion(token_ids, log_probs if request.sampling.want_log_probs else None, reason)


def _spans(request: Request, image_token: int) -> list[tuple[int, int]]:
    """First and last position of each image in the prompt; images may stand side by side."""
    positions = [position for position, token in enumerate(request.prompt_ids) if token == image_token]
    spans, start = [], 0
    for size in request.media.sizes:
        spans.append((positions[start], positions[start + size - 1]))
        start += size
    return spans
