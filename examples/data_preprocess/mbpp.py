"""MBPP, short Python programs with tests (Austin et al. 2021, arXiv:2108.07732; CC-BY 4.0), in the standard format.

    python examples/data_preprocess/mbpp.py --local_save_dir ~/data/mbpp

Of the hub's ``sanitized`` version; a local folder may hold either. ``reward_model.ground_truth`` is JSON:
``{"test_imports": [...], "test_list": ["assert ...", ...]}``.
"""

import json

from loading import Hub, convert, make_parser
from saving import row

DATA_SOURCE = "google/mbpp"
HUB = Hub(
    "google-research-datasets/mbpp",
    "sanitized",
    {"train": "train", "validation": "validation", "test": "test"},
    ("task_id", "prompt", "code", "test_imports", "test_list"),
)


def to_row(example: dict, split: str, index: int) -> dict:
    tests = list(example["test_list"])
    task = example["prompt"] if "prompt" in example else example["text"]  # the full version says text
    imports = list(example.get("test_imports") or [])
    imports += [example["test_setup_code"]] if example.get("test_setup_code") else []
    prompt = "\n".join([task, "Your code should pass these tests:", *tests, "Answer with a ```python block."])
    truth = json.dumps({"test_imports": imports, "test_list": tests})
    extra = {"task_id": example["task_id"], "reference": example["code"]}
    return row(DATA_SOURCE, prompt, truth, "code", split, index, **extra)


def main(arguments: list[str] | None = None) -> None:
    convert(HUB, to_row, make_parser(__doc__, "~/data/mbpp").parse_args(arguments))


if __name__ == "__main__":
    main()
