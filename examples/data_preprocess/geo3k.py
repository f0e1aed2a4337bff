"""Geometry3K (Lu et al. 2021, arXiv:2105.04165): problems with a figure, in the standard format with images.

    python examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
    python examples/data_preprocess/geo3k.py --with_tool --local_save_dir ~/data/geo3k_tool

The second lets the policy ask the tool ``calc_geo3k_reward`` whether its answer is right
(older name: geo3k_multiturn_w_tool).
"""

from loading import Hub, convert, make_parser
from saving import row

HUB = Hub("hiyouga/geometry3k", columns=("images", "problem", "answer"))
INSTRUCTION = (
    "First think about it inside <think> </think> tags, as you would to yourself, and then give the final answer in "
    "\\boxed{}."
)
TOOL = "calc_geo3k_reward"
TOOL_SYSTEM = (
    f"You are good at geometry. Think step by step before you call a tool, and call the tool `{TOOL}` with your result "
    "at least once before you answer."
)


def to_row(example: dict, split: str, index: int) -> dict:
    problem, answer = example["problem"], example["answer"]
    made = row(HUB.name, f"{problem} {INSTRUCTION}", answer, "math", split, index, answer=answer, question=problem)
    return {**made, "images": [as_stored(image) for image in example["images"]]}


def to_row_with_tool(example: dict, split: str, index: int) -> dict:
    made = to_row(example, split, index)
    made["prompt"] = [{"role": "system", "content": TOOL_SYSTEM}, *made["prompt"]]
    create = {"create_kwargs": {"ground_truth": example["answer"]}}
    made["extra_info"] |= {"need_tools_kwargs": True, "tools_kwargs": {TOOL: create}}
    return made


def as_stored(image: dict | bytes | str) -> dict:
    """An image as parquet files hold it."""
    if isinstance(image, dict):
        return {"bytes": image.get("bytes"), "path": image.get("path")}
    return {"bytes": image, "path": None} if isinstance(image, bytes) else {"bytes": None, "path": image}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "~/data/geo3k")
    parser.add_argument("--with_tool", action="store_true", help="let the policy check its answer with a tool")
    options = parser.parse_args(arguments)
    convert(HUB, to_row_with_tool if options.with_tool else to_row, options)


if __name__ == "__main__":
    main()
