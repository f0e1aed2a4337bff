"""IFEval, instructions whose keeping can be verified (Zhou et al. 2023, arXiv:2311.07911; Apache-2.0).

    python examples/data_preprocess/ifeval.py --local_save_dir ~/data/ifeval

There is only ``test.parquet``. ``reward_model.ground_truth`` is JSON: ``{"instruction_id_list": [...], "kwargs":
[{...}, ...]}``, without the arguments that are null.
"""

import json

from loading import Hub, convert, make_parser
from saving import row

from verl.data.table import DataError

HUB = Hub("google/IFEval", None, {"test": "train"}, ("key", "prompt", "instruction_id_list", "kwargs"))


def to_row(example: dict, split: str, index: int) -> dict:
    names = list(example["instruction_id_list"])
    kwargs = [
        {name: value for name, value in (given or {}).items() if value is not None} for given in example["kwargs"]
    ]
    if len(names) != len(kwargs):
        raise DataError(f"instruction_id_list has {len(names)} items and kwargs {len(kwargs)}")
    truth = json.dumps({"instruction_id_list": names, "kwargs": kwargs})
    return row(HUB.name, example["prompt"], truth, "instruction_following", split, index, key=example["key"])


def main(arguments: list[str] | None = None) -> None:
    convert(HUB, to_row, make_parser(__doc__, "~/data/ifeval").parse_args(arguments))


if __name__ == "__main__":
    main()
