"""MATH (Hendrycks et al. 2021, arXiv:2103.03874) in the standard format; the answer is what the solution boxes.

    python examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math
    python examples/data_preprocess/math_dataset.py --only_500 --local_save_dir ~/data/math500

The second writes the 500 problems of ``HuggingFaceH4/MATH-500`` as ``test.parquet``.
"""

from loading import Hub, convert, make_parser
from saving import BOXED, boxed_answer, row

HUB = Hub("DigitalLearningGmbH/MATH-lighteval", columns=("problem", "solution", "level", "type"))
HUB_500 = Hub("HuggingFaceH4/MATH-500", None, {"test": "test"}, ("problem", "solution", "answer", "subject", "level"))


def to_row(example: dict, split: str, index: int) -> dict:
    answer = boxed_answer(example["solution"])
    details = {name: example[name] for name in ("level", "type") if name in example}
    return row(HUB.name, f"{example['problem']} {BOXED}", answer, "math", split, index, **details)


def to_row_500(example: dict, split: str, index: int) -> dict:
    details = {name: example[name] for name in ("subject", "level", "unique_id", "solution") if name in example}
    return row(HUB_500.name, f"{example['problem']} {BOXED}", example["answer"], "math", split, index, **details)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "~/data/math")
    parser.add_argument("--only_500", action="store_true", help="MATH-500, a test of 500 problems")
    options = parser.parse_args(arguments)
    convert(*((HUB_500, to_row_500) if options.only_500 else (HUB, to_row)), options)


if __name__ == "__main__":
    main()
