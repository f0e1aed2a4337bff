"""HumanEval, 164 functions to complete (Chen et al. 2021, arXiv:2107.03374; MIT licence), as ``test.parquet``.

    python examples/data_preprocess/humaneval.py --local_save_dir ~/data/humaneval

``reward_model.ground_truth`` is JSON: ``{"entry_point": name of the function, "test": code that defines check}``.
"""

import json

from loading import Hub, convert, make_parser
from saving import row

DATA_SOURCE = "openai/human-eval"
HUB = Hub(
    "openai/openai_humaneval",
    None,
    {"test": "test"},
    ("task_id", "prompt", "canonical_solution", "test", "entry_point"),
    "https://github.com/openai/human-eval has it",
)


def to_row(example: dict, split: str, index: int) -> dict:
    start = example["prompt"]
    prompt = (
        "Complete the following Python function. Return the whole function in a ```python block.\n\n"
        f"```python\n{start}```"
    )
    truth = json.dumps({"entry_point": example["entry_point"], "test": example["test"]})
    extra = {name: example[name] for name in ("task_id", "prompt", "canonical_solution")}
    return row(DATA_SOURCE, prompt, truth, "code", split, index, **extra)


def main(arguments: list[str] | None = None) -> None:
    convert(HUB, to_row, make_parser(__doc__, "~/data/humaneval").parse_args(arguments))


if __name__ == "__main__":
    main()
