"""Rollout engines by name. Importing this package loads no engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.workers.rollout.base import RolloutEngine

_ENGINES = {"hf": "verl.workers.rollout.hf:HFRollout"}
_NOT_YET = ("vllm", "sglang")


def get_rollout_class(name: str) -> type[RolloutEngine]:
    """The engine that ``rollout.name`` asks for; its module is imported here and nowhere else.

    Raises:
        ValueError: unknown name.
        NotImplementedError: a name that is known but not built yet.
    """
    if name in _NOT_YET:
        raise NotImplementedError(f"actor_rollout_ref.rollout.name={name} is not supported yet. Use rollout.name=hf.")
    if name not in _ENGINES:
        raise ValueError(f"actor_rollout_ref.rollout.name={name!r} is unknown. Known: {', '.join(sorted(_ENGINES))}.")
    module, _, attribute = _ENGINES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
