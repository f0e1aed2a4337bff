"""Datasets of prompts and the loaders over them. Imported lazily, because they import torch."""

from typing import TYPE_CHECKING

from verl.compat import missing

if TYPE_CHECKING:
    from verl.data.rl_dataset import RLHFDataset, collate_fn

__all__ = ["RLHFDataset", "collate_fn"]


def __getattr__(name: str):
    if name in __all__:
        from verl.data import rl_dataset

        return getattr(rl_dataset, name)
    raise missing(__name__, name, __all__)
