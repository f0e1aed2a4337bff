"""Datasets of prompts and examples, and the loaders over them. Imported lazily, because they import torch."""

from typing import TYPE_CHECKING

from verl.compat import missing

if TYPE_CHECKING:
    from verl.data.rl_dataset import RLHFDataset, collate_fn
    from verl.data.sft_dataset import MultiTurnSFTDataset, SFTDataset

__all__ = ["MultiTurnSFTDataset", "RLHFDataset", "SFTDataset", "collate_fn"]


def __getattr__(name: str):
    if name in __all__:
        from verl.data import rl_dataset, sft_dataset

        return getattr(sft_dataset if "SFT" in name else rl_dataset, name)
    raise missing(__name__, name, __all__)
