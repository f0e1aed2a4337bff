"""The first token at a temperature and ``top_k`` of its own, inside vLLM's sampler. Imports vLLM.

Named in the engine's arguments (``use_first_token_processors``); each request's ``extra_args`` hold the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class _FirstToken(LogitsProcessor):
    """Changes the logits of rows without a token yet whose request has an entry for it."""

    entry: str
    """Name in ``extra_args``."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self.waiting: dict[int, tuple[float, Sequence[int]]] = {}
        """Row -> its value and the list of its tokens, which vLLM appends to."""

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self.waiting, batch_update, self._state)
        for row in [row for row, (_, tokens) in self.waiting.items() if len(tokens)]:
            del self.waiting[row]

    def _state(self, params: Any, prompt: Any, tokens: Sequence[int]) -> tuple[float, Sequence[int]] | None:
        value = (params.extra_args or {}).get(self.entry)
        return None if value is None or len(tokens) else (value, tokens)

    def apply(self, logits: Tensor) -> Tensor:
        for row, (value, _) in self.waiting.items():
            self.change(logits[row], value)
        return logits

    def change(self, logits: Tensor, value: float) -> None:
        """Change one row's logits (V,) in place."""
        raise NotImplementedError


class FirstTokenTemperature(_FirstToken):
    """Scales logits ahead of the division by ``temperature``, so that their quotient is that of the hot temperature.

    A positive factor commutes with the penalty for repetition, and no other penalty bears on a first token.
    """

    entry = "verl_first_token_scale"

    def is_argmax_invariant(self) -> bool:
        return False  # what is argmax invariant comes after the temperature, and after min_p

    def change(self, logits: Tensor, value: float) -> None:
        logits *= value


class FirstTokenTopK(_FirstToken):
    """Keeps the k likeliest tokens; ties of the last one stay."""

    entry = "verl_first_token_top_k"

    def is_argmax_invariant(self) -> bool:
        return True

    def change(self, logits: Tensor, value: float) -> None:
        k = min(int(value), logits.numel())
        logits[logits < logits.topk(k).values[-1]] = -torch.inf
