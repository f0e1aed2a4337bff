"""Preferences between answers to instructions (Cui et al. 2023, arXiv:2310.01377; MIT licence).

    python examples/data_preprocess/ultrafeedback.py --local_save_dir ~/data/ultrafeedback

Columns for ``verl dpo`` and ``verl rm``: ``prompt``, ``chosen`` and ``rejected``, which are whole conversations, and
``margin``, the difference of their scores, which are 1 to 10. Pairs of equal texts are left out.
"""

from loading import Hub, convert, make_parser

HUB = Hub(
    "HuggingFaceH4/ultrafeedback_binarized",
    splits={"train": "train_prefs", "test": "test_prefs"},
    columns=("prompt", "chosen", "rejected", "score_chosen", "score_rejected"),
)


def to_pair(example: dict, split: str, index: int) -> dict | None:
    if example["chosen"] == example["rejected"]:
        return None
    made = {name: example[name] for name in ("prompt", "chosen", "rejected")}
    return {**made, "margin": float(example["score_chosen"]) - float(example["score_rejected"])}


def main(arguments: list[str] | None = None) -> None:
    convert(HUB, to_pair, make_parser(__doc__, "~/data/ultrafeedback").parse_args(arguments))


if __name__ == "__main__":
    main()
