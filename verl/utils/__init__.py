"""Leaves of the tree: helpers with public addresses that import nothing of verl above this floor.

Only names that users import from ``verl.utils`` itself are offered here, and only when asked for, so that importing
a leaf does not import transformers.
"""

import importlib
from typing import TYPE_CHECKING

from verl.compat import missing

if TYPE_CHECKING:
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.tokenizer import hf_processor, hf_tokenizer

__all__ = ["hf_processor", "hf_tokenizer", "omega_conf_to_dataclass"]


def __getattr__(name: str):
    if name in __all__:
        module = "verl.utils.config" if name == "omega_conf_to_dataclass" else "verl.utils.tokenizer"
        return getattr(importlib.import_module(module), name)
    raise missing(__name__, name, __all__)
