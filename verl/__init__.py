"""verl: reinforcement learning for large language models, one driver and colocated workers.

Importing this package costs nothing: torch, ray and transformers are imported when something that needs them is used.
"""

from typing import TYPE_CHECKING

from verl.version import __version__

if TYPE_CHECKING:
    from verl.protocol import DataProto

__all__ = ["DataProto", "__version__"]


def __getattr__(name: str):
    if name == "DataProto":
        from verl.protocol import DataProto

        return DataProto
    raise AttributeError(f"module 'verl' has no attribute {name!r}; it offers {', '.join(__all__)}")
