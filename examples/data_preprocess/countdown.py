"""Countdown: make a number from others with + - * /, each used once (as TinyZero does, github.com/Jiayi-Pan/TinyZero).

    python examples/data_preprocess/countdown.py --generate --train_size 2000 --local_save_dir ~/data/countdown
    python examples/data_preprocess/countdown.py --local_save_dir ~/data/countdown

The first needs no network and knows a solution of each row (``extra_info.one_solution``). The second loads
``Jiayi-Pan/Countdown-Tasks-3to4`` (``target``, ``nums``) and keeps its last 1024 rows for the test.
"""

import random
from collections.abc import Iterator
from fractions import Fraction

from loading import Hub, load, make_parser, to_rows
from saving import row, save_splits

HUB = Hub("Jiayi-Pan/Countdown-Tasks-3to4", None, {"train": "train"}, ("target", "nums"))
OPERATORS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else None,
}


def to_row(example: dict, split: str, index: int) -> dict:
    numbers, target = [int(number) for number in example["nums"]], int(example["target"])
    prompt = (
        f"Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic "
        "operations (+, -, *, /) and each number can only be used once. Show your work in <think> </think> tags. And "
        "return the final answer in <answer> </answer> tags, for example <answer> (1 + 2) / 3 </answer>."
    )
    known = {"one_solution": example["solution"]} if "solution" in example else {}
    truth = {"target": target, "numbers": numbers}
    return row("countdown", prompt, truth, "math", split, index, **known)


def generate(count: int, order: random.Random) -> Iterator[dict]:
    """Tasks of three or four numbers up to 99 and a target up to 999, with a solution."""
    while count:
        numbers = [order.randint(1, 99) for _ in range(order.choice((3, 4)))]
        value, text = combined(numbers, order)
        if value is not None and value.denominator == 1 and 10 <= value <= 999 and int(value) not in numbers:
            yield {"nums": numbers, "target": int(value), "solution": text}
            count -= 1


def combined(numbers: list[int], order: random.Random) -> tuple[Fraction | None, str]:
    """The numbers joined by random operators in random order: value (None: a division by zero) and expression."""
    parts = [(Fraction(number), str(number)) for number in numbers]
    while len(parts) > 1:
        (a, one), (b, other) = (parts.pop(order.randrange(len(parts))) for _ in range(2))
        sign = order.choice(list(OPERATORS))
        value = OPERATORS[sign](a, b)
        if value is None:
            return None, ""
        parts.append((value, f"({one} {sign} {other})"))
    return parts[0]


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "~/data/countdown")
    parser.add_argument("--generate", action="store_true", help="make tasks here instead")
    parser.add_argument("--train_size", type=int, default=2000, help="with --generate: training tasks (default 2000)")
    parser.add_argument("--test_size", type=int, default=None, help="test tasks (default 200 generated, else 1024)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.generate:
        sizes = {"train": options.train_size, "test": options.test_size or 200}
        made = {name: generate(size, random.Random(f"{name} {options.seed}")) for name, size in sizes.items()}
        splits = {name: to_rows(examples, to_row, name, "generated") for name, examples in made.items()}
    else:
        [(_, origin, examples)] = load(HUB, options.local_dataset_path)
        examples = list(examples)
        test_size = min(options.test_size or 1024, len(examples) // 2)
        parts = {"train": examples[: len(examples) - test_size], "test": examples[len(examples) - test_size :]}
        splits = {name: to_rows(part, to_row, name, origin, HUB.columns) for name, part in parts.items()}
    save_splits(splits, options.local_save_dir, options.hdfs_dir)


if __name__ == "__main__":
    main()
