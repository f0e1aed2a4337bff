"""Addresses of verl that are no files here: what is found at them, or which feature they belong to that is not built.

``import verl`` puts a finder behind Python's own, which is asked for modules ``verl.*`` and ``recipe.*`` that no file
holds. A table here names other addresses of modules that exist; ``config/features.py`` knows the features of those that
do not. Nothing is imported for that but the module that was asked for.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class NotBuilt(ModuleNotFoundError, NotImplementedError):
    """A name of verl was imported whose feature this release does not have; says which, and what to use."""


ADDRESSES: dict[str, str] = {
    "verl.agent_loop": "verl.agents",
    "verl.base_config": "verl.config",
    "verl.experimental.agent_loop": "verl.agents",
    "verl.experimental.agent_loop.agent_loop": "verl.agents",
    "verl.experimental.agent_loop.single_turn_agent_loop": "verl.agents",
    "verl.experimental.agent_loop.tool_agent_loop": "verl.agents.tool_agent",
    "verl.experimental.agent_loop.tool_parser": "verl.agents.tool_parser",
    "verl.experimental.dataset.sampler": "verl.data.loader",
    "verl.experimental.dynamic_dataset.dynamicgen_dataset": "verl.data.dynamicgen_dataset",
    "verl.models.transformers.qwen2_vl": "verl.models.multimodal",
    "verl.single_controller.ray.megatron": "verl.single_controller.ray.base",
    "verl.trainer.constants_ppo": "verl.trainer.ppo.placement",
    "verl.trainer.ppo.one_step_off": "verl.trainer.ppo.ray_trainer",
    "verl.trainer.ppo.reward": "verl.rewards.managers.scoring",
    "verl.trainer.ppo.utils": "verl.trainer.ppo.placement",
    "verl.utils.activation_offload": "verl.models.activation_memory",
    "verl.utils.checkpoint": "verl.checkpoint",
    "verl.utils.checkpoint.checkpoint_manager": "verl.checkpoint.checkpoint_manager",
    "verl.utils.checkpoint.fsdp_checkpoint_manager": "verl.checkpoint.fsdp_checkpoint_manager",
    "verl.utils.dataset": "verl.data",
    "verl.utils.dataset.dynamicgen_dataset": "verl.data.dynamicgen_dataset",
    "verl.utils.dataset.dynamicgen_sampler": "verl.data.loader",
    "verl.utils.dataset.rl_dataset": "verl.data.rl_dataset",
    "verl.utils.dataset.multiturn_sft_dataset": "verl.data.sft_dataset",
    "verl.utils.dataset.sampler": "verl.data.loader",
    "verl.utils.dataset.sft_dataset": "verl.data.sft_dataset",
    "verl.utils.dataset.vision_utils": "verl.data.vision",
    "verl.utils.debug": "verl.telemetry.profiler",
    "verl.utils.debug.performance": "verl.telemetry.profiler",
    "verl.utils.flops_counter": "verl.telemetry.metric",
    "verl.utils.hdfs_io": "verl.utils.fs",
    "verl.utils.logging_utils": "verl.utils.process",
    "verl.utils.metric": "verl.telemetry.metric",
    "verl.utils.profiler": "verl.telemetry.profiler",
    "verl.utils.profiler.config": "verl.telemetry.profiler",
    "verl.utils.profiler.performance": "verl.telemetry.profiler",
    "verl.utils.profiler.profile": "verl.telemetry.profiler",
    "verl.utils.reward_score": "verl.rewards.scorers",
    "verl.utils.reward_score.math_reward": "verl.rewards.scorers.math",
    "verl.utils.reward_score.prime_code.testing_util": "verl.rewards.scorers.prime_code",
    "verl.utils.rollout_skip": "verl.trainer.buffer.rollout_skip",
    "verl.utils.rollout_trace": "verl.telemetry.rollout_trace",
    "verl.utils.seqlen_balancing": "verl.batch.balancing",
    "verl.utils.torch_dtypes": "verl.utils.torch_functional",
    "verl.utils.tracking": "verl.telemetry.tracking",
    "verl.utils.ulysses": "verl.models.attention.sequence_parallel",
    "verl.workers.config": "verl.config",
    "verl.workers.engine_workers": "verl.workers.fsdp_workers",
    "verl.workers.megatron_workers": "verl.workers.fsdp_workers",
    "verl.workers.reward_manager": "verl.rewards.managers",
    "verl.workers.reward_manager.abstract": "verl.rewards.managers.rule",
    "verl.workers.reward_manager.batch": "verl.rewards.managers.built_in",
    "verl.workers.reward_manager.dapo": "verl.rewards.managers.built_in",
    "verl.workers.reward_manager.naive": "verl.rewards.managers.built_in",
    "verl.workers.reward_manager.prime": "verl.rewards.managers.built_in",
    "verl.workers.reward_manager.registry": "verl.rewards.managers.rule",
    "verl.workers.rollout.replica": "verl.workers.rollout.base",
}
"""Address in one of verl's releases -> module whose names stand there."""

