"""verl: reinforcement learning for large language models, one driver and colocated workers.

Importing this package costs nothing: torch, ray and transformers are imported when something that needs them is used.
"""

import os
import sys
from typing import TYPE_CHECKING

from verl import compat
from verl.utils.distribution import warn_of_other_distribution
from verl.version import __version__

# torch.cuda.is_available() starts the CUDA driver, which does not survive a fork, unless told to ask NVML instead
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
warn_of_other_distribution()

if TYPE_CHECKING:
    from verl.protocol import DataProto


class _ModulesNotBuilt:
    """Asked last, for modules nobody has found: names the feature of those that verl's releases have."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> None:
        if name.startswith(("verl.", "recipe.")):
            from verl.config.features import feature_of_module, not_built

            feature = feature_of_module(name)
            if feature is not None:
                raise ModuleNotFoundError(not_built(name, feature), name=name)


if not any(finder.__name__ == "_ModulesNotBuilt" for finder in sys.meta_path if isinstance(finder, type)):
    sys.meta_path.append(_ModulesNotBuilt)

__all__ = ["DataProto", "__version__"]

compat.install()


def __getattr__(name: str):
    if name == "DataProto":
        from verl.protocol import DataProto

        return DataProto
    raise compat.missing(__name__, name, __all__)
