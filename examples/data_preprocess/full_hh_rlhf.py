"""Dialogues about being helpful and harmless (Bai et al. 2022, arXiv:2204.05862; MIT licence).

    python examples/data_preprocess/full_hh_rlhf.py --split rl --local_save_dir ~/data/full_hh_rlhf

| --split | columns | for |
|---|---|---|
| rl  | the standard format; ``reward_model.style`` is ``model``: a reward model scores | ``main_ppo`` |
| sft | ``prompt``, ``response`` | supervised fine-tuning |
| rm  | ``prompt``, ``chosen``, ``rejected`` | training a reward model |

Files lie in a folder of that name, ``rl/train.parquet`` for example.
"""

import os

from loading import Hub, convert, make_parser
from saving import row

HUB = Hub("Dahoas/full-hh-rlhf", columns=("prompt", "response", "chosen", "rejected"))


def to_rl(example: dict, split: str, index: int) -> dict:
    made = row(HUB.name, example["prompt"], example["chosen"], "alignment", split, index)
    made["reward_model"]["style"] = "model"
    return made


def to_sft(example: dict, split: str, index: int) -> dict:
    return {"prompt": example["prompt"], "response": example["response"]}


def to_rm(example: dict, split: str, index: int) -> dict:
    return {name: example[name] for name in ("prompt", "chosen", "rejected")}


KINDS = {"rl": to_rl, "sft": to_sft, "rm": to_rm}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, "~/data/full_hh_rlhf")
    parser.add_argument("--split", choices=list(KINDS), default="rl", help="what the rows are for (default rl)")
    options = parser.parse_args(arguments)
    options.local_save_dir = os.path.join(options.local_save_dir, options.split)
    convert(HUB, KINDS[options.split], options)


if __name__ == "__main__":
    main()
