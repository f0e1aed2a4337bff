"""Write a tiny model and the rows of the guessing game: each says which number its user thinks of.

python examples/agentic/higher_lower/prepare.py ~/higher_lower
"""

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.tiny_model import make_tiny_model

NUMBERS = "123"


def rows(count: int) -> list[dict]:
    """Return rows with equal prompts, each number equally often."""
    return [
        {
            "data_source": "higher_lower",
            "prompt": [{"role": "user", "content": "!"}],
            "ability": "dialogue",
            "reward_model": {"style": "rule", "ground_truth": NUMBERS[index % 3]},
            "extra_info": {
                "index": index,
                "interaction_kwargs": {"name": "higher_lower", "number": NUMBERS[index % 3]},
            },
        }
        for index in range(count)
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the model's random weights")
    args = parser.parse_args()
    folder = args.folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    make_tiny_model(folder / "model", seed=args.seed)
    pq.write_table(pa.Table.from_pylist(rows(513)), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows(48)), folder / "test.parquet")
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
