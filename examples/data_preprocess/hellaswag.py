"""HellaSwag (Zellers et al. 2019, arXiv:1905.07830; MIT licence): how does it go on, A, B, C or D?

    python examples/data_preprocess/hellaswag.py --local_save_dir ~/data/hellaswag

The hub's test split has no labels, so ``test.parquet`` is made of its validation split.
"""

import re

from loading import Hub, convert, make_parser
from saving import row

HUB = Hub(
    "Rowan/hellaswag",
    None,
    {"train": "train", "test": "validation"},
    ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
)
INSTRUCTION = "Which ending fits best? Think step by step and give its letter within \\boxed{}."


def clean(text: str) -> str:
    """Without the marks of the site that some texts are from: ``[title]``, ``[step]`` and doubled spaces."""
    return re.sub(r" +", " ", re.sub(r"\[.*?\]", "", text.replace(" [title]", ". "))).strip()


def to_row(example: dict, split: str, index: int) -> dict:
    context = f"{example['activity_label']}: {example['ctx_a']} {example['ctx_b'].capitalize()}"
    endings = [clean(ending) for ending in example["endings"]]
    options = "\n".join(f"{letter}. {ending}" for letter, ending in zip("ABCD", endings, strict=True))
    prompt = f"{clean(context)}\n\n{options}\n\n{INSTRUCTION}"
    return row(HUB.name, prompt, "ABCD"[int(example["label"])], "nlp", split, index, choices=endings)


def main(arguments: list[str] | None = None) -> None:
    convert(HUB, to_row, make_parser(__doc__, "~/data/hellaswag").parse_args(arguments))


if __name__ == "__main__":
    main()
