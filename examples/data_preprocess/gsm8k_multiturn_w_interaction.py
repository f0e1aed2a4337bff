"""GSM8K with a partner that says when an answer is wrong: the interaction ``gsm8k``.

    python examples/data_preprocess/gsm8k_multiturn_w_interaction.py --local_save_dir ~/data/gsm8k_interaction

``extra_info.interaction_kwargs`` holds its name and what it is started with. Sources and options else as gsm8k.py.
"""

from gsm8k import DATA_SOURCE, HUB, final_answer
from loading import convert, make_parser
from saving import MARKED_CODE, row

INTERACTION = "gsm8k"
SYSTEM = (
    "You are good at mathematics. Solve the question step by step. Think again with care if the user says that your "
    "answer is wrong. Write the final answer as `#### <answer>`."
)


def to_row(example: dict, split: str, index: int) -> dict:
    question, solution = example["question"], example["answer"]
    answer, asked = final_answer(solution), f"{question} {MARKED_CODE}"
    return row(
        DATA_SOURCE,
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}],
        answer,
        "math",
        split,
        index,
        answer=solution,
        question=question,
        interaction_kwargs={"name": INTERACTION, "query": asked, "ground_truth": answer},
    )


def main(arguments: list[str] | None = None) -> None:
    convert(HUB, to_row, make_parser(__doc__, "~/data/gsm8k_interaction").parse_args(arguments))


if __name__ == "__main__":
    main()
