"""GSM8K with a tool that says whether an answer is right: ``calc_gsm8k_reward``, made with each row's ground truth.

    python examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_save_dir ~/data/gsm8k_tool

``extra_info.tools_kwargs`` holds what the tool is created with. ``--agent_name tool_agent`` adds the column that
chooses an agent loop for the row (older scripts: gsm8k_tool_agent_loop). Sources and options else as gsm8k.py.
"""

from gsm8k import HUB, dialogue_row
from loading import convert, make_parser

TOOL = "calc_gsm8k_reward"
SYSTEM = (
    f"You are good at mathematics. Solve the question step by step before you call a tool. Call the tool `{TOOL}` with "
    "your result at least once before you answer, and correct yourself where it helps. Write the final answer as "
    "`#### <answer>`."
)


def to_row(example: dict, split: str, index: int) -> dict:
    def kwargs_of(asked: str, answer: str) -> dict:
        return {
            "need_tools_kwargs": True,
            "tools_kwargs": {TOOL: {"create_kwargs": {"ground_truth": answer}}},
            "interaction_kwargs": {"query": asked, "ground_truth": answer},
        }

    return dialogue_row(example, split, index, SYSTEM, kwargs_of)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "~/data/gsm8k_tool")
    parser.add_argument("--agent_name", default=None, help="agent loop of every row, as column agent_name")
    options = parser.parse_args(arguments)
    named = {"agent_name": options.agent_name} if options.agent_name else {}
    convert(HUB, lambda example, split, index: {**named, **to_row(example, split, index)}, options)


if __name__ == "__main__":
    main()
