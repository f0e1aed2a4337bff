"""A rollout engine that finds no memory: the error names what was asked and the keys that change it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_KEY = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_ALLOCATION = ("can't allocate memory", "Cannot allocate memory", "not enough memory", "out of memory")
_CACHE = ("No available memory for the cache blocks", "KV cache is needed", "larger than the available KV cache memory")
_TAKEN = ("less than desired GPU memory utilization",)


class RolloutOutOfMemory(RuntimeError):
    """The engine found no memory for its weights, its cache or a step; the cause is the engine's own error."""


@contextmanager
def memory_errors(config: Any, phase: str) -> Iterator[None]:
    """Turn an engine's lack of memory in this block into a `RolloutOutOfMemory` that says what helps.

    Args:
        config: ``actor_rollout_ref.rollout``.
        phase: ``start``, ``wake``, ``sync`` or ``generate``.
    """
    try:
        yield
    except Exception as error:
        told = explained(error, config, phase)
        if told is None:
            raise
        raise told from error


def explained(error: BaseException, config: Any, phase: str) -> RolloutOutOfMemory | None:
    """The error to raise in place of an engine's own; None if that is not about memory."""
    helps = _what_helps(error, config, phase)
    if helps is None:
        return None
    cause = str(error).strip().splitlines() or [type(error).__name__]
    return RolloutOutOfMemory(f"{_KEY}.name={config.name}: no memory left in phase {phase}: {cause[0][:300]} {helps}")


def _what_helps(error: BaseException, config: Any, phase: str) -> str | None:
    """What to change, likeliest first; None if ``error`` is not about memory."""
    text = str(error)
    if not any(words in text for words in (*_CACHE, *_TAKEN)) and not _is_allocation(error, text):
        return None
    share = f"{_KEY}.gpu_memory_utilization={config.gpu_memory_utilization}"
    length, seqs = f"{_KEY}.max_model_len", f"{_KEY}.max_num_seqs={config.max_num_seqs}"
    if any(words in text for words in _CACHE):
        return (
            f"The cache does not hold one sequence of full length. Raise {share}, lower {length} (or "
            f"data.max_prompt_length and data.max_response_length), or raise {_KEY}.tensor_model_parallel_size."
        )
    if any(words in text for words in _TAKEN):
        return (
            f"Others hold the device's memory already, the actor's weights for example. Lower {share}, or set "
            f"{_ACTOR}.fsdp_config.param_offload and optimizer_offload."
        )
    if phase == "sync":
        return (
            f"Lower {_KEY}.update_weights_bucket_megabytes={config.update_weights_bucket_megabytes} or {share}, or set "
            f"{_ACTOR}.fsdp_config.optimizer_offload."
        )
    offload = f", or set {_ACTOR}.fsdp_config.param_offload and optimizer_offload"
    if phase == "generate":
        return (
            f"Lower {seqs}, {_KEY}.max_num_batched_tokens={config.max_num_batched_tokens} or {share}, shorten "
            f"{length}{offload}."
        )
    return f"Lower {share}, {seqs} or {length}, raise {_KEY}.tensor_model_parallel_size{offload}."


def _is_allocation(error: BaseException, text: str) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in text for words in _ALLOCATION)
