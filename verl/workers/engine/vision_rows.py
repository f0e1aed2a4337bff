"""Rows with images or videos: their tensors in a batch, keys of equal images, dummies for ranks without any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from verl.models.multimodal import (
    VISION_INPUTS,
    check_placeholders,
    dummy_vision_inputs,
    has_images_and_videos,
    image_token,
    is_vision_language,
)
from verl.protocol import DataProto

VISION_COLUMN = "multi_modal_inputs"
"""Object column: the processor's image tensors of each row, a dict, or nothing."""


def vision_rows(data: DataProto) -> list[Mapping[str, Tensor] | None]:
    """Return the image tensors of each row; None for a row without images."""
    rows = data.non_tensor_batch.get(VISION_COLUMN)
    return [None] * len(data) if rows is None else [row or None for row in rows]


def image_keys(rows: Sequence[Mapping[str, Tensor] | None]) -> list[object]:
    """Return equal keys for equal images. Rows of a group mostly hold one object, which is hashed once."""
    known: dict[int, object] = {}
    for row in rows:
        if row and id(row) not in known:
            tensors = [torch.as_tensor(row[name]) for name in sorted(row)]
            digests = [blake2b(tensor.reshape(-1).view(torch.uint8).numpy()).digest() for tensor in tensors]
            known[id(row)] = *sorted(row), *(tensor.shape for tensor in tensors), *digests
    return [known[id(row)] if row else None for row in rows]


def check_vision_rows(model: nn.Module, config: Any, data: DataProto) -> tuple[bool, bool]:
    """Return whether any row has images, and whether any has videos, after checking placeholders.

    Raises:
        ValueError: rows have images and the model reads text only, or placeholders do not match the images.
    """
    rows = vision_rows(data)
    if is_vision_language(config):
        check_placeholders(config, data.ragged("input_ids").rows(), rows)
    elif any(rows):
        raise ValueError(f"the batch has images, and {type(model).__name__} is a model of text only")
    return has_images_and_videos(rows)


def add_dummy_images(micro: Any, config: Any, kinds: Sequence[str]) -> Any:
    """Append a dummy row for each of ``kinds`` that a ``MicroBatch`` lacks and another rank has.

    All ranks gather the vision tower's weights together, once for images and once for videos.
    """
    for kind in kinds:
        if VISION_INPUTS[kind][0] not in micro.vision_inputs:
            micro = micro.with_dummy_row(image_token(config, kind), dummy_vision_inputs(config, kind))
    return micro
