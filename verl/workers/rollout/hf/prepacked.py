"""Linear layers in bf16 on CPU, with weights in the blocked layout that oneDNN's products otherwise make each time.

A decode step of few rows reads every weight once, and rearranging it takes longer than the product. Weights are
prepacked when a request runs for the first time after they arrived, and freed when they change or sleep. Queries, keys
and values of one attention layer are one product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.telemetry.memory import host_memory

_SHARE_OF_HOST = 0.1
"""Of the host's memory, what prepacked weights may take at most; a larger model goes without."""

_ROWS = 16
"""Rows that the layout is chosen for; it serves any number."""

_SMALLEST = 1 << 12
"""Elements of a weight that is worth it."""


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch multiplies weights of ``dtype`` in oneDNN's layout on ``device``."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    # not in fp32, where it would round otherwise than the training engine's products; in bf16 results are the same
    return dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class PrepackedWeights:
    """The prepacked weights of a model's linear layers; its layers use them while they are there.

    Args:
        model: in inference mode. The layers' ``forward`` is replaced, but for adapters and mixtures of experts.
        limit: bytes that the prepacked weights may take.
    """

    def __init__(self, model: nn.Module, limit: int | None = None):
        limit = int(host_memory() * _SHARE_OF_HOST) if limit is None else limit
        self._layers: list[_Layer] = []
        self.full_bytes = 0
        parameter = next(model.parameters(), None)
        if parameter is None or not can_prepack(parameter.device, parameter.dtype):
            return
        joined: set[nn.Module] = set()
        for module in model.modules():
            parts: list[Any] = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
            if all(map(_is_plain, parts)) and len({part.in_features for part in parts}) == 1:
                self._layers.append(_Layer(parts))
                joined.update(parts)
        alone: list[Any] = [module for module in model.modules() if _is_plain(module) and module not in joined]
        self._layers += [_Layer([module]) for module in alone if module.weight.numel() >= _SMALLEST]
        self.full_bytes = sum(layer.full_bytes for layer in self._layers)
        if self.full_bytes > limit:
            self._layers, self.full_bytes = [], 0
        for layer in self._layers:
            layer.install()

    def prepack(self) -> None:
        """Prepack the present weights, if that is not done; also those that were written to in place since."""
        for layer in self._layers:
            if layer.weight is None or layer.versions != layer.versions_now():
                layer.prepack()

    def drop(self) -> None:
        """Free them: the weights have changed, or are about to."""
        for layer in self._layers:
            layer.weight = layer.bias = None

    @property
    def num_bytes(self) -> int:
        """Memory that they take now."""
        return sum(layer.full_bytes for layer in self._layers if layer.weight is not None)


def _is_plain(module: Any) -> bool:
    # a subclass may compute something else
    return type(module) is nn.Linear


class _Layer:
    """One product for linear modules that are called with the same input, one after the other."""

    def __init__(self, modules: list[nn.Linear]):
        self.modules = modules
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.versions: list[int] = []
        """Of the modules' weights as they are packed."""
        self.full_bytes = sum(module.weight.nbytes for module in modules)
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def install(self) -> None:
        for index, module in enumerate(self.modules):
            module.forward = self._forward_of(index, module)  # type: ignore[method-assign]

    def versions_now(self) -> list[int]:
        # tensors made in inference mode count no versions: nothing but a sync writes to these
        return [module.weight._version for module in self.modules if not module.weight.is_inference()]

    def prepack(self) -> None:
        self.versions = self.versions_now()
        weights = [module.weight.detach() for module in self.modules]
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(whole, _ROWS)
        biases = [module.bias for module in self.modules]
        if any(bias is not None for bias in biases):
            filled = [w.new_zeros(len(w)) if b is None else b.detach() for w, b in zip(weights, biases, strict=True)]
            self.bias = torch.cat(filled)

    def _forward_of(self, index: int, module: nn.Linear) -> Any:
        sizes = [part.out_features for part in self.modules]

        def forward(x: Tensor) -> Tensor:
            if self.weight is None:
                return F.linear(x, module.weight, module.bias)
            if x is self._input and self._outputs[index] is not None:
                output, self._outputs[index] = self._outputs[index], None
                if not any(part is not None for part in self._outputs):
                    self._input = None  # or it would live until the next one
                return output
            product = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            if len(sizes) == 1:
                return product
            self._input, self._outputs = x, list(product.split(sizes, -1))
            output, self._outputs[index] = self._outputs[index], None
            return output

        return forward
