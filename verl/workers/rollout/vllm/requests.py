"""Requests and completions as vLLM takes and returns them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.workers.rollout.base import Completion, Request, SamplingParams, check_log_probs, longest_response
from verl.workers.rollout.monitor import EngineMonitor

_COLDEST = 0.01
_SEEDS = 2**63 - 1  # vLLM's seeds are int64, and -1 means none


def sampling_arguments(request: Request, max_model_len: int, stop_token_ids: set[int]) -> dict[str, Any]:
    """The arguments of ``vllm.SamplingParams`` for one request.

    Args:
        stop_token_ids: the model's own end tokens.
    """
    sampling = request.sampling
    params = {
        "n": 1,
        "max_tokens": longest_response(request, max_model_len),
        "seed": request.seed % _SEEDS,
        "ignore_eos": True,  # the model's end tokens are among ours; vLLM may know fewer or more
        "detokenize": False,
        "logprobs": 0 if sampling.want_log_probs else None,
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
    params |= _by_name(sampling.extra)
    if sampling.banned_token_ids:
        params["logit_bias"] = (params.get("logit_bias") or {}) | dict.fromkeys(sampling.banned_token_ids, -math.inf)
    if first := _first_token_settings(sampling):
        params["extra_args"] = (params.get("extra_args") or {}) | first
    return params


def check_arguments(sampling: SamplingParams, known: Any, has_first_token: bool, has_tokenizer: bool) -> None:
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


def _by_name(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Further parameters as vLLM's own classes, where it has one for them."""
    params = dict(extra)
    if params.get("logit_bias"):
        params["logit_bias"] = {int(token): float(bias) for token, bias in params["logit_bias"].items()}
    for name, kind in _CLASSES.items():
        if isinstance(params.get(name), Mapping):
            from vllm import sampling_params

            params[name] = getattr(sampling_params, kind)(**params[name])
    return params


_CLASSES = {"structured_outputs": "StructuredOutputsParams", "repetition_detection": "RepetitionDetectionParams"}


def _first_token_settings(sampling: SamplingParams) -> dict[str, float]:
    """The entries of ``extra_args`` that `first_token` reads."""
    hot = sampling.first_token_temperature
    if sampling.is_greedy or hot is None:
        return {}
    settings = {"verl_first_token_scale": sampling.temperature / hot}
    if sampling.first_token_top_k > 0:
        settings["verl_first_token_top_k"] = sampling.first_token_top_k
    return settings


def completion(request: Request, output: Any) -> Completion:
    """A `Completion` from vLLM's output."""
    (sample,) = output.outputs
    _check_finish_reason(sample.finish_reason)
    tokens = list(sample.token_ids)
    return Completion(tokens, sampled_log_probs(request, tokens, sample.logprobs), sample.finish_reason)


def _check_finish_reason(reason: str | None) -> None:
    if reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a request with finish_reason={reason!r}; see its log.")


def sampled_log_probs(request: Request, tokens: list[int], steps: Any) -> list[float] | None:
    """The log-probs of ``tokens`` from vLLM's log-probs of each step; None if the request wants none.

    Raises:
        FloatingPointError: one of them is NaN.
    """
    if not request.sampling.want_log_probs:
        return None
    log_probs = [step[token].logprob for token, step in zip(tokens, steps, strict=True)]
    check_log_probs(log_probs)
    return log_probs


# -- Requests submitted one by one: their tokens so far are kept here, so that an abort returns them -------------------
@dataclass
class Running:
    """A request and the tokens vLLM has reported for it."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def completion(self, finish_reason: str) -> Completion:
        log_probs = list(self.log_probs) if self.request.sampling.want_log_probs else None
        return Completion(list(self.token_ids), log_probs, finish_reason)


class RunningRequests:
    """Requests in flight of one ``vllm.LLMEngine``, by request id.

    Args:
        lora_request: of the adapter that answers them, a ``LoRARequest``; None: the model has none.
    """

    def __init__(self, engine: Any, lora_request: Any = None):
        self._engine, self._lora_request = engine, lora_request
        self._running: dict[int, Running] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, request_id: int, request: Request, prompt: Any, params: Any) -> None:
        """Hand a request to vLLM. ``params``: a ``vllm.SamplingParams``; what it reports is changed to news only."""
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.DELTA
        self._engine.add_request(str(request_id), prompt, params, lora_request=self._lora_request)
        self._running[request_id] = Running(request)

    def step(self) -> dict[int, Completion]:
        """One forward for all that run; returns what ended."""
        ended: dict[int, Completion] = {}
        for output in self._engine.step() if self._running else ():
            request_id = int(output.request_id)
            if request_id not in self._running:
                continue  # aborted while its last token was on the way
            running, (sample,) = self._running[request_id], output.outputs
            tokens = list(sample.token_ids)
            running.log_probs += sampled_log_probs(running.request, tokens, sample.logprobs) or []
            running.token_ids += tokens
            if output.finished:
                _check_finish_reason(sample.finish_reason)
                ended[request_id] = self._running.pop(request_id).completion(sample.finish_reason)
        return ended

    def abort(self, request_ids: Sequence[int]) -> dict[int, Completion]:
        """End these requests; returns their tokens so far."""
        found = {request_id: self._running.pop(request_id) for request_id in request_ids if request_id in self._running}
        self._engine.abort_request([str(request_id) for request_id in found])
        return {request_id: running.completion("abort") for request_id, running in found.items()}

    def partial(self, request_id: int) -> Completion | None:
        running = self._running.get(request_id)
        return running and running.completion("abort")


# -- vLLM's metrics: levels of its scheduler after each step, and its Prometheus counters ------------------------------


_COUNTERS = {
    "vllm:num_preemptions": "preemptions",
    "vllm:prefix_cache_queries": "prefix_cache_queries",
    "vllm:prefix_cache_hits": "prefix_cache_hits",
}


def watch_steps(llm: Any, monitor: EngineMonitor) -> None:
    """Have every step of vLLM tell ``watch`` that it finished, and how full the engine is."""
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
