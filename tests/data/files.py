"""Small prompt files in the standard columns."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def prompt_row(text: str, index: int = 0, **columns) -> dict:
    return {
        "data_source": "digits",
        "prompt": [{"role": "user", "content": text}],
        "ability": "test",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"index": index},
        **columns,
    }


def write(path: Path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def write_numbered(path: Path, count: int, start: int = 0) -> str:
    """Prompts whose extra_info.index counts from ``start``."""
    return write(path, [prompt_row(f"prompt {i}", i) for i in range(start, start + count)])
