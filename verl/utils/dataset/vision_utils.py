"""Images of a row: opened, put where the prompt says ``<image>``, and counted in tokens.

Knows one row and the model's processor; no files of rows, no batches. Nothing of it is needed for text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import ProcessorMixin

__all__ = ["EncodedPrompt", "ImagePrompts", "open_image", "process_image", "with_image_parts"]

PLACEHOLDER = "<image>"
_TEXT_INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "second_per_grid_ts")


def open_image(image: Any) -> Image:
    """An image of a data file, its pixels not read yet.

    Args:
        image: ``{"bytes": ...}`` or ``{"path": ...}`` as ``datasets`` writes them, a path, the bytes of an image file,
            or a PIL image.

    Raises:
        ValueError: it is none of these, or no image can be read there.
    """
    from PIL import Image, UnidentifiedImageError

    if isinstance(image, Mapping):
        found = [image[name] for name in ("bytes", "path", "image") if image.get(name) is not None]
        if not found:
            raise ValueError(f"an image with the fields {', '.join(image)} has neither bytes nor a path")
        image = found[0]
    if isinstance(image, Image.Image):
        return image
    try:
        if isinstance(image, (bytes, bytearray, memoryview)):
            return Image.open(BytesIO(image))
        if isinstance(image, (str, os.PathLike)):
            return Image.open(os.path.expanduser(str(image).removeprefix("file://")))
    except (OSError, UnidentifiedImageError) as error:
        raise ValueError(f"an image cannot be read: {error}") from error
    raise ValueError(f"an image is a {type(image).__name__}, neither bytes, nor a path, nor a PIL image")


def process_image(image: Any) -> Image:
    """:func:`open_image` with its pixels read, as RGB."""
    try:
        return open_image(image).convert("RGB")
    except OSError as error:  # a file cut short
        raise ValueError(f"an image cannot be read: {error}") from error


def with_image_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose contents are lists of parts: each ``<image>`` an image part, what stands between them text."""
    return [{**message, "content": _parts(message.get("content"))} for message in messages]


def _parts(content: Any) -> Any:
    if isinstance(content, str):
        if PLACEHOLDER not in content:
            return content
        parts: list[dict[str, Any]] = []
        for number, text in enumerate(content.split(PLACEHOLDER)):
            parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
        return parts
    if content is None:
        return None
    # Parquet gives every part of a column the same fields: those a part does not use are null.
    return [{name: value for name, value in part.items() if value is not None} for part in content]


def count_image_parts(messages: Sequence[Mapping[str, Any]]) -> int:
    """Images that messages made by :func:`with_image_parts` show."""
    contents = (message["content"] for message in messages if isinstance(message.get("content"), list))
    return sum(part.get("type") == "image" for content in contents for part in content)


def uneven_image_rows(prompts: pa.ChunkedArray, images: pa.ChunkedArray) -> Iterator[tuple[int, int, int]]:
    """(row, ``<image>`` placeholders, images) of rows where the two differ; contents that are no texts are left out."""
    prompts, images = (column.combine_chunks() for column in (prompts, images))
    if not pa.types.is_list(images.type) and not pa.types.is_large_list(images.type):
        return
    if pa.types.is_list(prompts.type) or pa.types.is_large_list(prompts.type):
        contents = pc.struct_field(pc.list_flatten(prompts), "content")
        parents = pc.list_parent_indices(prompts).to_numpy()
    else:
        contents, parents = prompts, np.arange(len(prompts))
    if not pa.types.is_string(contents.type) and not pa.types.is_large_string(contents.type):
        return
    counts = pc.fill_null(pc.count_substring(contents, PLACEHOLDER), 0).to_numpy(zero_copy_only=False)
    shown = np.bincount(parents, counts, len(prompts)).astype(np.int64)
    held = pc.fill_null(pc.list_value_length(images), 0).to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(shown != held):
        yield int(row), int(shown[row]), int(held[row])


def placeholder_mismatch(where: str, shown: int, held: int, key: str) -> str:
    """What to say of a row whose placeholders and images differ in number."""
    return (
        f"{where}: the prompt has {shown} {PLACEHOLDER} placeholders and the row {held} images in {key!r} "
        "(data.image_key). Each placeholder stands for one image, in order: correct or remove the row."
    )


class EncodedPrompt(NamedTuple):
    """A prompt with images, as token ids."""

    engine_ids: list[int]
    """One placeholder token an image: what a rollout engine is given, beside the images."""
    ids: list[int]
    """As many placeholder tokens an image as it has features: what the model reads."""
    inputs: dict[str, Any]
    """The processor's tensors of the images: ``pixel_values``, ``image_grid_thw``."""


def image_inputs(processor: ProcessorMixin, images: Sequence[Image]) -> dict[str, Any]:
    """What a model's processor makes of the images of one prompt: tensors of ``pixel_values``, ``image_grid_thw``."""
    return dict(processor.image_processor(images=list(images), return_tensors="pt"))


class ImagePrompts:
    """Prompts with images under one model's processor."""

    def __init__(self, processor: ProcessorMixin):
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.token = getattr(processor, "image_token", None)
        self.token_id = getattr(processor, "image_token_id", None)
        if self.token_id is None and self.token is not None:
            self.token_id = self.tokenizer.convert_tokens_to_ids(self.token)

    def encode(self, text: str, images: Sequence[Image]) -> EncodedPrompt:
        """Token ids and image tensors of a prompt that went through the chat template.

        Raises:
            ValueError: the template or the processor did not make one placeholder an image.
        """
        outputs = dict(self.processor(text=[text], images=list(images), return_tensors="pt"))
        ids = outputs["input_ids"][0].tolist()
        engine_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if (shown := engine_ids.count(self.token_id)) != len(images):
            raise ValueError(
                f"the chat template made {shown} {self.token} of {len(images)} images. Use the template of the model, "
                "and write no such token into a prompt"
            )
        return EncodedPrompt(engine_ids, ids, {k: v for k, v in outputs.items() if k not in _TEXT_INPUTS})

    def num_tokens(self, text: str, images: Sequence[Image]) -> int:
        """Length of ``encode(text, images).ids``; from the images' sizes alone where the processor can."""
        measure = getattr(self.processor, "_get_num_multimodal_tokens", None)
        if measure is None:
            return len(self.encode(text, [image.convert("RGB") for image in images]).ids)
        found = measure(image_sizes=[(image.height, image.width) for image in images])
        text_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return len(text_ids) - len(images) + sum(found.num_image_tokens)

    def truncate(self, prompt: EncodedPrompt, keep: Sequence[int]) -> EncodedPrompt:
        """The tokens at the positions ``keep`` of ``prompt.ids``, with all of its images.

        Raises:
            ValueError: a token of an image is not among them.
        """
        kept = set(keep)
        first = [i for i, token in enumerate(prompt.ids) if token != self.token_id or self._starts(prompt.ids, i)]
        cut = any(token == self.token_id and i not in kept for i, token in enumerate(prompt.ids))
        if cut or [prompt.ids[i] for i in first] != prompt.engine_ids:
            raise ValueError("the cut would go through an image")
        ids = [prompt.ids[i] for i in keep]
        return EncodedPrompt([prompt.ids[i] for i in first if i in kept], ids, prompt.inputs)

    def _starts(self, ids: Sequence[int], i: int) -> bool:
        return i == 0 or ids[i - 1] != self.token_id
