"""Generate images, bright and dark, that a tiny vision-language model learns to tell apart within a minute on a CPU.

    python examples/data_preprocess/brightness.py --local_save_dir ~/data/brightness

A prompt shows one image of noise around a light or a dark grey and asks for digits if it is bright and for letters if
it is dark; the reward is the share of right characters among the first four. For any vision-language model, one with
random weights included. Rows have the form of all rows with images: bytes of an image file in the column ``images``,
and ``<image>`` where the prompt shows them.
"""

import argparse
import io
import random

from PIL import Image
from saving import add_output_options, row, save_splits

QUESTION = "<image>Digits if bright, letters if dark."
GREYS = {"bright": (170, 230), "dark": (25, 85)}


def picture(kind: str, order: random.Random, side: int = 56) -> bytes:
    """A PNG of noise around one grey."""
    grey = order.randint(*GREYS[kind])
    pixels = bytes(grey + order.randint(-20, 20) for _ in range(side * side))
    image = Image.frombytes("L", (side, side), pixels).convert("RGB")
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def make_rows(split: str, count: int, seed: int) -> list[dict]:
    order = random.Random(f"{split} {seed}")
    rows = []
    for index in range(count):
        kind = ("bright", "dark")[index % 2]
        images = [{"bytes": picture(kind, order), "path": None}]
        rows.append({**row("brightness", QUESTION, kind, "vision", split, index), "images": images})
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_size", type=int, default=256, help="training prompts (default 256)")
    parser.add_argument("--test_size", type=int, default=32, help="test prompts (default 32)")
    parser.add_argument("--seed", type=int, default=0)
    add_output_options(parser, "~/data/brightness")
    options = parser.parse_args(arguments)
    sizes = {"train": options.train_size, "test": options.test_size}
    splits = {split: make_rows(split, count, options.seed) for split, count in sizes.items()}
    save_splits(splits, options.local_save_dir, options.hdfs_dir)


if __name__ == "__main__":
    main()
