"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168; MIT licence) in the standard format.

    python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
    python examples/data_preprocess/gsm8k.py --local_dataset_path ~/grade-school-math/data --local_save_dir ~/data/gsm8k

The first loads ``openai/gsm8k`` from the Hugging Face hub. The second needs no network: the folder holds
``train.jsonl`` and ``test.jsonl`` with ``{"question": ..., "answer": "... #### 42"}`` a line.
"""

from collections.abc import Callable

from loading import Hub, convert, make_parser
from saving import MARKED, MARKED_CODE, row

from verl.data.table import DataError

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


def dialogue_row(example: dict, split: str, index: int, system: str, kwargs_of: Callable[[str, str], dict]) -> dict:
    """A row that takes several turns: ``kwargs_of(question as asked, answer)`` goes into ``extra_info``."""
    question, solution = example["question"], example["answer"]
    answer, asked = final_answer(solution), f"{question} {MARKED_CODE}"
    prompt = [{"role": "system", "content": system}, {"role": "user", "content": asked}]
    info = {"answer": solution, "question": question, **kwargs_of(asked, answer)}
    return row(DATA_SOURCE, prompt, answer, "math", split, index, **info)


def main(arguments: list[str] | None = None) -> None:
    convert(HUB, to_row, make_parser(__doc__, "~/data/gsm8k").parse_args(arguments))


if __name__ == "__main__":
    main()
