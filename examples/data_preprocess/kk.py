"""Knights and knaves (Xie et al. 2024, arXiv:2410.23123): who tells the truth, and who lies?

    python examples/data_preprocess/kk.py --people 3 --local_save_dir ~/data/kk_3ppl

A local folder holds ``train/3ppl.jsonl`` and ``test/3ppl.jsonl``. ``reward_model.ground_truth`` is
``{"solution_text_format": "(1) Zoey is a knight\\n(2) ...", "statements": ...}``.
"""

from loading import Hub, load, make_parser, to_rows
from saving import row, save_splits

DATA_SOURCE = "kk_logic"
SYSTEM = (
    "Think about the problem inside <think> </think> tags before you answer. Then say who is what inside <answer> "
    "</answer> tags, one person a line, for example <answer> (1) Zoey is a knight\n(2) Oliver is a knave </answer>."
)


def to_row(example: dict, split: str, index: int) -> dict:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": example["quiz"]}]
    truth = {"solution_text_format": example["solution_text_format"], "statements": str(example["statements"])}
    return row(DATA_SOURCE, messages, truth, "logic", split, index)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "~/data/kk")
    parser.add_argument("--people", type=int, choices=range(2, 9), default=3, help="in a puzzle (default 3)")
    options = parser.parse_args(arguments)
    name = f"{options.people}ppl"
    splits = {}
    for split in ("train", "test"):
        hub = Hub("K-and-K/knights-and-knaves", split, {split: name}, ("quiz", "solution_text_format", "statements"))
        [(_, origin, examples)] = load(hub, options.local_dataset_path)
        splits[split] = to_rows(examples, to_row, split, origin, hub.columns)
    save_splits(splits, options.local_save_dir, options.hdfs_dir)


if __name__ == "__main__":
    main()
