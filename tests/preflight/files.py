"""Small data files for tests of the check."""

import pyarrow as pa
import pyarrow.parquet as pq


def row(question="What is 3 + 5?", answer="8", source="openai/gsm8k", **columns):
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": 0},
        **columns,
    }


def sums(count, source="openai/gsm8k"):
    return [row(f"What is {i} + {i}?", str(2 * i), source) for i in range(count)]


def write(folder, rows, name="train.parquet"):
    path = folder / name
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)
