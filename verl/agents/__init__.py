"""Agent loops: what turns the prompt of a row into a response, by asking the rollout servers as often as it likes."""

from verl.agents import tool_formats as _tool_formats  # noqa: F401 - registers the built-in formats
from verl.agents.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, SingleTurnAgentLoop, register
from verl.agents.manager import AgentLoopManager, AsyncLLMServerManager

__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AsyncLLMServerManager",
    "SingleTurnAgentLoop",
    "register",
]
