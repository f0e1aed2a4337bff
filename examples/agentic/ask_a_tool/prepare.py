"""Write a tiny model, and rows of which each has a secret that only the tool can tell.

python examples/agentic/ask_a_tool/prepare.py data/ask_a_tool
"""

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer, GenerationConfig

from verl.utils.tiny_model import make_tiny_model

LETTERS = "xy"


def rows(count: int) -> list[dict]:
    """Return rows with secrets: each letter as often as the others in any batch of neighbours."""
    made = []
    for index in range(count):
        secret = LETTERS[index % len(LETTERS)]
        kwargs = {"ask": {"execute_kwargs": {"secret": secret}}}
        made.append(
            {
                "data_source": "ask_a_tool",
                "prompt": [{"role": "user", "content": "."}],
                "ability": "tools",
                "reward_model": {"style": "rule", "ground_truth": secret},
                "extra_info": {"index": index, "tools_kwargs": kwargs, "need_tools_kwargs": True},
            }
        )
    return made


def write_model(folder: Path, seed: int) -> None:
    """Write a model with random weights, of which a question mark ends a turn as its end token does."""
    make_tiny_model(folder, seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("?")]
    GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = args.folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", args.seed)
    pq.write_table(pa.Table.from_pylist(rows(512)), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows(32)), folder / "test.parquet")
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
