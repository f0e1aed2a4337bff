"""The AIME contests of 2024 and 2025, thirty problems each, as ``test.parquet``; answers are integers from 0 to 999.

    python examples/data_preprocess/aime.py --year 2024 --local_save_dir ~/data/aime2024
    python examples/data_preprocess/aime.py --year 2025 --times 32 --local_save_dir ~/data/aime2025

``--times`` writes every problem so often, for means over many samples without ``val_kwargs.n``. With ``--with_tool``
the policy may run Python in the tool ``code_interpreter`` (older name: aime2024_multiturn_w_tool).
"""

from dapo17k import TOOL
from loading import Hub, load, make_parser, to_rows
from saving import row, save_splits

INSTRUCTION = (
    "Solve this problem step by step. The last line of your response must be of the form Answer: $Answer, where "
    "$Answer is the answer to the problem."
)
HUBS = {
    2024: Hub("HuggingFaceH4/aime_2024", None, {"test": "train"}, ("problem", "answer")),
    2025: Hub("math-ai/aime25", None, {"test": "test"}, ("problem", "answer")),
}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "~/data/aime")
    parser.add_argument("--year", type=int, choices=sorted(HUBS), default=2024, help="of the contest (default 2024)")
    parser.add_argument("--times", type=int, default=1, help="how often each problem is written (default 1)")
    parser.add_argument("--with_tool", action="store_true", help="let the policy run Python")
    options = parser.parse_args(arguments)

    def to_row(example: dict, split: str, index: int) -> dict:
        answer = str(int(example["answer"]))
        create = {"create_kwargs": {"ground_truth": answer}}
        extra = {"need_tools_kwargs": True, "tools_kwargs": {TOOL: create}} if options.with_tool else {}
        prompt = f"{INSTRUCTION}\n\n{example['problem']}"
        return row(f"aime{options.year}", prompt, answer, "math", split, index, **extra)

    hub = HUBS[options.year]
    [(split, origin, examples)] = load(hub, options.local_dataset_path)
    rows = to_rows(examples, to_row, split, origin, hub.columns)
    save_splits({split: rows * options.times}, options.local_save_dir, options.hdfs_dir)


if __name__ == "__main__":
    main()
