"""GSM8K with a partner that says when an answer is wrong: the interaction ``gsm8k``.

    python examples/data_preprocess/gsm8k_multiturn_w_interaction.py --local_save_dir ~/data/gsm8k_interaction

``extra_info.interaction_kwargs`` holds its name and what it is started with. Sources and options else as gsm8k.py.
"""

from gsm8k import HUB, dialogue_row
from loading import convert, make_parser

INTERACTION = "gsm8k"
SYSTEM = (
    "You are good at mathematics. Solve the question step by step. Think again with care if the user says that your "
    "answer is wrong. Write the final answer as `#### <answer>`."
)


def to_row(example: dict, split: str, index: int) -> dict:
    def kwargs_of(asked: str, answer: str) -> dict:
        return {"interaction_kwargs": {"name": INTERACTION, "query": asked, "ground_truth": answer}}

    return dialogue_row(example, split, index, SYSTEM, kwargs_of)


def main(arguments: list[str] | None = None) -> None:
    convert(HUB, to_row, make_parser(__doc__, "~/data/gsm8k_interaction").parse_args(arguments))


if __name__ == "__main__":
    main()
