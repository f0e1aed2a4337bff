"""Generators of prompts, under the name users import them by; see :mod:`verl.utils.dataset.dynamicgen_dataset`."""

from verl.utils.dataset.dynamicgen_dataset import AbstractDataGenerator, DynamicGenDataset

__all__ = ["AbstractDataGenerator", "DynamicGenDataset"]
