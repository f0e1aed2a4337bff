"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168; MIT licence) in the standard format.

    python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
    python examples/data_preprocess/gsm8k.py --local_dataset_path ~/grade-school-math/data --local_save_dir ~/data/gsm8k

The first loads ``openai/gsm8k`` from the Hugging Face hub. The second needs no network: the folder holds
``train.jsonl`` and ``test.jsonl`` with ``{"question": ..., "answer": "... #### 42"}`` a line.
"""

import argparse
import os
from collections.abc import Iterable

from saving import add_output_options, row, save_splits

from verl.utils.dataset.table import DataError, read_table

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SPLITS = ("train", "test")


def final_answer(solution: str) -> str:
    """The number after ``####``, without commas."""
    _, marker, answer = solution.rpartition("####")
    if not marker:
        raise DataError("the answer has no '#### <number>'")
    return answer.strip().replace(",", "")


def to_rows(examples: Iterable[dict], split: str, origin: str) -> list[dict]:
    """Rows of the standard format; the raw question and answer stay in ``extra_info``."""
    rows = []
    for index, example in enumerate(examples):
        try:
            question, solution = example["question"], example["answer"]
            prompt, answer = f"{question} {INSTRUCTION}", final_answer(solution)
        except (KeyError, DataError) as error:
            raise DataError(f"{origin}, row {index}: {error}; a row is {{question, answer}}.") from error
        rows.append(row(DATA_SOURCE, prompt, answer, "math", split, index, answer=solution, question=question))
    return rows


def load_local(folder: str) -> dict[str, list[dict]]:
    """The splits of a folder with ``{split}.jsonl``, ``.json`` or ``.parquet`` files."""
    folder = os.path.expanduser(folder)
    splits = {}
    for split in SPLITS:
        paths = [os.path.join(folder, f"{split}.{suffix}") for suffix in ("jsonl", "json", "parquet")]
        found = [path for path in paths if os.path.isfile(path)]
        if not found:
            raise FileNotFoundError(f"--local_dataset_path={folder} holds no {split}.jsonl (nor .json, .parquet).")
        splits[split] = to_rows(read_table(found[0]).to_pylist(), split, found[0])
    return splits


def load_hub() -> dict[str, list[dict]]:
    """The splits of ``openai/gsm8k`` on the Hugging Face hub."""
    from datasets import load_dataset

    try:
        dataset = load_dataset(DATA_SOURCE, "main")
    except (ConnectionError, OSError) as error:
        raise SystemExit(
            f"{DATA_SOURCE} cannot be loaded from the Hugging Face hub ({type(error).__name__}: {error}). Without "
            "network, get train.jsonl and test.jsonl from https://github.com/openai/grade-school-math and name their "
            "folder with --local_dataset_path."
        ) from error
    return {split: to_rows(dataset[split], split, f"{DATA_SOURCE}, {split}") for split in SPLITS}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dataset_path", default=None, help="folder with train.jsonl and test.jsonl")
    add_output_options(parser, "~/data/gsm8k")
    options = parser.parse_args(arguments)
    splits = load_local(options.local_dataset_path) if options.local_dataset_path else load_hub()
    save_splits(splits, options.local_save_dir, options.hdfs_dir)


if __name__ == "__main__":
    main()
