"""Words and the letters in them, as data for SFT and for RL: a task that a small model fails and can be shown.

    python recipe/char_count/create_dataset.py --local_dir data/char_count

writes ``sft/{train,test}.parquet`` (``prompt``, ``response`` with the letters gone through one by one) and
``rl/{train,test}.parquet`` (the standard columns). No word is in both splits.
"""

from __future__ import annotations

import argparse
import os
import random
import string

import pyarrow as pa
import pyarrow.parquet as pq

SOURCE = "char_count"


def example(word: str, letter: str) -> tuple[str, str, int]:
    """Return the question, an answer that goes through the word, and the count."""
    count, lines = 0, []
    for place, char in enumerate(word, 1):
        count += char == letter
        lines.append(f"{place}: {char}" + (f" is {letter}, {count} so far" if char == letter else ""))
    question = f"How many {letter} are in {word}? Spell the word, then put the number into \\boxed{{}}."
    return question, "\n".join([*lines, f"\\boxed{{{count}}}"]), count


def made_up_words(number: int, longest: int, seed: int) -> list[str]:
    """Return different words of 3 to ``longest`` letters out of six, so that letters come several times."""
    chance, found = random.Random(seed), dict[str, None]()
    while len(found) < number:
        letters = chance.sample(string.ascii_lowercase, 6)
        found["".join(chance.choices(letters, k=chance.randint(3, longest)))] = None
    return list(found)


def rows(words: list[str], split: str, seed: int) -> tuple[list[dict], list[dict]]:
    """Return the rows for SFT and those for RL, one of each a word."""
    chance, sft, rl = random.Random(seed), [], []
    for index, word in enumerate(words):
        # a fifth of the questions are about a letter that need not be there
        letter = chance.choice(string.ascii_lowercase) if chance.random() < 0.2 else chance.choice(word)
        question, answer, count = example(word, letter)
        sft.append({"prompt": question, "response": answer})
        rl.append(
            {
                "data_source": SOURCE,
                "prompt": [{"role": "user", "content": question}],
                "ability": "counting",
                "reward_model": {"style": "rule", "ground_truth": str(count)},
                "extra_info": {"split": split, "index": index},
            }
        )
    return sft, rl


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dir", "--local_save_dir", default="data/char_count", help="folder to write to")
    parser.add_argument("--total_number", type=int, default=10_000, help="words of both splits (default 10000)")
    parser.add_argument("--test_number", type=int, default=200, help="those of the test split (default 200)")
    parser.add_argument("--max_length", type=int, default=12, help="letters of the longest word (default 12)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if not 0 < options.test_number < options.total_number or options.max_length < 3:
        parser.error("--test_number must be less than --total_number, and --max_length at least 3")
    words = made_up_words(options.total_number, options.max_length, options.seed)
    splits = {"train": words[options.test_number :], "test": words[: options.test_number]}
    for split, of_split in splits.items():
        for kind, table in zip(("sft", "rl"), rows(of_split, split, options.seed + 1), strict=True):
            folder = os.path.join(os.path.expanduser(options.local_dir), kind)
            os.makedirs(folder, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(table), os.path.join(folder, f"{split}.parquet"))
            print(f"{folder}/{split}.parquet: {len(table)} rows, the first: {table[0]['prompt']!r}")


if __name__ == "__main__":
    main()
