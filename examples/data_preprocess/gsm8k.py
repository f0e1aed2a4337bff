"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168; MIT licence) in the standard format.

    python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
    python examples/data_preprocess/gsm8k.py --local_dataset_path ~/grade-school-math/data --local_save_dir ~/data/gsm8k

The first loads ``openai/gsm8k`` from the Hugging Face hub. The second needs no network: the folder holds
``train.jsonl`` and ``test.jsonl`` with ``{"question": ..., "answer": "... #### 42"}`` a line.
"""

from loading import Hub, convert, make_parser
from saving import MARKED, row

from verl.utils.dataset.table import DataError

DATA_SOURCE = "openai/gsm8k"
HUB = Hub(
    DATA_SOURCE, "main", columns=("question", "answer"), also="https://github.com/openai/grade-school-math has them"
)


def final_answer(solution: str) -> str:
    """The number after ``####``, without commas."""
    _, marker, answer = solution.rpartition("####")
    if not marker:
        raise DataError("the answer has no '#### <number>'")
    return answer.strip().replace(",", "")


def to_row(example: dict, split: str, index: int) -> dict:
    """The raw question and answer stay in ``extra_info``."""
    question, solution = example["question"], example["answer"]
    answer, prompt = final_answer(solution), f"{question} {MARKED}"
    return row(DATA_SOURCE, prompt, answer, "math", split, index, answer=solution, question=question)


def main(arguments: list[str] | None = None) -> None:
    convert(HUB, to_row, make_parser(__doc__, "~/data/gsm8k").parse_args(arguments))


if __name__ == "__main__":
    main()
