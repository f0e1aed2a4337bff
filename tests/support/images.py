"""Prompts with images for tests: noise as pictures, rows in the standard columns, a packed batch as updates see it."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from verl.data.rl_dataset import RLHFDataset, collate_fn
from verl.data.vision import Video
from verl.protocol import DataProto
from verl.utils.tiny_vl_model import make_tiny_vl_model
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.workers.rollout.assemble import assemble
from verl.workers.rollout.base import Completion

__all__ = [
    "MIXED",
    "SHOWN",
    "asked",
    "film",
    "video_row",
    "image_dataset",
    "image_row",
    "make_batch",
    "make_tiny_vl_model",
    "picture",
]


def picture(width: int = 56, height: int = 56, seed: int = 0) -> Image.Image:
    """Coloured noise."""
    return Image.fromarray((np.random.RandomState(seed).rand(height, width, 3) * 255).astype("uint8"))


def png(image: Image.Image) -> dict[str, Any]:
    """As parquet files hold it."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


MIXED = [
    ("<image>What is it?", [picture(seed=1)]),
    ("No picture here.", []),
    ("This <image> or this <image>", [picture(28, 84, 2), picture(60, 31, 3)]),
    ("<image>", [picture(112, 112, 4)]),
    ("Nothing to see.", []),
    ("<image>What is it?", [picture(112, 112, 5)]),
]
"""(text, images) of prompts with none, one and two images of many sizes."""


SHOWN = [
    ("<video>What is it?", [], [(5, 56, 84, 4.0, 11)]),
    ("Nothing to see.", [], []),
    ("<image> and <video> and <image>", [picture(seed=12), picture(28, 84, 13)], [(2, 28, 28, 1.0, 14)]),
    ("<video><video>", [], [(4, 56, 56, 2.0, 15), (1, 28, 56, 2.0, 16)]),
    ("<image>What is it?", [picture(56, 56, 17)], []),
]
"""(text, images, videos) of prompts; a video is (frames, width, height, frames a second, seed)."""


def film(count: int, width: int, height: int, fps: float, seed: int) -> Video:
    """A video of coloured noise."""
    return Video(tuple(picture(width, height, 100 * seed + number) for number in range(count)), fps)


def video_row(text: str, images: list[Image.Image], videos: list[tuple], index: int = 0) -> dict[str, Any]:
    """A row whose videos are stored as frames."""
    held = [film(*video) for video in videos]
    stored = [{"frames": [png(frame) for frame in video.frames], "fps": video.fps} for video in held]
    return image_row(text, images, index, videos=stored)


def image_row(text: str, images: list[Image.Image] | None, index: int = 0, **columns: Any) -> dict[str, Any]:
    return {
        "data_source": "brightness",
        "prompt": [{"role": "user", "content": text}],
        "images": None if images is None else [png(image) for image in images],
        "reward_model": {"style": "rule", "ground_truth": "bright"},
        "extra_info": {"index": index},
        **columns,
    }


def image_dataset(folder: str, path: str, **config: Any) -> RLHFDataset:
    """The dataset over a file, with the tokenizer and processor of a model folder."""
    return RLHFDataset(path, hf_tokenizer(folder), {"max_prompt_length": 64, **config}, hf_processor(folder))


def asked(
    processor: Any, text: str, images: list[Image.Image], videos: Sequence[tuple] = ()
) -> tuple[str, dict[str, Any]]:
    """The prompt as the chat template renders it, and what transformers' processor makes of it: the oracle."""
    kinds = {"<image>": "image", "<video>": "video"}
    pieces = [piece for piece in re.split("(<image>|<video>)", text) if piece]
    parts = [{"type": kinds[piece]} if piece in kinds else {"type": "text", "text": piece} for piece in pieces]
    message = [{"role": "user", "content": parts}]
    rendered = processor.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    shown: dict[str, Any] = {"images": images or None}
    if videos:
        films = [film(*video) for video in videos]
        metadata = [{"fps": one.fps, "total_num_frames": len(one.frames)} for one in films]
        shown |= {"videos": [list(one.frames) for one in films], "do_sample_frames": False}
        shown["video_metadata"] = [{**one, "frames_indices": list(range(one["total_num_frames"]))} for one in metadata]
    return rendered, dict(processor(text=[rendered], return_tensors="pt", **shown))


def make_batch(dataset: RLHFDataset, response_width: int = 8, seed: int = 0) -> DataProto:
    """Every prompt of a dataset with a random response, packed, with the columns PPO losses read."""
    draw = torch.Generator().manual_seed(seed)
    prompts = DataProto.from_single_dict(collate_fn([dataset[i] for i in range(len(dataset))]))
    lengths = torch.randint(1, response_width + 1, (len(prompts),), generator=draw).tolist()
    completions = [Completion(torch.randint(4, 100, (n,), generator=draw).tolist(), None, "length") for n in lengths]
    batch = assemble(
        prompts, completions, prompt_length=dataset.max_prompt_length, response_length=response_width, pad_token_id=0
    )
    batch.non_tensor_batch["multi_modal_inputs"] = prompts.non_tensor_batch["multi_modal_inputs"]
    response = batch.ragged("responses")
    for name in ("old_log_probs", "ref_log_prob", "advantages"):
        batch.put(name, response.like(torch.randn(response.layout.total, generator=draw)))
    batch.put("old_log_probs", response.like(batch.ragged("old_log_probs").values * 0.1 - 4.6))
    return batch