FOLDERS: dict[str, str] = {
    "verl.utils.reward_score.": "verl.rewards.scorers.",
    "verl.workers.reward_manager.": "verl.rewards.managers.",
}
"""The same for all modules of a folder that keep their last name."""

_RM = "verl.utils.dataset.rm_dataset"
_TOOL_LOOP = "verl.experimental.agent_loop.tool_agent_loop"
NAMES_NOT_BUILT: dict[str, dict[str, str]] = {
    "verl.agents.tool_agent": {name: f"{_TOOL_LOOP}.{name}" for name in ("AgentData", "AgentState")},
    "verl.data": {"RMDataset": _RM},
    "verl.config": {
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
    """Return the error that the ``__getattr__`` of ``module`` raises for a name it does not have."""
    offers = f"; it offers {', '.join(offered)}" if offered else ""
    return not_built(f"{module}.{name}") or AttributeError(f"module {module!r} has no attribute {name!r}{offers}")


def address(name: str) -> str | None:
    """The module that stands at an address of another name; None for an address that is not known."""
    if name in ADDRESSES:
        return ADDRESSES[name]
    for folder, now in FOLDERS.items():
        last = name.removeprefix(folder)
        if name.startswith(folder) and "." not in last and find_spec(now + last) is not None:
            return now + last
    return None


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """First finder of Python's import, for addresses in the tables: what stands there has a ``__path__`` of its own, by
    which Python would load its modules a second time.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        source = address(name) if name.startswith("verl.") else None
        return None if source is None else ModuleSpec(name, self, origin=source, is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module that the address stands for in place of this one, so that both names are one module; one with
        addresses below it stays, and has the other's names.
        """
        name = module.__name__
        if (source := address(name)) is None:
            module.__doc__ = "Public addresses of modules that stand elsewhere: verl/compat.py."
            return
        stands_for = importlib.import_module(source)
        if not any(known.startswith(f"{name}.") for known in (*ADDRESSES, *FOLDERS)):
            # importlib takes what stands in sys.modules after the module was run, so both names are one module
            sys.modules[name] = stands_for
            return
        vars(module).update(
            __doc__=stands_for.__doc__,
            __all__=getattr(stands_for, "__all__", [name for name in vars(stands_for) if name[0] != "_"]),
            __getattr__=lambda name: getattr(stands_for, name),
            __dir__=lambda: dir(stands_for),
        )


class LastFinder(importlib.abc.MetaPathFinder):
    """Last finder of Python's import, for names without a file: a folder of addresses, or a feature not built."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(("verl.", "recipe.")):
            return None
        if any(known.startswith(f"{name}.") for known in ADDRESSES):
            return ModuleSpec(name, Finder(), is_package=True)
        if error := not_built(name):
            raise error
        return None


def install() -> None:
    """Have Python ask both finders. Called by ``import verl``."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        # first, for a package at an address would be searched by Python's own finder; last, for names nobody else knows
        sys.meta_path.insert(0, Finder())
        sys.meta_path.append(LastFinder())
