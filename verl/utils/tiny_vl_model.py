"""Make a tiny random vision-language model (Qwen2.5-VL) with its processor, offline: for tests and smoke runs.

    python -m verl.utils.tiny_vl_model ~/models/tiny-vl

writes a Hugging Face folder that ``AutoModelForImageTextToText`` and ``AutoProcessor`` open. An image of 28 x 28 pixels
is one token. Needs torchvision, as transformers' processor of the family does.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from verl.utils.tiny_model import make_tokenizer, save_model

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEXT_SIZE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VISION_SIZE = {"hidden_size": 64, "intermediate_size": 128, "depth": 2, "num_heads": 2, "patch_size": 14}


def make_tiny_vl_model(
    folder: str | os.PathLike, seed: int = 0, max_image_tokens: int = 16, **text_overrides: Any
) -> str:
    """Save a random Qwen2.5-VL, its processor and its generation config to ``folder``.

    Args:
        seed: the same seed gives the same weights.
        max_image_tokens: larger images, and pairs of frames of a video, are scaled down to so many tokens; a token
            stands for 28 x 28 pixels.
        text_overrides: further entries of the language model's config.

    Returns:
        The folder, as a string.
    """
    import torch
    from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    processor = _processor(max_image_tokens)
    tokenizer = processor.tokenizer
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {**TEXT_SIZE, **ends, "vocab_size": len(tokenizer), "max_position_embeddings": 2048, **text_overrides}
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [half - 2 * (half * 3 // 8)],
    }
    rope["mrope_section"] += [half * 3 // 8] * 2  # time, height, width
    config = Qwen2_5_VLConfig(
        text_config={"rope_parameters": rope, "tie_word_embeddings": True, **text},
        vision_config={
            **VISION_SIZE,
            "out_hidden_size": text["hidden_size"],
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        tie_word_embeddings=text.get("tie_word_embeddings", True),
        **dict(zip(_ID_NAMES, tokenizer.convert_tokens_to_ids(list(VISION_TOKENS)), strict=True)),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**{**ends, "bos_token_id": None})
    return save_model(model, processor, folder)


_ID_NAMES = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")


def _processor(max_image_tokens: int) -> Any:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    tokenizer = make_tokenizer("char")
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    pixels = VISION_SIZE["patch_size"] ** 2 * 4  # two by two patches make a token
    size = {"shortest_edge": pixels, "longest_edge": pixels * max_image_tokens}
    videos = Qwen2VLVideoProcessor(size=size, cap_pixels_per_frame=False)
    return Qwen2_5_VLProcessor(Qwen2VLImageProcessor(size=size), tokenizer, videos, chat_template=CHAT_TEMPLATE)


def main() -> None:
    """Command line: ``python -m verl.utils.tiny_vl_model FOLDER [--seed 0]``."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make_tiny_vl_model(args.folder, args.seed))


if __name__ == "__main__":
    main()
