"""Images of examples to learn from: read from a row, counted in tokens, and given as the model's processor writes them.

A text or message shows an image where it says ``<image>``, from the row's column in order, or where it has a part
``{"type": "image"}``, which may hold the image itself. Tokens of images are never learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.data.table import DataError, RowTable
from verl.data.turns import MaskRefusal
from verl.data.vision import (
    ImagePrompts,
    MediaColumns,
    open_image,
    placeholder_mismatch,
    process_image,
    with_image_parts,
)

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from transformers import ProcessorMixin

_HELD = ("image", "bytes", "path")
"""Keys of a part of a message under which its image stands."""


class ExampleImages:
    """Images of the rows of one dataset.

    Args:
        processor: of the model; None, or one without images: rows with images are refused.
        key: column of images, ``data.image_key``.
    """

    def __init__(self, processor: ProcessorMixin | None, key: str) -> None:
        self.key = key
        self.prompts = ImagePrompts(processor) if hasattr(processor, "image_processor") else None
        self._is_checked = False

    def check_supported(self, table: RowTable) -> None:
        """Refuse a column of images that the model cannot see.

        Raises:
            DataError: there are images, and the model has no processor of images.
        """
        if self.prompts is None:
            MediaColumns(None, {"image": self.key, "video": ""}).check_supported(table)

    def are_in(self, ids: np.ndarray) -> bool:
        """Whether token ids hold those of an image."""
        token = None if self.prompts is None else self.prompts.token_id
        return token is not None and bool((ids == token).any())

    def of(self, row: Mapping[str, Any], messages: Any, pixels: bool = False) -> tuple[Any, list[Image]]:
        """Return the messages with a part for each image, and the images in the order in which they are shown.

        Args:
            messages: of the row; a text is returned as it is.
            pixels: read them; else only what says their size.

        Raises:
            MaskRefusal: an image cannot be read, is missing or left over, or is of a turn of the assistant.
        """
        held = row.get(self.key)
        column = [] if held is None else list(held) if isinstance(held, list | tuple) else [held]
        if isinstance(messages, str):  # there is no template, and so no model of images
            return messages, []
        split = with_image_parts(messages, ["image"] if column else [])
        shown: list[Any] = []
        taken = 0
        for message in split:
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                kind = part.get("type")
                if kind in (None, "text"):
                    continue
                if kind != "image":
                    raise MaskRefusal(
                        f"a message has a part of type {kind!r}; of media, supervised fine-tuning learns from parts "
                        '{"type": "image"} alone, with the image in the part or in ' + f"{self.key!r} (data.image_key)"
                    )
                if self.prompts is None:
                    raise MaskRefusal(
                        "a message has an image, and the model has no image processor. Use a vision-language model, or "
                        "leave out such rows"
                    )
                if message.get("role") == "assistant":
                    raise MaskRefusal("a turn of the assistant has an image, which a model of text cannot write")
                own = next((part.pop(name) for name in _HELD if part.get(name) is not None), None)
                taken += own is None
                shown.append(own if own is not None else column[taken - 1] if taken <= len(column) else None)
        if taken != len(column):
            raise MaskRefusal(placeholder_mismatch(taken, len(column), self.key).replace("the prompt", "the text"))
        try:
            return split, [(process_image if pixels else open_image)(image) for image in shown]
        except ValueError as error:
            raise MaskRefusal(str(error)) from error

    def expand(
        self, ids: Sequence[int], learned: Sequence[bool], images: Sequence[Image]
    ) -> tuple[list[int], list[bool]]:
        """Return ids and mask with each image's token repeated once for each of its features.

        Raises:
            MaskRefusal: the template shows another number of images, or the processor writes more than that token.
        """
        if self.prompts is None:
            return list(ids), list(learned)
        token = self.prompts.token_id
        if images and token is None or list(ids).count(token) != len(images):
            found = 0 if token is None else list(ids).count(token)
            raise MaskRefusal(
                f"the chat template wrote {found} {self.prompts.token} for {len(images)} images. Use the template of "
                "the model (model.custom_chat_template), and do not write this token into texts"
            )
        self._check_processor(ids, images)
        counts = iter(self._counts(images))
        pairs = [
            pair for pair in zip(ids, learned, strict=True) for _ in range(next(counts) if pair[0] == token else 1)
        ]
        return [one for one, _ in pairs], [is_learned for _, is_learned in pairs]

    def _counts(self, images: Sequence[Image]) -> list[int]:
        """Tokens of each image, from their sizes alone if the processor can say so."""
        assert self.prompts is not None
        measure = getattr(self.prompts.processor, "_get_num_multimodal_tokens", None)  # vLLM counts by it, too
        if measure is not None:
            return list(measure(image_sizes=[(image.height, image.width) for image in images]).num_image_tokens)
        text = str(self.prompts.token)
        return [self.prompts.encode(text, [image.convert("RGB")]).ids.count(self.prompts.token_id) for image in images]

    def _check_processor(self, ids: Sequence[int], images: Sequence[Image]) -> None:
        """Compare, once, with what the processor makes of a text with these images."""
        if self._is_checked:
            return
        self._is_checked = True
        prompts = self.prompts
        assert prompts is not None
        text = prompts.tokenizer.decode(list(ids), skip_special_tokens=False)
        try:
            made = prompts.encode(text, [image.convert("RGB") for image in images])
        except ValueError as error:
            raise MaskRefusal(str(error)) from error
        counts = iter(self._counts(images))
        times = [next(counts) if one == prompts.token_id else 1 for one in made.engine_ids]
        if _repeated(made.engine_ids, times) != made.ids:
            raise MaskRefusal(
                f"{type(prompts.processor).__name__} writes more than {prompts.token} for an image, which supervised "
                "fine-tuning does not learn from yet. Use a model of the Qwen2-VL, Qwen2.5-VL or Qwen3-VL families"
            )

    def inputs(self, images: Sequence[Image]) -> dict[str, Any]:
        """The processor's tensors of the images of a row: ``pixel_values``, ``image_grid_thw``; empty without."""
        if not images:
            return {}
        assert self.prompts is not None
        return dict(self.prompts.processor.image_processor(images=list(images), return_tensors="pt"))

    def check_cut(self, kept: Sequence[int], whole: Sequence[int], where: str, limit: int) -> None:
        """Refuse to cut an example through or before an image.

        Raises:
            DataError: tokens of an image are cut off.
        """
        token = None if self.prompts is None else self.prompts.token_id
        if token is not None and list(kept).count(token) != list(whole).count(token):
            raise DataError(
                f"{where} has {len(whole)} tokens, more than data.max_length={limit}, and what data.truncation would "
                "cut off holds an image. Raise data.max_length, make its images smaller, or leave out the row."
            )


def _repeated(values: Sequence[Any], times: Sequence[int]) -> list[Any]:
    return [value for value, count in zip(values, times, strict=True) for _ in range(count)]
