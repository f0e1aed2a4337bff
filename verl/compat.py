"""Addresses of verl that are no files here: what is found at them, or which feature they belong to that is not built.

``import verl`` puts a finder behind Python's own, which is asked for modules ``verl.*`` and ``recipe.*`` that no file
holds. A table here names other addresses of modules that exist; ``config/features.py`` knows the features of those that
do not. Nothing is imported for that but the module that was asked for.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class NotBuilt(ModuleNotFoundError, NotImplementedError):
    """A name of verl was imported whose feature this release does not have; says which, and what to use."""


ADDRESSES: dict[str, str] = {
    "verl.experimental.agent_loop": "verl.agent_loop",
    "verl.experimental.agent_loop.agent_loop": "verl.agent_loop",
    "verl.experimental.agent_loop.single_turn_agent_loop": "verl.agent_loop",
    "verl.experimental.dataset.sampler": "verl.utils.dataset.sampler",
    "verl.experimental.dynamic_dataset.dynamicgen_dataset": "verl.utils.dataset.dynamicgen_dataset",
    "verl.models.transformers.qwen2_vl": "verl.models.multimodal",
    "verl.single_controller.ray.megatron": "verl.single_controller.ray.base",
    "verl.trainer.constants_ppo": "verl.trainer.ppo.utils",
    "verl.utils.dataset.dynamicgen_sampler": "verl.utils.dataset.sampler",
    "verl.utils.debug": "verl.utils.profiler",
    "verl.utils.debug.performance": "verl.utils.profiler",
    "verl.utils.profiler.config": "verl.utils.profiler",
    "verl.utils.profiler.performance": "verl.utils.profiler",
    "verl.utils.profiler.profile": "verl.utils.profiler",
    "verl.utils.reward_score.math_reward": "verl.utils.reward_score.math",
    "verl.utils.reward_score.prime_code.testing_util": "verl.utils.reward_score.prime_code",
    "verl.utils.rollout_skip": "verl.trainer.ppo.rollout_skip",
    "verl.workers.engine_workers": "verl.workers.fsdp_workers",
    "verl.workers.megatron_workers": "verl.workers.fsdp_workers",
    "verl.workers.rollout.replica": "verl.workers.rollout.base",
}
"""Address in one of verl's releases -> module whose names stand there."""

_SFT, _RM = "verl.utils.dataset.sft_dataset", "verl.utils.dataset.rm_dataset"
NAMES_NOT_BUILT: dict[str, dict[str, str]] = {
    "verl.utils.dataset": {"SFTDataset": _SFT, "MultiTurnSFTDataset": _SFT, "RMDataset": _RM},
    "verl.workers.config": {
        **dict.fromkeys(
            ("McoreActorConfig", "McoreCriticConfig", "McoreEngineConfig", "McoreOptimizerConfig"), "verl.models.mcore"
        ),
        "McoreRewardModelConfig": "verl.models.mcore",
        "VeOmniEngineConfig": "verl.workers.engine.veomni",
        "TorchtitanEngineConfig": "verl.workers.engine.torchtitan",
    },
}
"""Module that exists -> its names that do not, each with a module of the same feature."""


def not_built(name: str) -> NotBuilt | None:
    """The error for a module or ``module.name`` that belongs to a feature not built; None if it belongs to none."""
    from verl.config import features

    module, _, last = name.rpartition(".")
    feature = features.feature_of_module(NAMES_NOT_BUILT.get(module, {}).get(last, name))
    # Without its ``name``: Python would take a ModuleNotFoundError of that name for "no such name in the package".
    return None if feature is None else NotBuilt(features.not_built(name, feature))


def missing(module: str, name: str, offered: Any = ()) -> Exception:
    """What the ``__getattr__`` of ``module`` raises for a name it does not have."""
    offers = f"; it offers {', '.join(offered)}" if offered else ""
    return not_built(f"{module}.{name}") or AttributeError(f"module {module!r} has no attribute {name!r}{offers}")


class Finder:
    """Python's import asks here after its own finders: for addresses in the table, and for what is not built."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(("verl.", "recipe.")):
            return None
        if name in ADDRESSES or any(address.startswith(f"{name}.") for address in ADDRESSES):
            return ModuleSpec(name, Finder, origin=ADDRESSES.get(name), is_package=True)
        if error := not_built(name):
            raise error
        return None

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Let every name of the module be that of the module it stands for."""
        if (source := ADDRESSES.get(module.__name__)) is None:
            module.__doc__ = "Public addresses of modules that stand elsewhere: verl/compat.py."
            return
        stands_for = importlib.import_module(source)
        module.__doc__ = stands_for.__doc__
        module.__all__ = getattr(stands_for, "__all__", [name for name in vars(stands_for) if name[0] != "_"])
        module.__getattr__ = lambda name: getattr(stands_for, name)
        module.__dir__ = lambda: dir(stands_for)


def install() -> None:
    """Have Python ask the finder last. Called by ``import verl``."""
    if Finder not in sys.meta_path:
        sys.meta_path.append(Finder)
