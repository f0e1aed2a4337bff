"""Requests and completions as vLLM takes and returns them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from verl.workers.rollout.base import (
    Completion,
    PromptLogProbs,
    Request,
    SamplingParams,
    check_log_probs,
    longest_response,
)
from verl.workers.rollout.monitor import EngineMonitor

_COLDEST = 0.01
_SEEDS = 2**63 - 1  # vLLM's seeds are int64, and -1 means none
_CLASSES = {"structured_outputs": "StructuredOutputsParams", "repetition_detection": "RepetitionDetectionParams"}
"""Sampling parameters that vLLM takes as objects of its own classes."""


def sampling_arguments(request: Request, max_model_len: int, stop_token_ids: set[int]) -> dict[str, Any]:
    """The arguments of ``vllm.SamplingParams`` for one request.

    Args:
        stop_token_ids: the model's own end tokens.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "n": 1,
        "max_tokens": longest_response(request, max_model_len),
        "seed": request.seed % _SEEDS,
        "ignore_eos": True,  # the model's end tokens are among ours; vLLM may know fewer or more
        "detokenize": False,
        "logprobs": 0 if sampling.want_log_probs else None,
        "prompt_logprobs": sampling.prompt_log_probs,
    }
    if not sampling.ignore_eos:
        params["stop_token_ids"] = sorted(stop_token_ids | set(sampling.stop_token_ids))
    if sampling.is_greedy:
        params["temperature"] = 0.0
    else:
        params |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}
        params["top_k"] = sampling.top_k if sampling.top_k > 0 else -1
    if sampling.repetition_penalty != 1:
        params["repetition_penalty"] = sampling.repetition_penalty
    if sampling.stop:  # special tokens count as text: the text of one may be what ends a response
        params |= {"stop": list(sampling.stop), "detokenize": True, "skip_special_tokens": False}
        params["include_stop_str_in_output"] = True
    params |= sampling.extra
    biases = {int(token): float(bias) for token, bias in (params.get("logit_bias") or {}).items()}
    biases |= dict.fromkeys(sampling.banned_token_ids, -math.inf)
    if biases:
        params["logit_bias"] = biases
    for name, kind in _CLASSES.items():
        if isinstance(params.get(name), Mapping):
            from vllm import sampling_params

            params[name] = getattr(sampling_params, kind)(**params[name])
    if sampling.first_token_temperature is not None and not sampling.is_greedy:
        # the entries that the logits processors of `first_token` read
        first = {"verl_first_token_scale": sampling.temperature / sampling.first_token_temperature}
        if sampling.first_token_top_k > 0:
            first["verl_first_token_top_k"] = sampling.first_token_top_k
        params["extra_args"] = {**(params.get("extra_args") or {}), **first}
    return params


def check_arguments(
    sampling: SamplingParams, known: Collection[str], has_first_token: bool, has_tokenizer: bool
) -> None:
    """Refuse sampling that the installed vLLM would not honour.

    Args:
        known: names of the parameters it has.
        has_first_token: whether the engine has the logits processors of the first token.
        has_tokenizer: whether it knows text.

    Raises:
        ValueError: names the setting.
    """
    if unknown := [f"{name}={value!r}" for name, value in sampling.extra.items() if name not in known]:
        raise ValueError(
            f"rollout.sampling_kwargs: the installed vLLM's SamplingParams has no {', '.join(unknown)}. "
            f"It has {', '.join(sorted(name for name in known if not name.startswith('_')))}."
        )
    if not sampling.is_greedy and sampling.temperature < _COLDEST:
        raise ValueError(
            f"rollout.temperature={sampling.temperature}: vLLM would take {_COLDEST} instead. "
            "Use at least that, or do_sample=false."
        )
    if (words := sampling.stop or sampling.extra.get("bad_words")) and not has_tokenizer:
        raise ValueError(
            f"rollout.stop or bad_words {list(words)}: this vLLM engine was started without a tokenizer, and would not "
            "see them. Leave out rollout.engine_kwargs.vllm.skip_tokenizer_init."
        )
    if sampling.first_token_temperature is not None and not has_first_token:
        raise ValueError(
            f"first_token_temperature={sampling.first_token_temperature}: this vLLM engine was started without it. "
            "Set rollout.use_fire_sampling=true."
        )


