"""Agent loops: rollouts that are conversations with tools, users or code."""

from typing import TYPE_CHECKING, Any

from verl.agents import tool_formats as _tool_formats  # noqa: F401 - registers the built-in formats
from verl.agents.base import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    EpisodeStatus,
    SingleTurnAgentLoop,
    register,
)

if TYPE_CHECKING:
    from verl.agents.manager import AgentLoopManager, AsyncLLMServerManager

__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AsyncLLMServerManager",
    "EpisodeStatus",
    "SingleTurnAgentLoop",
    "register",
]


def __getattr__(name: str) -> Any:
    # with a client of rollout servers, and so with aiohttp: only where agent loops run
    if name in ("AgentLoopManager", "AsyncLLMServerManager"):
        from verl.agents import manager

        return getattr(manager, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
