"""What the scripts of this folder share: their output options, and how they write train.parquet and test.parquet."""

import argparse
import os

import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.hdfs_io import copy, makedirs


def add_output_options(parser: argparse.ArgumentParser, default_folder: str) -> None:
    """``--local_save_dir`` (older name ``--local_dir``) and ``--hdfs_dir``."""
    parser.add_argument(
        "--local_save_dir", "--local_dir", default=default_folder, help=f"folder to write to (default {default_folder})"
    )
    parser.add_argument("--hdfs_dir", default=None, help="HDFS folder to copy the result to")


def row(
    data_source: str, prompt: str, ground_truth: str, ability: str, split: str, index: int, /, **extra_info
) -> dict:
    """One row of the standard format: a prompt of one user message and a rule to score its responses."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **extra_info},
    }


def save_splits(splits: dict[str, list[dict]], local_save_dir: str, hdfs_dir: str | None = None) -> None:
    """Write ``{split}.parquet`` for each split, and copy the folder to HDFS if asked to."""
    folder = os.path.expanduser(local_save_dir)
    os.makedirs(folder, exist_ok=True)
    for split, rows in splits.items():
        path = os.path.join(folder, f"{split}.parquet")
        pq.write_table(pa.Table.from_pylist(rows), path)
        print(f"{path}: {len(rows)} prompts, the first: {rows[0]['prompt'][-1]['content']!r}")
    if hdfs_dir is not None:
        makedirs(hdfs_dir)
        copy(folder, hdfs_dir)
