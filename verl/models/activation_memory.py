"""Activations kept in host memory between forward and backward pass: less device memory, for traffic over the bus.

Whatever autograd saves goes, but weights and what is small: with gradient checkpointing the inputs of layers, without
it all of their insides. Copies run beside the computation; going back, those of the layers next in line are fetched
ahead. Knows tensors; knows no model. Gradients are the same to the bit.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

MIN_BYTES = 1 << 20
"""Smaller tensors stay: a copy costs more than its memory is worth."""
AHEAD_BYTES = 256 << 20
"""How much is fetched before it is asked for."""
LEAVING_BYTES = 512 << 20
"""How much may be on its way out; more would fill the device with what has been computed and not yet copied."""


class ActivationOffload:
    """One forward pass: ``with ActivationOffload(device): loss = ...``, then ``loss.backward()`` outside."""

    def __init__(
        self,
        device: torch.device,
        min_bytes: int = MIN_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
        leaving_bytes: int = LEAVING_BYTES,
    ) -> None:
        self._device, self._min_bytes = device, min_bytes
        self._bus = _Bus(device, leaving_bytes)
        self._ahead_bytes = ahead_bytes
        self._known: dict[tuple, _Kept] = {}
        self._storages: dict[int, StorageWeakRef] = {}
        self._order: list[_Kept] = []
        self._hooks: AbstractContextManager | None = None

    @property
    def kept_bytes(self) -> int:
        """Host memory taken."""
        return sum(kept.parcel.nbytes for kept in self._order)

    def __enter__(self) -> ActivationOffload:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._hooks.__exit__(*raised)
        # what is saved twice was saved within the block
        self._known, self._storages, self._hooks = {}, {}, None

    def _pack(self, tensor: Tensor) -> Tensor | _Kept:
        if not self._leaves(tensor):
            return tensor
        key = self._identity(tensor)
        kept = self._known.get(key)
        if kept is None:
            kept = self._known[key] = _Kept(self._bus.send(tensor), len(self._order))
            self._order.append(kept)
        return kept

    def _leaves(self, tensor: Tensor) -> bool:
        nbytes = tensor.numel() * tensor.element_size()
        is_dense = nbytes <= tensor.untyped_storage().nbytes()  # an expanded tensor would grow by the copy
        return tensor.device == self._device and nbytes >= self._min_bytes and is_dense and not _is_weight(tensor)

    def _identity(self, tensor: Tensor) -> tuple:
        """Equal for what is saved twice. The weak reference keeps the storage's number from being given again."""
        storage = StorageWeakRef(tensor.untyped_storage())
        number = self._storages.setdefault(storage.cdata, storage).cdata
        place = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        return number, *place, tensor._version

    def _unpack(self, kept: Tensor | _Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        tensor = None if kept.back is None else kept.back()
        if tensor is None:
            tensor = self._bus.receive(kept.parcel)
            kept.back = weakref.ref(tensor)
        self._fetch_before(kept.number)
        return tensor

    def _fetch_before(self, number: int) -> None:
        """Start to bring back what a backward pass will ask for after tensor ``number``: what was saved before it."""
        budget = self._ahead_bytes
        while number > 0 and budget > 0:
            number -= 1
            kept = self._order[number]
            budget -= kept.parcel.nbytes
            if kept.back is None:
                self._bus.fetch(kept.parcel)


class _Kept:
    """What autograd holds in the place of a tensor."""

    def __init__(self, parcel: _Parcel, number: int) -> None:
        self.parcel, self.number = parcel, number
        self.back: weakref.ref[Tensor] | None = None
        """The tensor given back, while somebody holds it."""


class _Parcel:
    """A tensor on the host, and perhaps on its way to or from the device."""

    def __init__(self, host: Tensor) -> None:
        self.host, self.nbytes = host, host.numel() * host.element_size()
        self.left: torch.cuda.Event | None = None
        self.coming: Tensor | None = None
        self.came: torch.cuda.Event | None = None


class _Bus:
    """Copies between a device and the host, in order, beside the computation; on a CPU plain copies."""

    def __init__(self, device: torch.device, leaving_bytes: int) -> None:
        self._device, self._limit = device, leaving_bytes
        self._leaving: deque[_Parcel] = deque()

    def send(self, tensor: Tensor) -> _Parcel:
        is_cuda = self._device.type == "cuda"
        parcel = _Parcel(torch.empty_like(tensor, device="cpu", pin_memory=is_cuda))
        if not is_cuda:
            parcel.host.copy_(tensor)
            return parcel
        out, _ = _streams(self._device)
        out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(out):
            parcel.host.copy_(tensor, non_blocking=True)
            parcel.left = out.record_event()
        tensor.record_stream(out)  # its memory is not given away before it has been read
        self._leaving.append(parcel)
        while sum(one.nbytes for one in self._leaving) > self._limit:
            self._leaving.popleft().left.synchronize()
        return parcel

    def fetch(self, parcel: _Parcel) -> None:
        """Start to bring a tensor back, unless it is coming."""
        if parcel.coming is not None:
            return
        if self._device.type != "cuda":
            parcel.coming = parcel.host.clone()
            return
        _, into = _streams(self._device)
        # memory of the computing stream, which may still use it for what it held before
        parcel.coming = torch.empty_like(parcel.host, device=self._device)
        into.wait_stream(torch.cuda.current_stream(self._device))
        into.wait_event(parcel.left)
        with torch.cuda.stream(into):
            parcel.coming.copy_(parcel.host, non_blocking=True)
            parcel.came = into.record_event()
        parcel.coming.record_stream(into)

    def receive(self, parcel: _Parcel) -> Tensor:
        """The tensor, there for what is computed from now on."""
        self.fetch(parcel)
        if parcel.came is not None:
            torch.cuda.current_stream(self._device).wait_event(parcel.came)
        tensor, parcel.coming, parcel.came = parcel.coming, None, None
        return tensor


@lru_cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """One stream out and one back."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _is_weight(tensor: Tensor) -> bool:
    """Whether it is a parameter or a view of one: of a layer that is sharded, what was gathered for this pass."""
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)


# -- Gradient checkpointing where it pays: activations that fit are kept, not computed a second time -----------------


KEEP_BELOW_BYTES = 1 << 30
"""Activations of a micro-batch up to this size are kept, on devices whose memory is the host's."""


class Recompute:
    """Switches checkpointing of ``model``'s layers on and off by the size of a micro-batch.

    Args:
        always: checkpoint whatever the size, as accelerators need it: there the setting buys memory for larger batches.
    """

    def __init__(self, model: nn.Module, always: bool) -> None:
        self._layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
        self._per_cell = 0 if always else activation_bytes(model)
        self._always = always
        self._is_on = True

    def choose(self, cells: int) -> None:
        """Set every layer for a micro-batch of ``cells`` tokens, padding included."""
        is_on = self._always or cells * self._per_cell > KEEP_BELOW_BYTES
        if is_on == self._is_on:
            return
        self._is_on = is_on
        for layer in self._layers:
            layer.gradient_checkpointing = is_on


def activation_bytes(model: Any) -> int:
    """About how much a token's forward pass keeps for the backward pass, without checkpointing.

    Per layer some 12 vectors as wide as the hidden state and 4 as wide as the MLP; measured on a 135M Llama.
    """
    config = model.config.get_text_config()
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    active = getattr(config, "num_experts_per_tok", None) or 1
    per_layer = 12 * hidden + 4 * inner * active
    return config.num_hidden_layers * per_layer * next(model.parameters()).element_size()
