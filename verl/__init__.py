"""verl: reinforcement learning for large language models, one driver and colocated workers.

Importing this package costs nothing: torch, ray and transformers are imported when something that needs them is used.
"""

import os
from typing import TYPE_CHECKING

from verl import compat
from verl.utils.distribution import warn_of_other_distribution
from verl.version import __version__

# torch.cuda.is_available() starts the CUDA driver, which does not survive a fork, unless told to ask NVML instead
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
warn_of_other_distribution()

if TYPE_CHECKING:
    from verl.api import Trainer, make_config
    from verl.protocol import DataProto

__all__ = ["DataProto", "Trainer", "__version__", "make_config"]

compat.install()


def __getattr__(name: str):
    if name == "DataProto":
        from verl.protocol import DataProto

        return DataProto
    if name in ("Trainer", "make_config"):
        from verl import api

        return getattr(api, name)
    raise compat.missing(__name__, name, __all__)
