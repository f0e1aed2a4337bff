"""The 17k problems of DAPO (Yu et al. 2025, arXiv:2503.14476; Apache-2.0), each once.

    python examples/data_preprocess/dapo17k.py --local_save_dir ~/data/dapo17k
    python examples/data_preprocess/dapo17k.py --with_tool --local_save_dir ~/data/dapo17k_tool

``BytedTsinghua-SIA/DAPO-Math-17k`` is in the standard format already and has every problem a hundred times; its answers
are integers, in a last line ``Answer: ...``. With ``--with_tool`` the policy may run Python in the tool
``code_interpreter`` (older name: dapo_multiturn_w_tool).
"""

from loading import Hub, convert, make_parser

HUB = Hub(
    "BytedTsinghua-SIA/DAPO-Math-17k",
    None,
    {"train": "train"},
    ("data_source", "prompt", "ability", "reward_model", "extra_info"),
)
TOOL = "code_interpreter"


class EachOnce:
    """Rows whose prompt was not seen yet, numbered again."""

    def __init__(self, with_tool: bool):
        self.with_tool = with_tool
        self.seen: set[str] = set()

    def __call__(self, example: dict, split: str, index: int) -> dict | None:
        text = example["prompt"][-1]["content"]
        if text in self.seen:
            return None
        self.seen.add(text)
        answer = example["reward_model"]["ground_truth"]
        info = {"split": split, "index": index, "id": str((example.get("extra_info") or {}).get("index", ""))}
        if self.with_tool:
            create = {"create_kwargs": {"ground_truth": answer}}
            info |= {"need_tools_kwargs": True, "tools_kwargs": {TOOL: create}}
        return {
            "data_source": "math_dapo",
            "prompt": [{"role": message["role"], "content": message["content"]} for message in example["prompt"]],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": info,
        }


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "~/data/dapo17k")
    parser.add_argument("--with_tool", action="store_true", help="let the policy run Python")
    options = parser.parse_args(arguments)
    convert(HUB, EachOnce(options.with_tool), options)


if __name__ == "__main__":
    main()
