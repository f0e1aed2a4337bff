"""Rollout engines by name. Importing this package loads no engine."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.workers.rollout.base import ModelRollout

_ENGINES = {
    "hf": "verl.workers.rollout.hf.rollout:HFRollout",
    "sglang": "verl.workers.rollout.sglang.rollout:SGLangRollout",
    "vllm": "verl.workers.rollout.vllm.rollout:VLLMRollout",
}
_CLASSIFIERS = {
    "sglang": "verl.workers.rollout.sglang.classifier:SGLangClassifier",
    "vllm": "verl.workers.rollout.vllm.classifier:VLLMClassifier",
}
_PACKAGES = {"sglang": "sglang", "vllm": "vllm"}


def get_rollout_class(name: str, classifies: bool = False) -> type[ModelRollout]:
    """The engine that ``rollout.name`` asks for; its module is imported here and nowhere else.

    Args:
        classifies: for a sequence classifier instead of a language model.

    Raises:
        ValueError: unknown name.
        ImportError: the engine's package is not installed; says how to.
    """
    if name not in _ENGINES:
        raise ValueError(f"actor_rollout_ref.rollout.name={name!r} is unknown. Known: {', '.join(sorted(_ENGINES))}.")
    if name in _PACKAGES and importlib.util.find_spec(_PACKAGES[name]) is None:
        raise ImportError(
            f"actor_rollout_ref.rollout.name={name} needs {_PACKAGES[name]}, which is not installed. "
            f"Run: bash scripts/install_engines.sh {name}, or set actor_rollout_ref.rollout.name=hf, which needs "
            "transformers only."
        )
    if classifies and name not in _CLASSIFIERS:
        raise ValueError(
            f"reward_model.rollout.name={name} runs no classifier (reward_model.enable=true). Choose "
            f"{' or '.join(_CLASSIFIERS)}, or leave reward_model.rollout out: the training engine scores with it."
        )
    module, _, attribute = (_CLASSIFIERS if classifies else _ENGINES)[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
