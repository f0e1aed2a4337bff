"""Key-value cache with room to grow, and decode attention that reads it in place.

transformers' own cache concatenates every layer at every step, and its attention copies keys and values once per query
head of a group; at 32 rows of a small model these two cost more than the matrix products. Knows transformers' cache and
attention interfaces, no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

DECODE_ATTENTION = "verl_decode"
"""Name of the attention function, as transformers knows it."""


def decode_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs
) -> tuple[Tensor, None]:
    """SDPA that, for one new token, lets the query heads of a group stand as rows over their shared key head.

    Args:
        query: (B, H, Q, D).
        key, value: (B, H_kv, S, D), views into a cache.
        attention_mask: (B, 1, Q, S) bool or None.

    Returns:
        (B, Q, H, D) and no attention weights.
    """
    if query.shape[2] != 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError(
            f"{type(module).__name__} caps its attention scores or adds sinks, which {DECODE_ATTENTION!r} does not do. "
            "Build the model with attn_implementation='eager'."
        )
    rows, heads, _, size = query.shape
    grouped = query.reshape(rows, key.shape[1], -1, size)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return out.reshape(rows, 1, heads, -1), None


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)


class GrowingLayer(DynamicLayer):
    """One layer's keys and values, (B, H_kv, capacity, D), of which the first ``length`` columns are filled.

    A sliding layer keeps all columns and shows its window only, which is a view.
    """

    def __init__(self, window: int | None, length: int, capacity: int):
        super().__init__()
        self.is_sliding = window is not None
        self.window = window
        self.length = length
        self.capacity = capacity

    def fill(self, parts: list[DynamicLayer], owner: Tensor) -> None:
        """Start from prefilled prompts.

        Args:
            parts: the layer's caches of all prefill batches; their rows together are the prompts, in order, each
                right-aligned to ``length``. Freed on the way.
            owner: (B,) the prompt of each row.
        """
        first = 0
        self.keys = self.values = None
        for part in parts:
            rows, heads, columns, _ = part.keys.shape
            rows_of_part = (owner >= first) & (owner < first + rows)
            source = owner[rows_of_part] - first
            for name in ("keys", "values"):
                prompt = getattr(part, name)
                if getattr(self, name) is None:
                    setattr(self, name, prompt.new_empty(len(owner), heads, self.capacity, prompt.shape[-1]))
                buffer = getattr(self, name)
                buffer[rows_of_part, :, self.length - columns : self.length] = prompt[source]
                # never filled, yet attention multiplies them by zero: they must not hold NaN
                buffer[rows_of_part, :, : self.length - columns] = 0
            part.keys = part.values = None  # reset() of some releases keeps the memory
            part.is_initialized = False
            first += rows
        self.is_initialized = True

    def place_side_by_side(self, name: str, parts: list[Tensor]) -> None:
        """Start from the filled columns of other caches, (rows, H_kv, columns, D) each, right-aligned to ``length``."""
        rows, (_, heads, _, size) = sum(map(len, parts)), parts[0].shape
        buffer = parts[0].new_empty(rows, heads, self.capacity, size)
        first = 0
        for part in parts:
            target = buffer[first : first + len(part)]
            target[:, :, self.length - part.shape[2] : self.length] = part
            target[:, :, : self.length - part.shape[2]] = 0  # never filled: attention multiplies it by zero
            first += len(part)
        setattr(self, name, buffer)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[2]
        if end > self.capacity:
            self._resize(torch.arange(len(self.keys), device=self.keys.device), max(end, self.capacity * 3 // 2))
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        start = self._first_visible()
        self.length = end
        return self.keys[:, :, start:end], self.values[:, :, start:end]

    def _first_visible(self) -> int:
        return max(0, self.length - self.window + 1) if self.is_sliding else 0

    def _resize(self, rows: Tensor, capacity: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(len(rows), old.shape[1], capacity, old.shape[3])
            new[:, :, : self.length] = old[rows, :, : self.length]
            setattr(self, name, new)
        self.capacity = capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        start = self._first_visible()
        return self.length - start + query_length, start

    def get_seq_length(self) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._resize(beam_idx, self.capacity)


class TokenCache:
    """The tokens of each row, for models without a usable cache: every step reads all of them again."""

    def __init__(self, rows: Sequence[Sequence[int]], owner: Tensor):
        self.lengths = torch.tensor([len(row) for row in rows], device=owner.device)[owner]
        self.ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        self.ids = self.ids.to(owner.device)[owner]

    def append(self, tokens: Tensor) -> None:
        """Add one token to each row, (B,)."""
        if int(self.lengths.max()) == self.ids.shape[1]:
            self.ids = F.pad(self.ids, (0, _FEW_COLUMNS))
        self.ids.scatter_(1, self.lengths[:, None], tokens[:, None])
        self.lengths = self.lengths + 1

    def reorder_cache(self, rows: Tensor) -> None:
        self.ids, self.lengths = self.ids[rows], self.lengths[rows]


_FEW_COLUMNS = 64


def can_join(cache: Cache) -> bool:
    """Whether a prefilled cache consists of plain keys and values only, no recurrent state."""
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def decode_cache(prefilled: list[Cache], owner: Tensor, length: int, capacity: int) -> Cache:
    """One cache for all rows of a decode from the caches of its prefill batches, which are used up.

    Args:
        prefilled: caches of prompt batches, each left-padded to its own width.
        owner: (B,) the prompt of each row, counted over all batches.
        length: the longest prompt, in tokens.
        capacity: columns to reserve at first; grows when needed.
    """
    if not can_join(prefilled[0]):
        (cache,) = prefilled
        cache.reorder_cache(owner)
        return cache
    layers = []
    for parts in zip(*(cache.layers for cache in prefilled), strict=True):
        layer = GrowingLayer(getattr(parts[0], "sliding_window", None), length, capacity)
        layer.fill(list(parts), owner)
        layers.append(layer)
    return Cache(layers=layers)


def can_be_joined(*caches: Cache) -> bool:
    """Whether these decode caches can be laid side by side."""
    return all(
        isinstance(cache, Cache) and all(type(layer) is GrowingLayer for layer in cache.layers) for cache in caches
    )


def joined(caches: Sequence[Cache], skipped: Sequence[int]) -> Cache:
    """One cache with the rows of all, right-aligned; the first ``skipped[i]`` columns of cache i are left out."""
    layers = []
    for parts in zip(*(cache.layers for cache in caches), strict=True):
        lengths = [part.length - first for part, first in zip(parts, skipped, strict=True)]
        length = max(lengths)
        room = max(part.capacity - part.length for part in parts)
        layer = GrowingLayer(parts[0].window, length, length + room)
        for name in ("keys", "values"):
            layer.place_side_by_side(
                name,
                [getattr(part, name)[:, :, first : part.length] for part, first in zip(parts, skipped, strict=True)],
            )
        layer.is_initialized = True
        layers.append(layer)
    return Cache(layers=layers)
