"""The problems that reasoning models are compared on, as one ``test.parquet`` in the standard format.

    python recipe/r1/data_process.py --local_dir data/r1 --tasks aime2024,math500,gpqa_diamond

| task | problems | answer |
|---|--:|---|
| aime2024, aime2025 | 30 | an integer |
| math500 | 500 | in a box |
| gpqa_diamond | 198 | a letter; the hub asks for an account that has accepted its terms |

Data sources are those that the built-in scorers know. ``--local_dataset_path FOLDER`` reads ``FOLDER/<task>`` in place
of the hub.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "data_preprocess"))

from aime import HUBS as AIME  # noqa: E402
from loading import Hub, load, to_rows  # noqa: E402
from math_dataset import HUB_500, to_row_500  # noqa: E402
from saving import row, save_splits  # noqa: E402

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
GPQA = Hub(
    "Idavidrein/gpqa",
    "gpqa_diamond",
    {"test": "train"},
    ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
)
LETTER = "Answer the following multiple choice question. The last line of your response must be of the form 'Answer: X'"


def from_aime(year: int) -> Callable[[dict, str, int], dict]:
    def to_row(example: dict, split: str, index: int) -> dict:
        return row(f"aime{year}", f"{example['problem']} {BOXED}", str(example["answer"]), "math", split, index)

    return to_row


def from_gpqa(example: dict, split: str, index: int) -> dict:
    """Return a row whose choices stand in an order that the row's number decides."""
    choices = [example[name].strip() for name in GPQA.columns[1:]]
    order = random.Random(index).sample(range(4), 4)
    lines = "\n".join(f"{letter}) {choices[place]}" for letter, place in zip("ABCD", order, strict=True))
    right = "ABCD"[order.index(0)]
    prompt = f"{LETTER}, where X is one of A, B, C and D.\n\n{example['Question'].strip()}\n\n{lines}"
    return row(GPQA.name, prompt, right, "science", split, index)


TASKS: dict[str, tuple[Hub, Callable[[dict, str, int], dict]]] = {
    "aime2024": (AIME[2024], from_aime(2024)),
    "aime2025": (AIME[2025], from_aime(2025)),
    "math500": (HUB_500, to_row_500),
    "gpqa_diamond": (GPQA, from_gpqa),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dir", "--local_save_dir", default="data/r1", help="folder to write to")
    parser.add_argument("--tasks", default="all", help=f"of {', '.join(TASKS)}, commas between them, or all")
    parser.add_argument("--local_dataset_path", default=None, help="folder with one of each task, instead of the hub")
    options = parser.parse_args(arguments)
    names = list(TASKS) if options.tasks == "all" else options.tasks.split(",")
    if unknown := set(names) - set(TASKS):
        parser.error(f"--tasks {', '.join(sorted(unknown))}: known are {', '.join(TASKS)}")
    found = []
    for name in names:
        hub, to_row = TASKS[name]
        place = None if options.local_dataset_path is None else os.path.join(options.local_dataset_path, name)
        for split, origin, examples in load(hub, place):
            if split == "test":
                found += to_rows(examples, to_row, split, origin, hub.columns)
    save_splits({"test": found}, options.local_dir)


if __name__ == "__main__":
    main()
