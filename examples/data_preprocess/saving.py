"""What the scripts of this folder share: their output options, the form of a row, and how files are written."""

import argparse
import os
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.table import DataError
from verl.utils.fs import copy, makedirs

BOXED = "Let's think step by step and output the final answer within \\boxed{}."
MARKED = 'Let\'s think step by step and output the final answer after "####".'
MARKED_CODE = "Let's think step by step and output the final answer after `####`."


def add_output_options(parser: argparse.ArgumentParser, default_folder: str) -> None:
    """``--local_save_dir`` (older name ``--local_dir``) and ``--hdfs_dir``."""
    parser.add_argument(
        "--local_save_dir", "--local_dir", default=default_folder, help=f"folder to write to (default {default_folder})"
    )
    parser.add_argument("--hdfs_dir", default=None, help="HDFS folder to copy the result to")


def row(
    data_source: str,
    prompt: str | list[dict[str, str]],
    ground_truth: Any,
    ability: str,
    split: str,
    index: int,
    /,
    **extra_info: Any,
) -> dict[str, Any]:
    """One row of the standard format: a prompt, of one user message if it is a text, and a rule to score responses."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **extra_info},
    }


def boxed_answer(solution: str) -> str:
    """The content of the last ``\\boxed{}`` (or ``\\fbox{}``, or after ``\\boxed `` without braces) of a solution.

    Raises:
        DataError: there is none, or its braces are not closed.
    """
    start = max(solution.rfind("\\boxed"), solution.rfind("\\fbox"))
    if start < 0:
        raise DataError("the solution has no \\boxed{answer}")
    rest = solution[start:].split("boxed" if solution.startswith("\\boxed", start) else "fbox", 1)[1]
    if not rest.startswith("{"):
        return rest.split("$")[0].strip()
    depth = 0
    for place, letter in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return rest[1:place]
    raise DataError("the braces of the last \\boxed{answer} are not closed")


def save_splits(splits: dict[str, list[dict]], local_save_dir: str, hdfs_dir: str | None = None) -> None:
    """Write ``{split}.parquet`` for each split, and copy the folder to HDFS if asked to."""
    folder = os.path.expanduser(local_save_dir)
    os.makedirs(folder, exist_ok=True)
    for split, rows in splits.items():
        path = os.path.join(folder, f"{split}.parquet")
        pq.write_table(pa.Table.from_pylist(rows), path)
        first = rows[0].get("prompt", rows[0].get("messages"))
        first = first[-1]["content"] if isinstance(first, list) else first
        print(f"{path}: {len(rows)} rows, the first: {first!r}")
    if hdfs_dir is not None:
        makedirs(hdfs_dir)
        copy(folder, hdfs_dir)
