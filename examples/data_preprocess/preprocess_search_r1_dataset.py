"""Questions of Natural Questions and HotpotQA for a policy that searches (Jin et al. 2025, arXiv:2503.09516).

    python examples/data_preprocess/preprocess_search_r1_dataset.py --local_save_dir ~/data/search_r1

``data_source`` becomes ``searchR1_nq``, ``searchR1_hotpotqa``, ...; ``reward_model.ground_truth`` is
``{"target": [accepted answers]}``; the tool ``search`` is created with both.
"""

from loading import Hub, convert, make_parser

from verl.data.table import DataError

HUB = Hub("PeterJinGo/nq_hotpotqa_train", columns=("data_source", "question", "golden_answers"))
TOOL = "search"
SYSTEM = "You are a helpful assistant that looks things up before it answers."
INSTRUCTION = (
    "Answer the question below. Whenever you get new information, reason about it inside <think> and </think>. If you "
    "lack knowledge, call a search engine with <tool_call> query </tool_call>; what it finds comes back between "
    "<tool_response> and </tool_response>. Search as often as you like. When you need nothing more, give the answer "
    "inside <answer> and </answer>, short and without explanation, for example <answer> Beijing </answer>. Question: "
)


def to_row(example: dict, split: str, index: int) -> dict:
    question = example["question"].strip()
    question += "" if question.endswith("?") else "?"
    answers = example.get("golden_answers") or (example.get("reward_model") or {}).get("ground_truth", {}).get("target")
    if answers is None or not len(answers):
        raise DataError("golden_answers is empty")
    source, truth = f"searchR1_{example['data_source']}", {"target": list(answers)}
    create = {"ground_truth": truth, "question": question, "data_source": source}
    return {
        "data_source": source,
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": INSTRUCTION + question}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question,
            "need_tools_kwargs": True,
            "tools_kwargs": {TOOL: {"create_kwargs": create}},
        },
    }


def main(arguments: list[str] | None = None) -> None:
    convert(HUB, to_row, make_parser(__doc__, "~/data/search_r1").parse_args(arguments))


if __name__ == "__main__":
    main()
