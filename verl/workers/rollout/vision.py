"""Prompts with images in transformers: read by the model's image processor, made as long as the model reads them.

SGLang is given what was read; an engine with its own processing (vLLM) gets ``Request.media`` as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.models.multimodal import (
    collate_vision_inputs,
    image_token,
    is_vision_language,
    modality_tokens,
    vision_positions,
)
from verl.workers.rollout.base import Request

_RECENT = 64
"""Prompts whose images are kept as they were read: the responses to one prompt are asked for one after the other."""


@dataclass(frozen=True, eq=False)
class Seen:
    """The images of one prompt as the model takes them. Two prompts show the same only if they share this object."""

    inputs: dict[str, Tensor]
    positions: Tensor | None = field(repr=False)
    """(3, l) of the prompt's tokens; None where the model counts them."""
    ahead: int
    """How far positions after the prompt are ahead of the count of its tokens."""
    sizes: tuple[int, ...] = ()
    """Placeholder tokens of each image."""


class Prompt(NamedTuple):
    """What one prefill reads."""

    ids: tuple[int, ...]
    seen: Seen | None


def prompt_of(request: Request) -> Prompt:
    """The prompt of a request that went through :meth:`ImageReader.read`; equal prompts are read once."""
    return Prompt(request.prompt_ids, request.media)


def positions_ahead(requests: Sequence[Request]) -> list[int]:
    """Of each request, how far its response's positions are ahead of its tokens."""
    return [request.media.ahead if isinstance(request.media, Seen) else 0 for request in requests]


class ImageReader:
    """Turns requests with images into ones a transformers model can be run on.

    Args:
        folder: of the model, with its image processor.
        config: the model's Hugging Face config.
        limit: images a prompt may have (``rollout.limit_images``); None: any number.
        model: the transformers model, whose ``get_rope_index`` gives positions; None where the engine finds them.
    """

    def __init__(
        self,
        folder: str,
        config: Any,
        limit: int | None = None,
        trust_remote_code: bool = False,
        model: Any = None,
    ):
        self.folder, self.config, self.model, self.limit = folder, config, model, limit
        self.trust_remote_code = trust_remote_code
        self.never_drawn = modality_tokens(config)
        self._processor: Any = None
        # with the images themselves, by whose identity they are found: siblings share a prompt and read it once
        self._recent: dict[tuple, tuple[Request, Sequence[Any]]] = {}

    def read(self, requests: Sequence[Request]) -> list[Request]:
        """The same requests with a placeholder token for every feature of an image, and ``Seen`` images as media.

        None of them may draw such a token.

        Raises:
            ValueError: the model sees no images, or placeholders and images of a prompt differ in number.
        """
        requests = [without_modality_tokens(request, self.never_drawn) for request in requests]
        for request in requests:
            check_shown(request, self.config)
        return [self._read(request) if request.media else request for request in requests]

    def _read(self, request: Request) -> Request:
        images = check_media(request, self.config, self.limit)
        key = (request.prompt_ids, *map(id, images))
        if key not in self._recent:
            while len(self._recent) >= _RECENT:
                del self._recent[next(iter(self._recent))]
            self._recent[key] = self._expanded(request, images), images
        known = self._recent[key][0]
        return replace(request, prompt_ids=known.prompt_ids, media=known.media)

    def _expanded(self, request: Request, images: Sequence[Any]) -> Request:
        config = self.config
        inputs = {name: torch.as_tensor(value) for name, value in self._images(images).items()}
        token, merge = image_token(config), config.vision_config.spatial_merge_size
        sizes = (inputs["image_grid_thw"].prod(-1) // merge**2).tolist()
        features = iter(sizes)
        ids = [i for given in request.prompt_ids for i in ([given] * next(features) if given == token else [given])]
        positions = ahead = None
        if self.model is not None:
            positions, ahead = vision_positions(self.model, torch.tensor([ids]), inputs)
        first = None if positions is None else positions[:, 0]
        seen = Seen(inputs, first, 0 if ahead is None else int(ahead[0]), tuple(sizes))
        return replace(request, prompt_ids=tuple(ids), media=seen)

    def _images(self, images: Sequence[Any]) -> dict[str, Any]:
        if self._processor is None:
            from transformers import AutoImageProcessor

            self._processor = AutoImageProcessor.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)
        found = dict(self._processor(images=list(images), return_tensors="pt"))
        if "image_grid_thw" not in found or not hasattr(self.config.vision_config, "spatial_merge_size"):
            raise ValueError(
                f"rollout.name=hf and sglang cannot show images to a model of type {self.config.model_type!r}: they "
                "know the Qwen-VL families, whose image processors give image_grid_thw. Use rollout.name=vllm."
            )
        return found


def without_modality_tokens(request: Request, never_drawn: Sequence[int]) -> Request:
    """The same request, with ``never_drawn`` among the tokens its sampling bans."""
    if not never_drawn:
        return request
    banned = tuple(dict.fromkeys((*request.sampling.banned_token_ids, *never_drawn)))
    return replace(request, sampling=replace(request.sampling, banned_token_ids=banned))


def check_shown(request: Request, config: Any) -> None:
    """Refuse a prompt whose images were lost on the way: a model would read its placeholder tokens as text.

    Raises:
        ValueError: it has placeholder tokens and no images.
    """
    if not request.media and is_vision_language(config) and (shown := request.prompt_ids.count(image_token(config))):
        raise ValueError(
            f"a prompt has {shown} placeholder tokens {image_token(config)} and 0 images. Give its images along "
            "(column multi_modal_data of the dataset, image_data of an agent loop's generate)."
        )


def check_media(request: Request, config: Any, limit: int | None) -> Sequence[Any]:
    """The images of a request.

    Args:
        config: the model's Hugging Face config.
        limit: images a prompt may have; None: any number.

    Raises:
        ValueError: the model sees no images, the request has other media, more images than allowed, or not one
            placeholder token each.
    """
    if odd := request.media.keys() - {"image"}:
        raise ValueError(f"a prompt has media of kind {', '.join(sorted(odd))}: only 'image' is supported.")
    if not is_vision_language(config):
        raise ValueError(
            f"a prompt has images, and the rollout's model of type {config.model_type!r} reads text only. "
            "Use a vision-language model as actor_rollout_ref.model.path."
        )
    images = request.media["image"]
    if limit is not None and len(images) > limit:
        raise ValueError(
            f"a prompt has {len(images)} images, more than actor_rollout_ref.rollout.limit_images={limit}. "
            "Raise it, or leave out rows with so many."
        )
    if (shown := request.prompt_ids.count(image_token(config))) != len(images):
        raise ValueError(
            f"a prompt has {shown} placeholder tokens and {len(images)} images. Its prompt_ids must hold one token "
            f"{image_token(config)} for each image, not one for each feature of it (raw_prompt_ids of the dataset)."
        )
    return images


def joined_prompts(prompts: Sequence[Prompt], width: int) -> tuple[dict[str, Tensor], Tensor | None]:
    """Of prompts read in one forward: their image tensors, and positions (3, B, width) left padded with 0.

    Empty and None where none has an image.
    """
    inputs = collate_vision_inputs([prompt.seen.inputs if prompt.seen else None for prompt in prompts])
    if not any(prompt.seen is not None and prompt.seen.positions is not None for prompt in prompts):
        return inputs, None
    positions = torch.zeros(3, len(prompts), width, dtype=torch.int64)
    for row, (ids, seen) in enumerate(prompts):
        positions[:, row, width - len(ids) :] = torch.arange(len(ids)) if seen is None else seen.positions
    return inputs, positions
