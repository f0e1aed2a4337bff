"""Tasks of reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760; Apache-2.0), generated on this machine.

    pip install reasoning-gym
    python examples/data_preprocess/reasoning_gym_tasks.py --task chain_sum --local_save_dir ~/data/chain_sum
    python examples/data_preprocess/reasoning_gym_tasks.py --task gcd --config '{"max_numbers": 3}'

``data_source`` is ``reasoning_gym/<task>``, and ``extra_info.entry`` the whole entry in JSON, for the library's own
scorer of the task. ``--local_dataset_path`` takes a folder with ``train.jsonl`` and ``test.jsonl`` of such entries.
"""

import json
from collections.abc import Iterator

from loading import Hub, load, make_parser, to_rows
from saving import row, save_splits

FORMAT = "Give the final answer inside <answer> </answer> tags."
COLUMNS = ("question", "answer", "metadata")


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "~/data/reasoning_gym")
    parser.add_argument("--task", default="chain_sum", help="name of the data set in reasoning-gym (default chain_sum)")
    parser.add_argument("--config", type=json.loads, default={}, help="options of the task, in JSON")
    parser.add_argument("--train_size", type=int, default=1000, help="training tasks (default 1000)")
    parser.add_argument("--test_size", type=int, default=100, help="test tasks (default 100)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    def to_row(entry: dict, split: str, index: int) -> dict:
        prompt, whole = f"{entry['question']}\n\n{FORMAT}", json.dumps(entry, ensure_ascii=False, default=str)
        source = f"reasoning_gym/{options.task}"
        return row(source, prompt, entry["answer"], "reasoning", split, index, dataset=options.task, entry=whole)

    if options.local_dataset_path:
        parts = load(Hub("reasoning-gym", columns=COLUMNS), options.local_dataset_path)
    else:
        sizes = {"train": (options.train_size, options.seed), "test": (options.test_size, options.seed + 1_000_003)}
        parts = ((name, options.task, entries(options.task, *size, options.config)) for name, size in sizes.items())
    splits = {name: to_rows(examples, to_row, name, origin, COLUMNS) for name, origin, examples in parts}
    save_splits(splits, options.local_save_dir, options.hdfs_dir)


def entries(task: str, size: int, seed: int, config: dict) -> Iterator[dict]:
    """Entries of a task, each a question, an answer and metadata."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise SystemExit(
            f"--task={task} needs the package reasoning-gym: pip install reasoning-gym. Or name a folder of entries "
            "with --local_dataset_path."
        ) from error
    return iter(reasoning_gym.create_dataset(task, size=size, seed=seed, **config))


if __name__ == "__main__":
    main()
