"""Generate a small task that a small model learns within minutes on a CPU.

    python examples/data_preprocess/arithmetic.py --task add1 --local_save_dir ~/data/add1

| task   | prompt                                                                          | reward               |
|--------|---------------------------------------------------------------------------------|----------------------|
| add1   | What is 3 + 5? Answer with only the number.                                     | last number is right |
| mul1   | What is 3 * 5? Answer with only the number.                                     | last number is right |
| max3   | Which number is the largest: 12, 80, 35? Answer with only the number.           | last number is right |
| even   | Is 12 an even number? Answer yes or no.                                         | begins with the word |
| digits | Say something about a cat.                                                      | digits written / 5   |

The first four are for instruct models, ``digits`` is for any model, one with random weights included. Test prompts are
all different. A one-digit task has at most 100 prompts, so most of them are in the training file too: what is measured
is whether the model learns the task, not whether it generalises.

With ``--pairs`` a row has ``prompt``, ``chosen``, the right answer, and ``rejected``, that to another question: for
``verl dpo`` and ``verl rm``.
"""

import argparse
import itertools
import random
from collections.abc import Callable, Iterator

from saving import add_output_options, row, save_splits

THINGS = "cat dog sun tree book lamp fish moon star rain road bird cake milk door king".split()
WANTED_DIGITS = 5


def add1() -> list[tuple[str, str]]:
    pairs = itertools.product(range(10), repeat=2)
    return [(f"What is {a} + {b}? Answer with only the number.", str(a + b)) for a, b in pairs]


def mul1() -> list[tuple[str, str]]:
    pairs = itertools.product(range(2, 10), repeat=2)
    return [(f"What is {a} * {b}? Answer with only the number.", str(a * b)) for a, b in pairs]


def max3() -> list[tuple[str, str]]:
    numbers = random.Random("max3")  # 704,880 triples are there: a fixed sample of them is the task
    triples = [numbers.sample(range(10, 100), 3) for _ in range(20_000)]
    return [
        (f"Which number is the largest: {a}, {b}, {c}? Answer with only the number.", str(max(a, b, c)))
        for a, b, c in sorted(set(map(tuple, triples)))
    ]


def even() -> list[tuple[str, str]]:
    return [(f"Is {a} an even number? Answer yes or no.", "no" if a % 2 else "yes") for a in range(10, 100)]


def digits() -> list[tuple[str, str]]:
    return [(f"Say something about a {thing}.", str(WANTED_DIGITS)) for thing in THINGS]


TASKS: dict[str, Callable[[], list[tuple[str, str]]]] = {
    "add1": add1,
    "mul1": mul1,
    "max3": max3,
    "even": even,
    "digits": digits,
}


def make_splits(task: str, train_size: int, test_size: int | None, seed: int) -> dict[str, list[dict]]:
    """Training prompts go round and round the shuffled questions of the task; test prompts come up once each.

    ``test_size`` None: 100 of them, or all there are.
    """
    questions = TASKS[task]()
    order = random.Random(seed)
    train = list(itertools.islice(_rounds(questions, order), train_size))
    test = order.sample(questions, min(test_size or 100, len(questions)))
    if len(test) < (test_size or 0):
        print(
            f"--test_size={test_size}: the task {task} has {len(questions)} different prompts, so the test has these."
        )
    name, ability = ("digits", "text") if task == "digits" else (f"arithmetic/{task}", "math")
    return {
        split: [row(name, question, answer, ability, split, i) for i, (question, answer) in enumerate(rows)]
        for split, rows in (("train", train), ("test", test))
    }


def to_pairs(rows: list[dict], answers: list[str], seed: int) -> list[dict]:
    """Rows with a right and a wrong answer."""
    order = random.Random(f"wrong {seed}")
    pairs = []
    for made in rows:
        right = made["reward_model"]["ground_truth"]
        wrong = order.choice([answer for answer in answers if answer != right])
        pairs.append({"prompt": made["prompt"][-1]["content"], "chosen": right, "rejected": wrong})
    return pairs


def _rounds(questions: list[tuple[str, str]], order: random.Random) -> Iterator[tuple[str, str]]:
    while True:
        yield from order.sample(questions, len(questions))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="add1")
    parser.add_argument("--train_size", type=int, default=512, help="training prompts (default 512)")
    parser.add_argument("--test_size", type=int, help="test prompts, all different (default 100, or all there are)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", action="store_true", help="right and wrong answers, for preference training")
    add_output_options(parser, "~/data/arithmetic")
    options = parser.parse_args(arguments)
    if options.train_size < 1 or options.test_size is not None and options.test_size < 1:
        parser.error(f"--train_size={options.train_size} and --test_size={options.test_size} must be at least 1")
    splits = make_splits(options.task, options.train_size, options.test_size, options.seed)
    if options.pairs and options.task == "digits":
        parser.error("--pairs: the task digits has no wrong answers; use add1, mul1, max3 or even")
    if options.pairs:
        answers = sorted({answer for _, answer in TASKS[options.task]()})
        splits = {split: to_pairs(rows, answers, options.seed) for split, rows in splits.items()}
    save_splits(splits, options.local_save_dir, options.hdfs_dir)


if __name__ == "__main__":
    main()
