"""Addresses of verl that are no files here: what is found at them, or which feature they belong to that is not built.

``import verl`` puts a finder behind Python's own; it comes here only for a module ``verl.*`` that no file holds. One
table names other addresses of modules that exist, the other the features of those that do not. Nothing is imported for
that but the module that was asked for.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple


class NotBuilt(ModuleNotFoundError, NotImplementedError):
    """A name of verl was imported whose feature this release does not have; says which, and what to use."""


class Feature(NamedTuple):
    """Something verl has and this release has not."""

    name: str
    """Noun phrase; fits behind "asks for"."""
    instead: str
    """What to do instead: whole sentences."""


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

_LOOPS = "Write an agent loop that does it between two calls of server_manager.generate (docs/async.md)."
_MEGATRON = Feature("training with Megatron-LM", "Train with actor.strategy=fsdp2 or deepspeed (docs/moving.md).")
_PATCHES = Feature(
    "patches of transformers models by hand",
    "actor.use_remove_padding and ulysses_sequence_parallel_size do what they did; the engine sees to the model.",
)
_SFT = Feature(
    "supervised fine-tuning",
    "Fine-tune with another program and give its folder as actor_rollout_ref.model.path.",
)
_TOOLS = Feature("tools that a multi-turn rollout calls", _LOOPS)
_ENGINE = Feature(
    "the classes by which verl holds its rollout engines",
    "Choose the engine with actor_rollout_ref.rollout.name=vllm, sglang or hf; "
    "verl.workers.rollout.get_rollout_class gives its class.",
)
_SWITCHING = Feature(
    "sharding managers",
    "The workers switch between training and rollout themselves; "
    "a worker of your own inherits from verl.workers.fsdp_workers.ActorRolloutRefWorker.",
)
_UPDATE = Feature(
    "the classes DataParallelPPOActor and DataParallelPPOCritic",
    "Their work is done by the engine and the loss: register a loss with register_policy_loss, or override the verbs "
    "of verl.workers.fsdp_workers.ActorRolloutRefWorker (docs/extend.md).",
)

NOT_BUILT: dict[str, Feature] = {
    "verl.checkpoint_engine": Feature("engines that carry weights between clusters", "See docs/disjoint.md."),
    "verl.experimental.agent_loop.tool_agent_loop": Feature("the agent loop that calls tools (ToolAgentLoop)", _LOOPS),
    "verl.experimental.agent_loop.tool_parser": Feature("parsers of tool calls (ToolParser)", _LOOPS),
    "verl.experimental.fully_async_policy": Feature(
        "fully asynchronous training", "Use rollout.async_ratio (docs/disjoint.md), one step ahead."
    ),
    "verl.experimental.one_step_off_policy": Feature(
        "the recipe one_step_off_policy", "Use actor_rollout_ref.rollout.async_ratio (docs/disjoint.md)."
    ),
    "verl.experimental.reward_loop": Feature(
        "the reward loop", "Use a reward manager or an async reward function (docs/reward_function.md)."
    ),
    "verl.experimental.transfer_queue": Feature("the transfer queue", "None is needed: batches go by shared memory."),
    "verl.interactions": Feature("interactions, simulated users of a multi-turn rollout", _LOOPS),
    "verl.models.llama": _MEGATRON,
    "verl.models.mcore": _MEGATRON,
    "verl.models.qwen2": _MEGATRON,
    "verl.models.registry": _MEGATRON,
    "verl.models.weight_loader_registry": _MEGATRON,
    "verl.models.transformers": _PATCHES,
    "verl.third_party": Feature(
        "verl's own copies of engine internals", "Import vllm, sglang or torch themselves, at your own risk."
    ),
    "verl.tools": _TOOLS,
    "verl.trainer.fsdp_sft_trainer": _SFT,
    "verl.trainer.sft_trainer": _SFT,
    "verl.trainer.sft_trainer_ray": _SFT,
    "verl.trainer.main_eval": Feature(
        "offline evaluation of files", "Run main_ppo with trainer.val_only=true and the file as data.val_files."
    ),
    "verl.trainer.main_generation": Feature(
        "offline generation to files",
        "Run main_ppo with trainer.val_only=true and trainer.validation_data_dir, which gets every response.",
    ),
    "verl.trainer.main_generation_server": Feature(
        "offline generation to files",
        "Run main_ppo with trainer.val_only=true and trainer.validation_data_dir, which gets every response.",
    ),
    "verl.utils.dataset.multiturn_sft_dataset": _SFT,
    "verl.utils.dataset.rm_dataset": Feature("training of reward models", "Train one with another program."),
    "verl.utils.dataset.sft_dataset": _SFT,
    "verl.utils.kernel": Feature(
        "verl's Triton kernels", "Set actor_rollout_ref.model.use_fused_kernels=true for log-probs without logits."
    ),
    "verl.utils.megatron": _MEGATRON,
    "verl.utils.megatron_utils": _MEGATRON,
    "verl.utils.megatron_peft_utils": _MEGATRON,
    "verl.utils.checkpoint.megatron_checkpoint_manager": _MEGATRON,
    "verl.utils.npu_patch": Feature("Ascend devices", "Use a CUDA device or trainer.device=cpu."),
    "verl.utils.qat": Feature("quantization-aware training", "Train in bfloat16."),
    "verl.utils.vllm": _ENGINE,
    "verl.utils.vllm_utils": _ENGINE,
    "verl.workers.actor": _UPDATE,
    "verl.workers.critic": _UPDATE,
    "verl.workers.reward_manager.remote": Feature(
        "reward managers in actors of their own", "Reward functions run in processes anyway (docs/reward_function.md)."
    ),
    "verl.workers.rollout.async_server": Feature(
        "the first form of the rollout servers (chat_scheduler)", "Use verl.agent_loop (docs/async.md)."
    ),
    "verl.workers.rollout.chat_scheduler": Feature("chat schedulers", _LOOPS),
    "verl.workers.rollout.hf_rollout": _ENGINE,
    "verl.workers.rollout.naive": _ENGINE,
    "verl.workers.rollout.schemas": Feature("multi-turn rollouts inside the SGLang engine", _LOOPS),
    "verl.workers.rollout.sglang_rollout": _ENGINE,
    "verl.workers.rollout.vllm_rollout": _ENGINE,
    "verl.workers.sharding_manager": _SWITCHING,
}
"""Address, with all below it -> the feature it belongs to."""

NAMES_NOT_BUILT: dict[str, dict[str, Feature]] = {
    "verl.utils.dataset": dict.fromkeys(("SFTDataset", "MultiTurnSFTDataset", "RMDataset"), _SFT),
    "verl.workers.config": {
        **dict.fromkeys(
            ("McoreActorConfig", "McoreCriticConfig", "McoreEngineConfig", "McoreOptimizerConfig"), _MEGATRON
        ),
        **dict.fromkeys(("McoreRewardModelConfig", "VeOmniEngineConfig", "TorchtitanEngineConfig"), _MEGATRON),
    },
}
"""Module that exists -> its names that do not."""


def feature_of_module(name: str) -> Feature | None:
    """The feature of a module of verl's, ``verl.tools.base_tool`` for example, that does not exist here."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 1, -1))
    return next((NOT_BUILT[prefix] for prefix in prefixes if prefix in NOT_BUILT), None)


def not_built(name: str) -> NotBuilt | None:
    """The error for a module or ``module.name`` that belongs to a feature not built; None if it belongs to none."""
    module, _, last = name.rpartition(".")
    feature = NAMES_NOT_BUILT.get(module, {}).get(last) or feature_of_module(name)
    if feature is None:
        return None
    # Without its ``name``: Python would take a ModuleNotFoundError of that name for "no such name in the package".
    return NotBuilt(f"{name} asks for {feature.name}: that is not built. {feature.instead}")


def missing(module: str, name: str, offered: Any = ()) -> Exception:
    """What the ``__getattr__`` of ``module`` raises for a name it does not have."""
    offers = f"; it offers {', '.join(offered)}" if offered else ""
    return not_built(f"{module}.{name}") or AttributeError(f"module {module!r} has no attribute {name!r}{offers}")


class Finder:
    """Python's import asks here after its own finders: for addresses in the table, and for what is not built."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith("verl."):
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
