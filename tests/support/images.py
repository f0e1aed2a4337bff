"""Prompts with images for tests: noise as pictures, rows in the standard columns, a packed batch as updates see it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from verl.protocol import DataProto
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.tiny_vl_model import make_tiny_vl_model
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.workers.rollout.assemble import assemble
from verl.workers.rollout.base import Completion

__all__ = ["MIXED", "asked", "image_dataset", "image_row", "make_batch", "make_tiny_vl_model", "picture"]


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


def asked(processor: Any, text: str, images: list[Image.Image]) -> tuple[str, dict[str, Any]]:
    """The prompt as the chat template renders it, and what transformers' processor makes of it: the oracle."""
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split("<image>")):
        parts += [{"type": "image"}] * (number > 0) + ([{"type": "text", "text": piece}] if piece else [])
    message = [{"role": "user", "content": parts}]
    rendered = processor.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return rendered, dict(processor(text=[rendered], images=images or None, return_tensors="pt"))


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
