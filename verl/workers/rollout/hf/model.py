"""The transformers model of the engine: its key-value cache and attention, its weight map, its start without values.

transformers' own cache concatenates every layer at every step, and its attention copies keys and values once per query
head of a group; at 32 rows of a small model these two cost more than the matrix products. The weight map gives the view
that holds each checkpoint tensor: a module's own tensor, under its own or another name (vision-language models), or a
slice of a fused one (the experts of a mixture). Knows transformers' cache and attention interfaces, no sampling.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from verl.models.loader import LoRASpec, cast_parameters, language_model_class
from verl.models.multimodal import is_vision_language
from verl.models.weight_names import checkpoint_tensors

# -- Key-value cache with room to grow, and decode attention that reads it in place ----------------------------------


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
        buffers: dict[str, Tensor] = {}
        for part in parts:
            rows, heads, columns, _ = part.keys.shape
            rows_of_part = (owner >= first) & (owner < first + rows)
            source = owner[rows_of_part] - first
            for name in ("keys", "values"):
                prompt = getattr(part, name)
                if name not in buffers:
                    buffers[name] = prompt.new_empty(len(owner), heads, self.capacity, prompt.shape[-1])
                buffers[name][rows_of_part, :, self.length - columns : self.length] = prompt[source]
                # never filled, yet attention multiplies them by zero: they must not hold NaN
                buffers[name][rows_of_part, :, : self.length - columns] = 0
            part.keys = part.values = None  # reset() of some releases keeps the memory
            part.is_initialized = False
            first += rows
        self.keys, self.values, self.is_initialized = buffers["keys"], buffers["values"], True

    def lay_side_by_side(self, name: str, parts: list[Tensor]) -> None:
        """Start from the filled columns of other caches, (rows, H_kv, columns, D) each, right-aligned to ``length``."""
        rows, (_, heads, _, size) = sum(map(len, parts)), parts[0].shape
        buffer = parts[0].new_empty(rows, heads, self.capacity, size)
        for target, part in zip(buffer.split([len(part) for part in parts]), parts, strict=True):
            target[:, :, self.length - part.shape[2] : self.length] = part
            target[:, :, : self.length - part.shape[2]] = 0  # never filled: attention multiplies it by zero
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
        return 0 if self.window is None else max(0, self.length - self.window + 1)

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


def can_be_joined(*caches: Cache | TokenCache) -> bool:
    """Whether these decode caches can be laid side by side."""
    return all(
        isinstance(cache, Cache) and all(type(layer) is GrowingLayer for layer in cache.layers) for cache in caches
    )


def joined(caches: Sequence[Cache], skipped: Sequence[int]) -> Cache:
    """One cache with the rows of all, right-aligned; the first ``skipped[i]`` columns of cache i are left out."""
    layers = []
    for parts in zip(*(cache.layers for cache in caches), strict=True):
        length = max(part.length - first for part, first in zip(parts, skipped, strict=True))
        room = max(part.capacity - part.length for part in parts)
        layer = GrowingLayer(parts[0].window, length, length + room)
        for name in ("keys", "values"):
            filled = [getattr(p, name)[:, :, first : p.length] for p, first in zip(parts, skipped, strict=True)]
            layer.lay_side_by_side(name, filled)
        layer.is_initialized = True
        layers.append(layer)
    return Cache(layers=layers)


# -- Cache check before the first request: decode with the cache against forward passes over whole rows ----------------
CHECK_PROMPTS = (3, 8)
"""Tokens of a short prompt and of a longer one."""


CHECK_STEPS = 2


CHECK_OWNER = (0, 0, 1)
"""The prompt of each row: two of them share one, and the response too."""


def cache_check_rows(model: PreTrainedModel, excluded: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Random rows, and the logits of each alone after its prompt and each later token, (CHECK_STEPS + 1, V).

    A row is prompt and response, (CHECK_PROMPTS[CHECK_OWNER[i]] + CHECK_STEPS,). ``excluded`` tokens are not in it.
    """
    vocab = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    usable = torch.tensor([token for token in range(vocab // 4, vocab)[:4096] if token not in set(excluded)])
    prompts = [usable[torch.randint(len(usable), (length,), generator=generator)] for length in CHECK_PROMPTS]
    responses = [usable[torch.randint(len(usable), (CHECK_STEPS,), generator=generator)] for _ in prompts]
    rows = [torch.cat(parts).to(model.device) for parts in zip(prompts, responses, strict=True)]
    logits = [model(input_ids=row[None], use_cache=False).logits[0, -CHECK_STEPS - 1 :].float() for row in rows]
    return [rows[owner] for owner in CHECK_OWNER], [logits[owner] for owner in CHECK_OWNER]


def decode_difference(
    rows: Sequence[Tensor],
    expected: Sequence[Tensor],
    logits: Tensor,
    cache: Cache | TokenCache,
    forward: Callable[[Tensor, Tensor, Tensor, Any], Tensor],
) -> float:
    """The difference of logits from those ``expected`` where rows generate together, one of which ends early.

    Of each row it is the median over tokens of the mean difference, over the logits' spread; the largest is returned.

    Args:
        logits: (rows, V) after the prompts, which are in ``cache``, right-aligned.
    """
    device, width = logits.device, max(CHECK_PROMPTS)
    lengths = torch.tensor([CHECK_PROMPTS[owner] for owner in CHECK_OWNER], device=device)
    tokens = torch.stack([row[-CHECK_STEPS:] for row in rows]).to(device)
    live, decoded = list(range(len(rows))), [[logits[i]] for i in range(len(rows))]
    for step in range(CHECK_STEPS):
        if step == 1:
            live.pop(1)
            cache.reorder_cache(torch.tensor(live, device=device))
        mask = torch.arange(width + step + 1, device=device) >= (width - lengths[live])[:, None]
        logits = forward(tokens[live, step][:, None], mask, (lengths[live] + step)[:, None], cache)
        for i, row_logits in zip(live, logits, strict=True):
            decoded[i].append(row_logits)
    largest = 0.0
    for one, parts in zip(expected, decoded, strict=True):
        other = torch.stack(parts).float()
        one = one[: len(other)]  # the last logits of the row that ended early are missing
        off = (one - other).abs().mean(-1) / one.std(-1).clamp_min(1e-6)
        largest = max(largest, float(off.nan_to_num(torch.inf).median()))
    return largest


def logit_tolerance(dtype: torch.dtype) -> float:
    """The largest difference that rounding explains; a model that forgets its prompt is far beyond."""
    return 1e-2 if dtype == torch.float32 else 0.1


# -- Weight map ------------------------------------------------------------------------------------------------------


def weight_map(model: nn.Module) -> dict[str, Tensor]:
    """Checkpoint name -> view into the module's memory, for all parameters and saved buffers.

    Tied tensors appear under each of their names.
    """
    own = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in own.items()}
    name_of = {id(shape): name for name, shape in shapes.items()}
    renamed = {name: name_of.get(id(shape)) for name, shape in checkpoint_tensors(model, shapes.items())}
    if None in renamed.values():
        return _fused_weight_map(model, own)
    return {name: own[old] for name, old in renamed.items()}


def split_weight_map(views: dict[str, Tensor], has_adapter: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weight map of a model, and that of its adapter, by the names in a sync."""
    if not has_adapter:
        return views, {}
    from verl.models.lora import is_adapter, plain_adapter_name, without_wrapper

    base = {without_wrapper(name): view for name, view in views.items() if not is_adapter(name)}
    return base, {plain_adapter_name(name): view for name, view in views.items() if is_adapter(name)}


def add_unscaled_adapter(model: nn.Module, spec: LoRASpec, dtype: torch.dtype) -> None:
    """Put an adapter of scale 1 on the layers of ``spec``; its values come by a sync."""
    from verl.models.lora import add_adapter

    add_adapter(model, replace(spec, alpha=spec.rank, adapter_path=None), seed=0)
    cast_parameters(model, dtype)


def _fused_weight_map(model: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weight map by element indices: transformers splits tensors of indices; the pieces tell their elements."""
    names = list(own)
    starts = [0, *accumulate(tensor.numel() for tensor in own.values())][:-1]
    numbered = (
        (name, torch.arange(start, start + own[name].numel()).view(own[name].shape))
        for name, start in zip(names, starts, strict=True)
    )
    views = {}
    for name, indices in checkpoint_tensors(model, numbered):
        owner = bisect_right(starts, int(indices.flatten()[0])) - 1
        views[name] = _view_of_elements(name, own[names[owner]], indices - starts[owner])
    return views


def _view_of_elements(name: str, tensor: Tensor, indices: Tensor) -> Tensor:
    """The view of a contiguous ``tensor`` whose elements have the flat ``indices``."""
    first = int(indices.flatten()[0])
    expected, strides = torch.tensor(first), []
    for axis, size in enumerate(indices.shape):
        strides.append(int(indices.select(axis, 1).flatten()[0]) - first if size > 1 else 0)
        shape = [-1 if i == axis else 1 for i in range(indices.ndim)]
        expected = expected + (torch.arange(size) * strides[axis]).view(shape)
    if not tensor.is_contiguous() or not torch.equal(indices, expected.expand(indices.shape)):
        raise NotImplementedError(
            f"{name} is not a slice of one of the model's own tensors, so a weight sync cannot write to it. "
            "This family is not supported by rollout.name=hf."
        )
    return tensor.as_strided(indices.shape, strides, int(tensor.storage_offset()) + first)


# -- The model itself: attention, and parameters without values --------------------------------------------------------
def choose_attention(model: PreTrainedModel, requested: str | None) -> None:
    """Use `decode_attention` where torch's fused attention is right; eager code where scores are capped."""
    text = model.config.get_text_config(decoder=True)
    if requested is not None:
        model.set_attn_implementation(requested)
    elif getattr(text, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    elif text._attn_implementation == "sdpa":
        # a vision tower has no cache to read
        is_vision = is_vision_language(model.config)
        model.set_attn_implementation({"text_config": DECODE_ATTENTION} if is_vision else DECODE_ATTENTION)


def uninitialized_model(
    model_config: Any, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    """A model with real buffers (rotary frequencies) and parameters of the right size that hold nothing yet."""

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        return None if parameter.is_meta else nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    # no memory, and no time spent on random numbers; buffers are computed, so the meta device is for parameters only
    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # torch: may return one
    try:
        auto_class = language_model_class(model_config) or AutoModelForCausalLM
        model = auto_class.from_config(model_config, dtype=dtype, trust_remote_code=trust_remote_code)
    finally:
        hook.remove()
    buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    model.tie_weights()
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return model
