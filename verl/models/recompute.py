"""Gradient checkpointing where it pays: activations that fit are kept, not computed a second time.

Knows the shape of a decoder from its config; knows no device and no batch.

Source: Chen et al. 2016 (arXiv:1604.06174).
"""

from __future__ import annotations

from typing import Any

from torch import nn

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
