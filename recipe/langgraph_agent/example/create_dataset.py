"""Write train.parquet and test.parquet with expressions for the agent of math_expression.py.

python recipe/langgraph_agent/example/create_dataset.py --folder data/math_expression
"""

import argparse
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "@": lambda a, b: 3 * a - 2 * b,
}


def expression(generator: random.Random, depth: int) -> tuple[str, int]:
    """Return a fully bracketed expression and its value."""
    if depth == 0:
        number = generator.randint(1, 9)
        return str(number), number
    (left, a), (right, b) = (expression(generator, generator.randrange(depth)) for _ in range(2))
    operand = generator.choice(list(OPERATIONS))
    return f"({left} {operand} {right})", OPERATIONS[operand](a, b)


def rows(count: int, seed: int) -> list[dict]:
    """Return rows in the standard columns; the answer is expected behind ``####``, as of GSM8K."""
    generator = random.Random(seed)
    found = []
    for index in range(count):
        text, value = expression(generator, generator.randint(1, 3))
        question = f"Calculate {text}, where a @ b = 3a - 2b. Use the tool, and end with #### and the number."
        found.append(
            {
                "data_source": "openai/gsm8k",
                "agent_name": "math_expression",
                "prompt": [{"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(value)},
                "extra_info": {"index": index, "expression": text},
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("data/math_expression"))
    parser.add_argument("--train", type=int, default=5000)
    parser.add_argument("--test", type=int, default=500)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", arguments.train, 0), ("test", arguments.test, 1)):
        pq.write_table(pa.Table.from_pylist(rows(count, seed)), arguments.folder / f"{name}.parquet")


if __name__ == "__main__":
    main()
