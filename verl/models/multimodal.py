"""Inputs of vision-language models: image tensors, 3D position ids, dummy images.

Models are recognised by their attributes: a ``vision_config``, and ``get_rope_index`` where positions have three
dimensions (Qwen2-VL and its successors, arXiv:2409.12191). Knows rows of tensors, no batches and no config tree.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl.models.attention.kernels import Packing

_MODALITY_TOKEN = re.compile(r"(image|video|audio|vision|boi|eoi)_?(start|end|begin)?_token_(id|index)")
VISION_INPUTS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
"""Modality -> names of its pixel and grid tensors."""
_VIDEO_INPUTS = {*VISION_INPUTS["video"], "second_per_grid_ts"}
_KIND_OF = {1: ("image_token_id", "image_token_index"), 2: ("video_token_id", "video_token_index")}


def is_vision_language(config: Any) -> bool:
    """Whether a Hugging Face config is that of a vision-language model."""
    return getattr(config, "vision_config", None) is not None and hasattr(config, "text_config")


def vision_tower(model: Any) -> Any:
    """Return the vision encoder of a model.

    Raises:
        ValueError: it has none.
    """
    for name in ("visual", "vision_tower", "vision_model"):
        if (tower := getattr(model.base_model, name, None)) is not None:
            return tower
    raise ValueError(
        f"actor.freeze_vision_tower=true, and {type(model).__name__} has no vision tower. Leave the option false."
    )


def modality_tokens(config: Any) -> tuple[int, ...]:
    """Return the tokens that stand for an image, video or sound, or its begin or end. A response must not contain any:
    the numbers of placeholders and features of its row would differ.
    """
    if not is_vision_language(config):
        return ()
    found = {value for name, value in vars(config).items() if _MODALITY_TOKEN.fullmatch(name)}
    size = config.get_text_config().vocab_size
    return tuple(sorted(token for token in found if isinstance(token, int) and 0 <= token < size))


def collate_vision_inputs(rows: Sequence[Mapping[str, Tensor] | None]) -> dict[str, Tensor]:
    """Concatenate the image tensors of some rows for one forward pass, in order.

    Args:
        rows: processor outputs of each row's images; empty or None for a row without images.
    """
    filled = [row for row in rows if row]
    # a model may have inputs for some rows only, as a grid of videos
    names = dict.fromkeys(name for row in filled for name in row)
    return {name: torch.cat([torch.as_tensor(row[name]) for row in filled if name in row]) for name in names}


def token_kinds(config: Any, input_ids: Tensor) -> Tensor:
    """Like ``input_ids``: 1 on the tokens of images, 2 on those of videos, else 0."""
    kinds = torch.zeros_like(input_ids)
    for kind, names in _KIND_OF.items():
        for token in (getattr(config, name, None) for name in names):
            if token is not None:
                kinds[input_ids == token] = kind
    return kinds


def vision_positions(
    model: Any,
    input_ids: Tensor,
    inputs: Mapping[str, Tensor],
    mask: Tensor | None = None,
    packing: Packing | None = None,
) -> Any:
    """Return position ids (3, b, l) of rows with images, and the RoPE delta of each row, (b,).

    None and None for a model with one-dimensional positions.

    Args:
        model: a transformers model with a head.
        input_ids: (b, l).
        inputs: from ``collate_vision_inputs``.
        mask: (b, l), 1 on real tokens; None: rows begin in their first column.
        packing: of packed rows (1, T), each with positions from 0; the RoPE delta is then None.
    """
    base = model.base_model
    if not hasattr(base, "get_rope_index"):
        return None, None
    if packing is not None:
        return _packed_position_ids(model, input_ids, inputs, packing), None
    arguments = {
        "mm_token_type_ids": token_kinds(model.config, input_ids),
        "image_grid_thw": inputs.get("image_grid_thw"),
        "video_grid_thw": inputs.get("video_grid_thw"),
        "second_per_grid_ts": inputs.get("second_per_grid_ts"),
        "attention_mask": mask,
    }
    parameters = _arguments(base.__class__)
    positions, rope_delta = base.get_rope_index(input_ids, **{k: v for k, v in arguments.items() if k in parameters})
    return positions, rope_delta.flatten()


def get_rope_index(
    processor: Any,
    input_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Positions (3, L) in time, height and width of one row of a Qwen2-VL or Qwen2.5-VL: for data sets of users.

    The trainer computes such positions itself, next to the model.

    Args:
        processor: of the model; its merge size and placeholder tokens are used.
        input_ids: (L,), with as many placeholders an image as it has features.
        image_grid_thw, video_grid_thw: (images, 3), patches in time, height and width.
        second_per_grid_ts: (videos,), seconds between two frames in time; None: frames count.
        attention_mask: (L,), 1 on real tokens; others get the position 1.

    Source: Wang et al. 2024, Qwen2-VL, section 2.1 (arXiv:2409.12191).
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    # a placeholder token stands for merge x merge patches
    merge, tokenizer = processor.image_processor.merge_size, processor.tokenizer
    grids: dict[int, Iterator[Any]] = {
        tokenizer.convert_tokens_to_ids("<|image_pad|>"): iter([] if image_grid_thw is None else image_grid_thw),
        tokenizer.convert_tokens_to_ids("<|video_pad|>"): iter([] if video_grid_thw is None else video_grid_thw),
    }
    video_pad = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    seconds = iter([] if second_per_grid_ts is None else torch.as_tensor(second_per_grid_ts).tolist())
    unknown = 1.0 if "2_5" in type(processor).__name__ else 0.5  # then Qwen2-VL counts frames
    ids = input_ids[mask.bool()].tolist()
    parts: list[Tensor] = []
    start = place = 0
    while place < len(ids):
        if ids[place] in grids:
            t, h, w = (int(size) for size in next(grids[ids[place]]))
            h, w = h // merge, w // merge
            step = 2 * next(seconds, unknown) if ids[place] == video_pad else 1  # two positions a second
            times = (torch.arange(t) * step).long()
            grid = torch.stack(torch.meshgrid(times, torch.arange(h), torch.arange(w), indexing="ij")).flatten(1)
        else:
            end = next((i for i in range(place, len(ids)) if ids[i] in grids), len(ids))
            grid = torch.arange(end - place).expand(3, -1)
        parts.append(grid + start)
        start = int(parts[-1].max()) + 1
        place += grid.shape[1]
    positions = torch.ones(3, len(input_ids), dtype=input_ids.dtype, device=input_ids.device)
    positions[:, mask.bool()] = torch.cat(parts, 1).to(positions)
    return positions


def _packed_position_ids(model: Any, input_ids: Tensor, inputs: Mapping[str, Tensor], packing: Packing) -> Tensor:
    """(3, 1, T): whole rows by the model's rule; responses with a shared prompt continue that prompt's positions."""
    device, lengths = input_ids.device, torch.tensor(packing.q_lengths)
    # rows that run their prompt themselves; the others attend to another row's prompt
    is_whole = lengths == torch.tensor(packing.k_lengths)
    rows = [row for row, whole in zip(input_ids[0].split(packing.q_lengths), is_whole, strict=True) if whole]
    real = (torch.arange(int(lengths[is_whole].max())) < lengths[is_whole, None]).to(device)
    positions, _ = vision_positions(model, pad_sequence(rows, batch_first=True), inputs, real.long())
    if packing.kv_index is None:
        return positions[:, real][:, None]
    packed = positions.new_empty(len(positions), packing.tokens)
    packed[:, is_whole.repeat_interleave(lengths).to(device)] = positions[:, real]
    for length, visible in zip(packing.q_lengths, packing.kv_index.split(packing.k_lengths), strict=True):
        if length < len(visible):
            own, prompt = visible[len(visible) - length :], visible[: len(visible) - length]
            packed[:, own] = packed[:, prompt].max() + 1 + torch.arange(length, device=device)
    return packed[:, None]


@lru_cache
def _arguments(model_class: Any) -> frozenset[str]:
    return frozenset(inspect.signature(model_class.get_rope_index).parameters)


def dummy_vision_inputs(config: Any, kind: str) -> dict[str, Tensor]:
    """Return the tensors of a black one-token image (or video), to run the vision tower where no row has one.

    Args:
        kind: ``image`` or ``video``.

    Raises:
        ValueError: the family's image tensors are not supported.
    """
    vision = config.vision_config
    # names of the Qwen-VL families; the smallest image is one token, merge x merge patches
    sizes = [getattr(vision, name, None) for name in ("spatial_merge_size", "temporal_patch_size", "patch_size")]
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError(
            f"a model of type {config.model_type!r} cannot be sharded with images: a rank without images would "
            "need a dummy image, whose shape is not known for this family. Use strategy=local, or a model of the "
            "Qwen-VL families"
        )
    merge, time, patch = sizes
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    pixels, grid = VISION_INPUTS[kind]
    return {
        pixels: torch.zeros(merge * merge, channels * time * patch * patch),
        grid: torch.tensor([[1, merge, merge]]),
    }


def image_token(config: Any, kind: str = "image") -> int | None:
    """Return the placeholder token of images (or videos); None if the model has none."""
    names = _KIND_OF[1 if kind == "image" else 2]
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


def has_images_and_videos(rows: Sequence[Mapping[str, Tensor] | None]) -> tuple[bool, bool]:
    """Whether any row has images, and whether any has videos; unknown inputs count as images."""
    filled = [row for row in rows if row]
    videos = any(VISION_INPUTS["video"][0] in row for row in filled)
    return any(not row.keys() <= _VIDEO_INPUTS for row in filled), videos


def check_placeholders(config: Any, ids: Sequence[Tensor], rows: Sequence[Mapping[str, Tensor] | None]) -> None:
    """Check that each row has as many placeholder tokens as its images have features; a mismatch would shift all rows.

    Raises:
        ValueError: names the row.
    """
    # without a grid in the inputs (not Qwen) the number of features is unknown
    merge = getattr(config.vision_config, "spatial_merge_size", None)
    tokens = {kind: token for kind in VISION_INPUTS if (token := image_token(config, kind)) is not None}
    for number, (row_ids, inputs) in enumerate(zip(ids, rows, strict=True)):
        has_grid = merge and any(grid in (inputs or ()) for _, grid in VISION_INPUTS.values())
        for kind, token in tokens.items():
            placeholders = int((row_ids == token).sum())
            grid = (inputs or {}).get(VISION_INPUTS[kind][1])
            if has_grid:
                features = 0 if grid is None else int(torch.as_tensor(grid).prod(-1).sum()) // merge**2
            else:
                features = placeholders if inputs else 0
            if placeholders != features:
                raise ValueError(
                    f"row {number} has {placeholders} {kind} tokens and its {kind}s have {features} features. A "
                    f"response must not contain the model's {kind} tokens, and the column multi_modal_inputs must "
                    "travel with its rows (data.return_multi_modal_inputs)."
                )
