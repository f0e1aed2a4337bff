"""Public names of `verl.agent_loop`."""

from verl.agent_loop import (
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopOutput,
    AsyncLLMServerManager,
    SingleTurnAgentLoop,
    register,
)

__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopOutput",
    "AsyncLLMServerManager",
    "SingleTurnAgentLoop",
    "register",
]
