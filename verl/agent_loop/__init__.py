"""Agent loops: what turns the prompt of a row into a response, by asking the rollout servers as often as it likes."""

from verl.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.agent_loop.manager import AgentLoopManager
from verl.agent_loop.servers import AsyncLLMServerManager
from verl.agent_loop.single_turn import SingleTurnAgentLoop

__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AsyncLLMServerManager",
    "SingleTurnAgentLoop",
    "register",
]
