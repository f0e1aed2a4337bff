"""Leaves of the tree: helpers with public addresses that import nothing of verl above this floor.

Only names that users import from ``verl.utils`` itself are offered here, and only when asked for, so that importing
a leaf does not import transformers.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.utils.tokenizer import hf_processor, hf_tokenizer

__all__ = ["hf_processor", "hf_tokenizer"]


def __getattr__(name: str):
    if name in __all__:
        from verl.utils import tokenizer

        return getattr(tokenizer, name)
    raise AttributeError(f"module 'verl.utils' has no attribute {name!r}; it offers {', '.join(__all__)}")
