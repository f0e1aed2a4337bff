"""Conversations of several turns in the column ``messages``, some of them with a tool: the form of multi-turn
fine-tuning, small and generated, to try things with.

    python examples/data_preprocess/multiturn.py --local_save_dir ~/data/multiturn

A row has ``messages``, a list of ``{role, content, tool_calls, tool_call_id}``, and ``tools``, the schemas in JSON of
the tools that the conversation may call; null where there are none.
"""

import argparse
import json
import random

from saving import add_output_options, save_splits

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def message(role: str, content: str | None, tool_calls: str | None = None, tool_call_id: str | None = None) -> dict:
    """All messages have the same fields, as a parquet column wants it; ``tool_calls`` is JSON."""
    return {"role": role, "content": content, "tool_calls": tool_calls, "tool_call_id": tool_call_id}


def plain(order: random.Random) -> dict:
    """Two sums, the second of which goes on from the first."""
    a, b, c = (order.randint(1, 9) for _ in range(3))
    messages = [
        message("system", "You are a helpful assistant."),
        message("user", f"What is {a} + {b}?"),
        message("assistant", f"{a} + {b} = {a + b}."),
        message("user", f"And {c} more?"),
        message("assistant", f"That makes {a + b + c}."),
    ]
    return {"messages": messages, "tools": None}


def with_tool(order: random.Random) -> dict:
    """One sum, which a tool computes."""
    a, b = order.randint(100, 999), order.randint(100, 999)
    call = [{"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}]
    messages = [
        message("user", f"What is {a} + {b}?"),
        message("assistant", None, json.dumps(call)),
        message("tool", str(a + b), tool_call_id="call_0"),
        message("assistant", f"{a} + {b} = {a + b}."),
    ]
    return {"messages": messages, "tools": json.dumps([ADD])}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train_size", type=int, default=64, help="training conversations (default 64)")
    parser.add_argument("--test_size", type=int, default=8, help="test conversations (default 8)")
    parser.add_argument("--seed", type=int, default=0)
    add_output_options(parser, "~/data/multiturn")
    options = parser.parse_args(arguments)
    splits = {}
    for split, size in (("train", options.train_size), ("test", options.test_size)):
        order = random.Random(f"{split} {options.seed}")
        splits[split] = [(plain, with_tool)[number % 2](order) for number in range(size)]
    save_splits(splits, options.local_save_dir, options.hdfs_dir)


if __name__ == "__main__":
    main()
