"""Requests and completions in vLLM's words."""

from __future__ import annotations

import math
from typing import Any

from verl.workers.rollout.base import Completion, Request

_SEEDS = 2**63 - 1  # vLLM's seeds are int64, and -1 means none


def sampling_arguments(request: Request, max_model_len: int, stop_token_ids: set[int]) -> dict[str, Any]:
    """The arguments of ``vllm.SamplingParams`` for one request.

    Args:
        stop_token_ids: the model's own end tokens.
    """
    sampling = request.sampling
    params = {
        "n": 1,
        "max_tokens": min(sampling.max_tokens, max_model_len - len(request.prompt_ids)),
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
        params |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        params["top_k"] = sampling.top_k if sampling.top_k > 0 else -1
    return params


def completion(request: Request, output: Any) -> Completion:
    """vLLM's output as ours."""
    (sample,) = output.outputs
    if sample.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a request with finish_reason={sample.finish_reason!r}; see its log.")
    tokens = list(sample.token_ids)
    return Completion(tokens, drawn_log_probs(request, tokens, sample.logprobs), sample.finish_reason)


def drawn_log_probs(request: Request, tokens: list[int], steps: Any) -> list[float] | None:
    """The log-probs of ``tokens`` from what vLLM tells of each step; None if the request wants none.

    Raises:
        FloatingPointError: one of them is NaN.
    """
    if not request.sampling.want_log_probs:
        return None
    log_probs = [step[token].logprob for token, step in zip(tokens, steps, strict=True)]
    if any(math.isnan(log_prob) for log_prob in log_probs):
        raise FloatingPointError(
            "The rollout's log-probs are not finite: its weights are not, or overflow in rollout.dtype. "
            "Look at actor/grad_norm of the last steps and lower actor.optim.lr, or use rollout.dtype=float32."
        )
    return log_probs
