"""Activations saved in host memory between forward and backward pass: less device memory, for traffic over the bus.

All tensors that autograd saves are copied except weights and small ones: with gradient checkpointing the inputs of
layers, without it all of their activations. Copies run on streams of their own; the backward pass prefetches the next
layers. Knows tensors; knows no model. Gradients are bit-identical.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

MIN_BYTES = 1 << 20
"""Smaller tensors stay on the device."""
PREFETCH_BYTES = 256 << 20
"""Prefetched bytes in the backward pass."""
PENDING_BYTES = 512 << 20
"""Limit of unfinished copies to the host, whose source memory is still taken on the device."""


class ActivationOffload:
    """One forward pass: ``with ActivationOffload(device): loss = ...``, then ``loss.backward()`` outside."""

    def __init__(
        self,
        device: torch.device,
        min_bytes: int = MIN_BYTES,
        prefetch_bytes: int = PREFETCH_BYTES,
        pending_bytes: int = PENDING_BYTES,
    ) -> None:
        self._device, self._min_bytes = device, min_bytes
        self._copies = _CopyEngine(device, pending_bytes)
        self._prefetch_bytes = prefetch_bytes
        self._saved_by_identity: dict[tuple, _SavedTensor] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        self._order: list[_SavedTensor] = []
        self._hooks: AbstractContextManager | None = None

    @property
    def kept_bytes(self) -> int:
        """Host memory in use."""
        return sum(saved.host_copy.nbytes for saved in self._order)

    def __enter__(self) -> ActivationOffload:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hooks.__exit__(*raised)
        # a tensor is saved twice only within one forward pass
        self._saved_by_identity, self._storages, self._hooks = {}, {}, None

    def _pack(self, tensor: Tensor) -> Tensor | _SavedTensor:
        nbytes = tensor.numel() * tensor.element_size()
        is_dense = nbytes <= tensor.untyped_storage().nbytes()  # copying an expanded tensor would enlarge it
        # or a view of a weight, such as the gathered weights of a sharded layer
        is_weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
        if tensor.device != self._device or nbytes < self._min_bytes or not is_dense or is_weight:
            return tensor
        # one key for a tensor that is saved twice; the weak reference keeps the storage's id from being reused
        storage = StorageWeakRef(tensor.untyped_storage())
        number = self._storages.setdefault(storage.cdata, storage).cdata
        key = (number, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        saved = self._saved_by_identity.get(key)
        if saved is None:
            saved = self._saved_by_identity[key] = _SavedTensor(self._copies.send(tensor), len(self._order))
            self._order.append(saved)
        return saved

    def _unpack(self, saved: Tensor | _SavedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        tensor = None if saved.restored is None else saved.restored()
        if tensor is None:
            tensor = self._copies.receive(saved.host_copy)
            saved.restored = weakref.ref(tensor)
        # the backward pass needs the tensors saved before this one next
        number, budget = saved.number, self._prefetch_bytes
        while number > 0 and budget > 0:
            number -= 1
            earlier = self._order[number]
            budget -= earlier.host_copy.nbytes
            if earlier.restored is None:
                self._copies.fetch(earlier.host_copy)
        return tensor


@dataclass(eq=False)
class _SavedTensor:
    """Placeholder that autograd holds for an offloaded tensor."""

    host_copy: _HostCopy
    number: int
    restored: weakref.ref[Tensor] | None = None
    """The restored tensor, while it is referenced."""


@dataclass(eq=False)
class _HostCopy:
    """A tensor in host memory, with its unfinished copies to or from the device."""

    host: Tensor
    nbytes: int
    copy_event: torch.cuda.Event | None = None
    device_tensor: Tensor | None = None
    arrival_event: torch.cuda.Event | None = None


class _CopyEngine:
    """Asynchronous copies between a device and the host, in order; plain copies on a CPU."""

    def __init__(self, device: torch.device, pending_bytes: int) -> None:
        self._device, self._limit = device, pending_bytes
        self._pending: deque[_HostCopy] = deque()

    def send(self, tensor: Tensor) -> _HostCopy:
        is_cuda = self._device.type == "cuda"
        host = torch.empty_like(tensor, device="cpu", pin_memory=is_cuda)
        host_copy = _HostCopy(host, host.numel() * host.element_size())
        if not is_cuda:
            host_copy.host.copy_(tensor)
            return host_copy
        out, _ = _streams(self._device)
        out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(out):
            host_copy.host.copy_(tensor, non_blocking=True)
            host_copy.copy_event = out.record_event()
        tensor.record_stream(out)  # its memory is not reused before it has been read
        self._pending.append(host_copy)
        while sum(one.nbytes for one in self._pending) > self._limit:
            self._pending.popleft().copy_event.synchronize()
        return host_copy

    def fetch(self, host_copy: _HostCopy) -> None:
        """Start the copy of a tensor to the device, unless one is running."""
        if host_copy.device_tensor is not None:
            return
        if self._device.type != "cuda":
            host_copy.device_tensor = host_copy.host.clone()
            return
        _, into = _streams(self._device)
        # allocated on the computing stream, which may still use its previous content
        host_copy.device_tensor = torch.empty_like(host_copy.host, device=self._device)
        into.wait_stream(torch.cuda.current_stream(self._device))
        into.wait_event(host_copy.copy_event)
        with torch.cuda.stream(into):
            host_copy.device_tensor.copy_(host_copy.host, non_blocking=True)
            host_copy.arrival_event = into.record_event()
        host_copy.device_tensor.record_stream(into)

    def receive(self, host_copy: _HostCopy) -> Tensor:
        """Return the tensor; later work on the current stream waits for its copy."""
        self.fetch(host_copy)
        if host_copy.arrival_event is not None:
            torch.cuda.current_stream(self._device).wait_event(host_copy.arrival_event)
        tensor, host_copy.device_tensor, host_copy.arrival_event = host_copy.device_tensor, None, None
        return tensor


@lru_cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """One stream to the host and one to the device."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


# -- gradient checkpointing only for micro-batches whose activations are large ----------------------------------------

KEEP_BELOW_BYTES = 1 << 30
"""Activations of a micro-batch up to this size are saved, on devices whose memory is the host's."""


class Recompute:
    """Gradient checkpointing of ``model``'s layers, switched by the size of a micro-batch.

    Args:
        always: checkpoint every micro-batch, as on accelerators, where memory allows larger batches.

    Attributes:
        is_on: whether the layers checkpoint.
        most_kept_tokens: tokens of a micro-batch, padding included, up to which activations are kept.
    """

    def __init__(self, model: nn.Module, always: bool) -> None:
        self._layers: list[Any] = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False)]
        self.is_on = True
        self.most_kept_tokens = -1 if always else KEEP_BELOW_BYTES // activation_bytes(model)

    def switch(self) -> None:
        """Turn checkpointing of every layer off, or on again."""
        self.is_on = not self.is_on
        for layer in self._layers:
            layer.gradient_checkpointing = self.is_on


def activation_bytes(model: Any) -> int:
    """Estimate the bytes a token's forward pass keeps for the backward pass, without checkpointing.

    Per layer some 12 vectors as wide as the hidden state and 4 as wide as the MLP; measured on a 135M Llama.
    """
    config = model.config.get_text_config()
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    active = getattr(config, "num_experts_per_tok", None) or 1
    per_layer = 12 * hidden + 4 * inner * active
    return config.num_hidden_layers * per_layer * next(model.parameters()).element_size()
