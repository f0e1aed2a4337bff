"""Prompts with images and videos: processed by the model's processor and expanded to one placeholder per feature.

Used by ``hf`` and SGLang; an engine with its own processing (vLLM) gets ``Request.media`` as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.data.vision import media_inputs
from verl.models.multimodal import (
    VISION_INPUTS,
    collate_vision_inputs,
    image_token,
    is_vision_language,
    modality_tokens,
    vision_positions,
)
from verl.utils.tokenizer import hf_processor
from verl.workers.rollout.base import Request

_RECENT = 64
"""Prompts whose processed images are kept: the responses to one prompt are requested one after the other."""


@dataclass(frozen=True, eq=False)
class VisionInputs:
    """The images of one prompt as the model takes them. Two prompts are equal only if they share this object."""

    inputs: dict[str, Tensor]
    positions: Tensor | None = field(repr=False)
    """(3, l) of the prompt's tokens; None where the model counts them."""
    position_offset: int
    """Position after the prompt minus its number of tokens."""
    sizes: tuple[int, ...] = ()
    """Placeholder tokens of each image."""


class Prompt(NamedTuple):
    """Input of one prefill: token ids and processed images. Equal prompts are read once."""

    ids: tuple[int, ...]
    media: VisionInputs | None


@dataclass(frozen=True)
class VisionRequest(Request):
    """A request with processed images in place of ``media``, and a placeholder token for every feature of them."""

    vision: VisionInputs | None = None


def prompt_of(request: Request) -> Prompt:
    """The prompt of a request that went through :meth:`ImageReader.read`."""
    return Prompt(request.prompt_ids, request.vision if isinstance(request, VisionRequest) else None)


