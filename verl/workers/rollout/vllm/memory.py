"""The memory of an engine of vLLM inside this process: released while the actor trains, restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from verl.workers.rollout.memory import HostMemory


class DeviceMemory:
    """vLLM's own sleep mode, for CUDA."""

    def __init__(self, llm: Any):
        self.llm = llm

    def sleep(self, level: int) -> None:
        self.llm.sleep(level=level)

    def wake(self, tags: Sequence[str]) -> None:
        self.llm.wake_up(tags=list(tags))

    def parts(self) -> dict[str, int]:
        """Not known per part: see the device's memory in use."""
        return {}


class CPUMemory:
    """The same for CPU, where vLLM accepts the calls and frees nothing: storages are released under its views.

    Woken weights are NaN, whatever the level, but for those below an adapter, which level 1 leaves in place. Buffers
    stay: they are small, no sync brings them back, and vLLM shares its tables of rotary angles between the engines of a
    process.
    """

    def __init__(self, llm: Any, model: nn.Module, keeps_weights: bool = False):
        self.llm = llm
        self.keeps_weights = keeps_weights
        self._released: set[str] = set()
        self.memory = {"weights": HostMemory(model.parameters()), "kv_cache": HostMemory(_cache_tensors(llm))}

    @torch.no_grad()
    def sleep(self, level: int) -> None:
        self.llm.reset_prefix_cache()
        for name, memory in self.memory.items():
            if level == 2 or name != "weights" or not self.keeps_weights:
                memory.release()
                self._released.add(name)

    @torch.no_grad()
    def wake(self, tags: Sequence[str]) -> None:
        if "weights" in tags and "weights" in self._released:
            self.memory["weights"].restore_as_nan()
        self._released -= set(tags)
        if "kv_cache" in tags:
            self.memory["kv_cache"].restore(0)

    def parts(self) -> dict[str, int]:
        """Bytes held now."""
        names = {"weights": "rollout weights", "kv_cache": "rollout cache"}
        return {names[name]: memory.held for name, memory in self.memory.items()}


def worker_of(llm: Any) -> Any:
    worker = llm.llm_engine.model_executor.driver_worker
    return getattr(worker, "worker", worker)


def model_of(llm: Any) -> nn.Module:
    return worker_of(llm).model_runner.model


def _cache_tensors(llm: Any) -> Iterator[Tensor]:
    """Every tensor through which vLLM sees its KV cache."""
    worker = worker_of(llm)
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    for cache in (*worker.model_runner.kv_caches, *(getattr(layer, "kv_cache", None) for layer in layers)):
        yield from (part for part in (cache if isinstance(cache, (list, tuple)) else [cache]) if torch.is_tensor(part))
