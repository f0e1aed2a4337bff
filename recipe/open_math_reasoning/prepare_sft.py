"""Solutions of OpenMathReasoning (Moshkov et al. 2025, arXiv:2504.16891) as conversations for SFT.

    python recipe/open_math_reasoning/prepare_sft.py --local_dir data/open_math_reasoning

writes ``train.parquet`` with a column ``messages``: the problem, and a solution that thinks before it answers. Only
solutions whose answer was checked are kept (``--all`` keeps every one). ``--local_dataset_path FOLDER`` reads
``FOLDER/cot.jsonl`` or the pieces ``cot-*-of-*.parquet`` in place of the hub.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "data_preprocess"))

from loading import Hub, convert, make_parser  # noqa: E402

BOXED = "Solve the following math problem. Make sure to put the answer (and only answer) inside \\boxed{}."
HUB = Hub(
    "nvidia/OpenMathReasoning",
    None,
    {"train": "cot"},
    ("problem", "generated_solution", "expected_answer", "problem_type"),
)


def to_row(example: dict, split: str, index: int) -> dict | None:
    """Return the conversation of a solution; None for one whose problem has no answer to check."""
    if example.get("problem_type", "has_answer_extracted") != "has_answer_extracted":
        return None
    return unchecked(example, split, index)


def unchecked(example: dict, split: str, index: int) -> dict:
    messages = [
        {"role": "user", "content": f"{BOXED}\n\n{example['problem']}"},
        {"role": "assistant", "content": example["generated_solution"]},
    ]
    return {"messages": messages, "extra_info": {"index": index, "answer": str(example["expected_answer"])}}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "data/open_math_reasoning")
    parser.add_argument("--all", action="store_true", help="solutions without a checked answer, too")
    options = parser.parse_args(arguments)
    convert(HUB, unchecked if options.all else to_row, options)


if __name__ == "__main__":
    main()
