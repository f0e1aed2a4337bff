"""A LoRA adapter inside vLLM: the engine's options for it, its way in without files, and its read-back.

vLLM wraps every layer that may be adapted and keeps adapters in slots, tensors next to the wrapped weights. The
policy's adapter has the only slot and always the same id. Its scale is 1: the sender multiplies B by alpha / rank. vLLM
is imported only by functions here.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from verl.models.loader import LoRASpec
from verl.models.multimodal import is_vision_language
from verl.workers.rollout.base import Bucket, WeightSyncError
from verl.workers.rollout.vllm.setup import has_experts
from verl.workers.rollout.vllm.weights import worker_of
from verl.workers.rollout.weights.load import LoadWatcher, WeightLoad
from verl.workers.rollout.weights.sync import listed

_ID, _NAME = 1, "policy"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_KEY = "actor_rollout_ref.rollout.lora_sync"


def lora_unsupported_reason(model_config: Any) -> str | None:
    """Part of a model that vLLM cannot compute with an adapter apart from the weights; None: it can compute all."""
    text = model_config.get_text_config(decoder=True)
    if is_vision_language(model_config):
        return "adapts the language model only, and this one takes images"
    if has_experts(model_config):
        return "keeps experts in a packed form, which takes no adapter that comes by a sync"
    if getattr(text, "kv_lora_rank", None):
        return "computes latent attention with matrices made of its weights, which an adapter does not reach"
    return None


def lora_arguments(spec: LoRASpec, model_config: Any) -> dict[str, Any]:
    """Engine arguments for one adapter of this rank, for which vLLM takes the next size of slot it has.

    Raises:
        ValueError: vLLM cannot hold an adapter of this model, or the rank is larger than any slot.
    """
    from vllm.config import lora

    if why := lora_unsupported_reason(model_config):
        raise ValueError(f"rollout.name=vllm {why}. Set {_KEY}=merge.")
    sizes = typing.get_args(getattr(lora, "MaxLoRARanks", None)) or _RANKS
    if spec.rank > max(sizes):
        raise ValueError(
            f"actor_rollout_ref.model.lora_rank={spec.rank} is larger than vLLM's largest slot, {max(sizes)}. "
            f"Lower it, or set {_KEY}=merge."
        )
    size = min(size for size in sizes if size >= spec.rank)
    return {"enable_lora": True, "max_lora_rank": size, "max_loras": 1, "max_cpu_loras": 1}


def adapter_request() -> Any:
    """The ``LoRARequest`` of the policy's adapter; an engine without the adapter then fails."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(_NAME, _ID, "/the adapter comes by a weight sync and lies in no folder")


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[None]:
    """Within the block the model has its plain layers, as vLLM's loaders of base weights expect them."""
    wrapped = [(name, module) for name, module in model.named_modules() if _slots(module)]
    try:
        for name, module in wrapped:
            _replace(model, name, module.base_layer)
        yield
    finally:
        for name, module in wrapped:
            _replace(model, name, module)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _slots(module: nn.Module) -> dict[str, Tensor]:
    """The slot tensors of a wrapped layer, (slots, ...) each; empty for another."""
    found = {}
    for part in ("lora_a", "lora_b"):
        stacked = getattr(module, f"{part}_stacked", None)
        tensors = stacked if isinstance(stacked, tuple | list) else [stacked]
        found |= {f"{part}.{i}": tensor for i, tensor in enumerate(tensors) if torch.is_tensor(tensor)}
    return found


class AdapterLoad(WeightLoad):
    """One adapter on its way into vLLM's slot; takes effect as a whole, when all of it is there.

    Args:
        base: the load of the base weights, if they have to be checked again.
        is_shared: as of ``WeightLoad``.
    """

    def __init__(
        self,
        llm: Any,
        model: nn.Module,
        device: torch.device,
        rank: int,
        base: WeightLoad | None,
        is_shared: bool = False,
    ):
        super().__init__(model, device, is_shared=is_shared)
        self.base = base
        self.slots = {
            f"{name}.{part}": tensor
            for name, module in model.named_modules()
            for part, tensor in _slots(module).items()
        }
        self.watcher = LoadWatcher(self.slots)
        self.manager = worker_of(llm).model_runner.lora_manager._adapter_manager
        self.rank = rank
        self._tensors: dict[str, Tensor] = {}

    def check_computes_with_its_weights(self) -> None:
        """Slots are read as they are."""

    def load(self, bucket: Bucket) -> None:
        """Keep the bucket: vLLM takes an adapter in one piece, and holds on to it, so it must not be the trainer's."""
        for name, tensor in bucket:
            if name in self._tensors:
                raise WeightSyncError(f"{name} was sent twice in one sync.")
            self._tensors[name] = tensor.to(self.device, copy=True).contiguous()

    def check_all_written(self) -> None:
        """Put the adapter into the slot, all zeros besides it, over unchanged base weights."""
        if changed := self.base.changed() if self.base else []:
            raise WeightSyncError(f"the base weights of the adapter changed while the engine slept: {listed(changed)}.")
        try:
            with self.watcher:
                self._activate(dict(self.watcher.announce(list(self._tensors.items()))))
        except Exception as error:
            raise WeightSyncError(f"vLLM refused the adapter ({type(error).__name__}: {error}).") from error
        self.record_sent(list(self._tensors.items()))
        self._tensors = {}
        held = sum(int(part.held.count_nonzero()) for parts in self.watcher.parts.values() for part in set(parts))
        in_slot = sum(int(slot.count_nonzero()) for slot in self.slots.values())
        if held != in_slot:
            raise WeightSyncError(f"vLLM's slot has {in_slot} numbers that are not zero, the adapter {held}.")

    def _activate(self, tensors: dict[str, Tensor]) -> None:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        if hasattr(mapper, "get_rename_mapper"):
            mapper = mapper.get_rename_mapper()
        peft_config = {"r": self.rank, "lora_alpha": self.rank, "target_modules": [], "peft_type": "LORA"}
        adapter = LoRAModel.from_lora_tensors(
            lora_model_id=_ID,
            tensors=tensors,
            peft_helper=PEFTHelper.from_dict(peft_config),
            device=str(self.device),
            weights_mapper=mapper,
        )
        self.manager.remove_all_adapters()
        self.manager.add_adapter(adapter)
        self.manager.activate_adapter(_ID)

    def find_problem(self, regions: list[dict[str, list]]) -> str | None:
        problem = super().find_problem(regions)
        return problem and f"{problem} {_KEY}=merge needs no place for an adapter."