class ImageReader:
    """Turns requests with images into ones a transformers model can be run on.

    Args:
        folder: of the model, with its image processor.
        config: the model's Hugging Face config.
        limit: images a prompt may have (``rollout.limit_images``); None: any number.
        model: the transformers model, whose ``get_rope_index`` gives positions; None where the engine finds them.
        kinds: ``image``, ``video``: media the engine supports.
    """

    def __init__(
        self,
        folder: str,
        config: Any,
        limit: int | None = None,
        trust_remote_code: bool = False,
        model: Any = None,
        kinds: Sequence[str] = ("image",),
    ):
        self.folder, self.config, self.model, self.limit, self.kinds = folder, config, model, limit, kinds
        self.trust_remote_code = trust_remote_code
        self.never_generated = modality_tokens(config)
        self._processor: Any = None
        # with the images themselves, by whose identity they are found: the responses to one prompt process it once
        self._recent: dict[tuple, tuple[Prompt, Mapping[str, Sequence[Any]]]] = {}

    def read(self, requests: Sequence[Request]) -> list[Request]:
        """The same requests, those with images as `VisionRequest`; placeholder tokens are banned from the responses.

        Raises:
            ValueError: the model takes no images, or placeholders and images of a prompt differ in number.
        """
        requests = [ban_modality_tokens(request, self.never_generated) for request in requests]
        for request in requests:
            check_placeholders(request, self.config)
        return [self._read(request) if request.media else request for request in requests]

    def _read(self, request: Request) -> Request:
        media = check_media(request, self.config, self.limit, self.kinds)
        key = (request.prompt_ids, *(id(one) for items in media.values() for one in items))
        if key not in self._recent:
            # dicts keep the order of insertion: the oldest prompt goes first
            while len(self._recent) >= _RECENT:
                del self._recent[next(iter(self._recent))]
            self._recent[key] = self._process(request.prompt_ids, media), media
        prompt, _ = self._recent[key]
        return VisionRequest(prompt.ids, request.sampling, request.seed, vision=prompt.media)

    def _process(self, prompt_ids: Sequence[int], media: Mapping[str, Sequence[Any]]) -> Prompt:
        config = self.config
        if self._processor is None:
            self._processor = hf_processor(self.folder, trust_remote_code=self.trust_remote_code)
            if self._processor is None:
                raise ValueError(
                    f"{self.folder} has no processor of images: bring preprocessor_config.json with the model"
                )
        inputs = {name: torch.as_tensor(value) for name, value in media_inputs(self._processor, media).items()}
        grids = {kind: VISION_INPUTS[kind][1] for kind in media}  # (images, 3): frames, rows and columns of patches
        if not inputs.keys() >= set(grids.values()) or not hasattr(config.vision_config, "spatial_merge_size"):
            raise ValueError(
                f"rollout.name=hf and sglang cannot process images for model type {config.model_type!r}: they "
                "know the Qwen-VL families, whose image processors give image_grid_thw. Use rollout.name=vllm."
            )
        merge = config.vision_config.spatial_merge_size
        sizes = {kind: (inputs[grid].prod(-1) // merge**2).tolist() for kind, grid in grids.items()}
        features = {image_token(config, kind): iter(counts) for kind, counts in sizes.items()}
        ids: list[int] = []
        for token in prompt_ids:
            ids += [token] * next(features[token]) if token in features else [token]
        positions = offset = None
        if self.model is not None:
            positions, offset = vision_positions(self.model, torch.tensor([ids]), inputs)
        first = None if positions is None else positions[:, 0]
        offset_of_row = 0 if offset is None else int(offset[0])
        return Prompt(tuple(ids), VisionInputs(inputs, first, offset_of_row, tuple(sizes.get("image", ()))))


def ban_modality_tokens(request: Request, never_generated: Sequence[int]) -> Request:
    """The same request, with ``never_generated`` among the tokens its sampling bans."""
    if not never_generated:
        return request
    # without repeats: the bans of a request that is continued hold these already
    banned = tuple(dict.fromkeys((*request.sampling.banned_token_ids, *never_generated)))
    return replace(request, sampling=replace(request.sampling, banned_token_ids=banned))


def check_placeholders(request: Request, config: Any) -> None:
    """Refuse a prompt with placeholders but without its images: a model would read its placeholder tokens as text.

    Raises:
        ValueError: it has placeholder tokens and no images.
    """
    if request.media or not is_vision_language(config):
        return
    for kind in VISION_INPUTS:
        token = image_token(config, kind)
        if token is not None and (count := request.prompt_ids.count(token)):
            how = ", image_data of an agent loop's generate" if kind == "image" else "; with rollout.mode=sync"
            raise ValueError(
                f"a prompt has {count} placeholder tokens {token} and 0 {kind}s. Give its {kind}s along (column "
                f"multi_modal_data of the dataset{how})."
            )


def check_media(
    request: Request, config: Any, limit: int | None, kinds: Sequence[str] = ("image",)
) -> dict[str, Sequence[Any]]:
    """The images, and the videos, of a request: those kinds of which it has some.

    Args:
        config: the model's Hugging Face config.
        limit: images a prompt may have; None: any number.
        kinds: media the engine supports.

    Raises:
        ValueError: the model takes no images, the request has other media, more images than allowed, or not one
            placeholder token each.
    """
    given = request.media or {}
    if odd := given.keys() - set(kinds):
        hint = " Use rollout.name=hf for videos." if "video" in odd else ""
        raise ValueError(
            f"a prompt has media of kind {', '.join(sorted(odd))}: only {' and '.join(map(repr, kinds))} is supported "
            f"by this rollout engine.{hint}"
        )
    if not is_vision_language(config):
        raise ValueError(
            f"a prompt has images, and the rollout's model of type {config.model_type!r} reads text only. "
            "Use a vision-language model as actor_rollout_ref.model.path."
        )
    images = given.get("image", ())
    if limit is not None and len(images) > limit:
        raise ValueError(
            f"a prompt has {len(images)} images, more than actor_rollout_ref.rollout.limit_images={limit}. "
            "Raise it, or leave out rows with so many."
        )
    for kind in VISION_INPUTS:
        token, held = image_token(config, kind), len(given.get(kind, ()))
        # one placeholder for each image; `ImageReader` repeats it for every feature
        if token is not None and (count := request.prompt_ids.count(token)) != held:
            raise ValueError(
                f"a prompt has {count} placeholder tokens and {held} {kind}s. Its prompt_ids must hold one token "
                f"{token} for each {kind}, not one for each feature of it (raw_prompt_ids of the dataset)."
            )
    return {kind: items for kind, items in given.items() if items}


def batch_vision_inputs(prompts: Sequence[Prompt], width: int) -> tuple[dict[str, Tensor], Tensor | None]:
    """Image tensors of the prompts of one forward pass, and their positions (3, B, width) left padded with 0.

    Empty and None where none has an image.
    """
    inputs = collate_vision_inputs([prompt.media.inputs if prompt.media else None for prompt in prompts])
    if not any(prompt.media is not None and prompt.media.positions is not None for prompt in prompts):
        return inputs, None
    # temporal, height and width positions of multimodal rotary embeddings
    positions = torch.zeros(3, len(prompts), width, dtype=torch.int64)
    for row, (ids, media) in enumerate(prompts):
        positions[:, row, width - len(ids) :] = torch.arange(len(ids)) if media is None else media.positions
    return inputs, positions
