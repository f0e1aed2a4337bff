"""Release of CPU memory to the system, for engines whose sleep mode exists on GPUs only.

Storages are resized in place, so that every view an engine made of them stays valid.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl.telemetry.memory import host_memory
from verl.utils.exit_codes import ExitCode
from verl.workers.rollout.base import cached_bytes_per_token

if TYPE_CHECKING:
    from verl.config.rollout import RolloutConfig

NAN_BYTE = 0xFF
"""Repeated, it reads as NaN in every floating type: weights that were forgotten and not synced cannot pass for real."""


class HostMemory:
    """The storages behind some tensors, released and restored together.

    Args:
        tensors: may share storages.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        # by storage: views and tied weights share one, which may be resized once only
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors if tensor.numel()}
        self._storages = [(storage, storage.nbytes()) for storage in found.values()]

    def release(self) -> None:
        """Free the memory; its values are lost."""
        for storage, _ in self._storages:
            storage.resize_(0)
        return_free_memory()

    @property
    def held(self) -> int:
        """Bytes allocated now."""
        return sum(storage.nbytes() for storage, _ in self._storages)

    def restore(self, byte: int) -> None:
        """Allocate the memory again, each byte of it set to ``byte``: 0 or ``NAN_BYTE``."""
        for storage, size in self._storages:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(byte)


def return_free_memory() -> None:
    """Return memory that this process freed to the system: the C library keeps blocks below 32 MiB for itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def own_storages(model: nn.Module) -> None:
    """Copy weights that live in mapped files into memory that can be freed and allocated again; ties are kept."""
    copies: dict[int, Tensor] = {}
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        if not storage.resizable():
            if parameter.data_ptr() not in copies:
                copies[parameter.data_ptr()] = parameter.detach().clone()
            parameter.data = copies[parameter.data_ptr()]


def cache_share(share: float) -> int:
    """Bytes a KV cache in host memory may take: ``share`` of this worker's part, half of which is the trainer's."""
    return int(host_memory() * share / 2 / int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


_BLOCK = 128  # tokens in a block of vLLM's KV cache on CPU, the largest of its block sizes
_HOST_CACHE = 1 << 30  # bytes of KV cache in host memory unless engine_kwargs.vllm.kv_cache_memory_bytes says otherwise


def host_cache_bytes(config: RolloutConfig, model_config: Any, dtype: torch.dtype, max_model_len: int) -> int:
    """KV cache in host memory: for all sequences that may run at once, within this worker's share and 1 GiB.

    vLLM itself would take ``gpu_memory_utilization`` of all memory. One sequence of full length always fits.
    """
    per_token = cached_bytes_per_token(model_config, dtype)
    sequence = (math.ceil(max_model_len / _BLOCK) + 1) * _BLOCK * per_token
    # never less than two sequences: the engine refuses to start without room for one
    size = min(config.max_num_seqs * sequence, cache_share(config.gpu_memory_utilization), _HOST_CACHE)
    return max(size, 2 * sequence)


# -- Out of memory in a rollout engine: an error with the keys that change its use of memory ---------------------------


_KEY = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_ALLOCATION = ("can't allocate memory", "Cannot allocate memory", "not enough memory", "out of memory")
_CACHE = ("No available memory for the cache blocks", "KV cache is needed", "larger than the available KV cache memory")
_TAKEN = ("less than desired GPU memory utilization",)


class RolloutOutOfMemory(RuntimeError):
    """The engine found no memory for its weights, its cache or a step; the cause is the engine's own error."""

    exit_class = ExitCode.MEMORY


@contextmanager
def memory_errors(config: RolloutConfig, phase: str) -> Iterator[None]:
    """Turn an engine's lack of memory in this block into a `RolloutOutOfMemory` that names the keys that help.

    Args:
        phase: ``start``, ``wake``, ``sync`` or ``generate``.
    """
    try:
        yield
    except Exception as error:
        memory_error = out_of_memory_error(error, config, phase)
        if memory_error is None:
            raise
        raise memory_error from error


def out_of_memory_error(error: BaseException, config: RolloutConfig, phase: str) -> RolloutOutOfMemory | None:
    """A `RolloutOutOfMemory` for an engine's error; None if that is not about memory."""
    text = str(error)
    is_cache, is_taken = (any(words in text for words in known) for known in (_CACHE, _TAKEN))
    is_allocation = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        error.errno == errno.ENOMEM
        if isinstance(error, OSError)
        else isinstance(error, RuntimeError) and any(words in text for words in _ALLOCATION)
    )
    if not (is_cache or is_taken or is_allocation):
        return None
    share = f"{_KEY}.gpu_memory_utilization={config.gpu_memory_utilization}"
    length, seqs = f"{_KEY}.max_model_len", f"{_KEY}.max_num_seqs={config.max_num_seqs}"
    offload = f"or set {_ACTOR}.fsdp_config.param_offload and optimizer_offload"
    # keys to change, likeliest first
    if is_cache:
        hint = (
            f"The cache does not hold one sequence of full length. Raise {share}, lower {length} (or "
            f"data.max_prompt_length and data.max_response_length), or raise {_KEY}.tensor_model_parallel_size."
        )
    elif is_taken:
        hint = f"Others hold the device's memory already, the actor's weights for example. Lower {share}, {offload}."
    elif phase == "sync":
        hint = (
            f"Lower {_KEY}.update_weights_bucket_megabytes={config.update_weights_bucket_megabytes} or {share}, or set "
            f"{_ACTOR}.fsdp_config.optimizer_offload."
        )
    elif phase == "generate":
        hint = (
            f"Lower {seqs}, {_KEY}.max_num_batched_tokens={config.max_num_batched_tokens} or {share}, shorten "
            f"{length}, {offload}."
        )
    else:
        hint = f"Lower {share}, {seqs} or {length}, raise {_KEY}.tensor_model_parallel_size, {offload}."
    cause = text.strip().splitlines() or [type(error).__name__]
    return RolloutOutOfMemory(f"{_KEY}.name={config.name}: no memory left in phase {phase}: {cause[0][:300]} {hint}")