def finish_reason(output: Any) -> Literal["stop", "length"]:
    """The reason for which vLLM ended a request."""
    reason = output.outputs[0].finish_reason
    if reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a request with finish_reason={reason!r}; see its log.")
    return reason


@dataclass
class Running:
    """A request and the tokens vLLM has reported for it, which an abort returns."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    prompt: PromptLogProbs | None = None

    def add(self, output: Any) -> None:
        """Append the tokens of one of vLLM's outputs.

        Raises:
            FloatingPointError: a log-probability is NaN.
        """
        if self.prompt is None and self.request.sampling.prompt_log_probs is not None and output.prompt_logprobs:
            self.prompt = _prompt_log_probs(self.request, output.prompt_logprobs)
        (sample,) = output.outputs
        tokens = list(sample.token_ids)
        if self.request.sampling.want_log_probs:
            log_probs = [step[token].logprob for token, step in zip(tokens, sample.logprobs, strict=True)]
            check_log_probs(log_probs)
            self.log_probs += log_probs
        self.token_ids += tokens

    def completion(self, finish_reason: Literal["stop", "length", "abort"]) -> Completion:
        log_probs = list(self.log_probs) if self.request.sampling.want_log_probs else None
        return Completion(list(self.token_ids), log_probs, finish_reason, prompt_log_probs=self.prompt)


def _prompt_log_probs(request: Request, given: Any) -> PromptLogProbs:
    """From vLLM's: for each token but the first a mapping of it and of the likeliest tokens to log-probs."""
    k = request.sampling.prompt_log_probs or 0
    log_probs: list[float] = []
    ids: list[list[int]] = []
    values: list[list[float]] = []
    for token, entries in zip(request.prompt_ids[1:], given[1:], strict=True):
        log_probs.append(entries[token].logprob)
        # with the token itself there may be one more
        top = sorted(((entry.logprob, i) for i, entry in entries.items()), key=lambda pair: -pair[0])[:k]
        ids.append([i for _, i in top])
        values.append([value for value, _ in top])
    return PromptLogProbs(log_probs, ids, values)


# -- vLLM's metrics: levels of its scheduler after each step, and its Prometheus counters ------------------------------


_COUNTERS = {
    "vllm:num_preemptions": "preemptions",
    "vllm:prefix_cache_queries": "prefix_cache_queries",
    "vllm:prefix_cache_hits": "prefix_cache_hits",
}


def watch_steps(llm: Any, monitor: EngineMonitor) -> None:
    """Report every step of vLLM, and how full the engine is, to ``monitor``."""
    monitor.reports_steps = True
    engine = llm.llm_engine
    core = getattr(engine.engine_core, "engine_core", None)  # None where the engine lives in a process of its own
    scheduler = getattr(core, "scheduler", None)
    step = engine.step

    def watched_step() -> Any:
        outputs = step()
        monitor.tick()
        if scheduler is not None:
            cache = scheduler.kv_cache_manager.usage
            monitor.gauge(running=len(scheduler.running), waiting=len(scheduler.waiting), cache_usage=cache)
        return outputs

    engine.step = watched_step


def counters(llm: Any) -> dict[str, float]:
    """vLLM's counters since it was built; none with ``disable_log_stats=true``."""
    if not llm.llm_engine.log_stats:
        return {}
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if name := _COUNTERS.get(metric.name):
            found[name] = found.get(name, 0.0) + metric.value
    return found


def prometheus_text(llm: Any) -> str:
    """All of vLLM's metrics in Prometheus' text format; empty with ``disable_log_stats=true``."""
    if not llm.llm_engine.log_stats:
        return ""
    from prometheus_client import REGISTRY, generate_latest

    return generate_latest(REGISTRY).decode()
